"""Asks another process, on the virtual GPU, about a live model: for which card, within what, and what is remembered."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vramfit.arguments import size_argument
from vramfit.errors import UnknownGpuError, UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.planner.asking import PackedTarget, job_of, once
from vramfit.planner.packed_model import pack
from vramfit.planner.planner_job import MARGIN, DeviceMemory
from vramfit.planner.planner_questions import PlannerQuestion, Result
from vramfit.planner.resident_child import ResidentChild, resident_child

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveModel:
    """A model in this process, and where what is asked about it has to fit.

    Attributes:
        device: where the model computes.
        budget: bytes that torch may reserve on the device, the model included; None for what is free there, less 2 %.
        gpu: the card that is asked about; None for the device's own.
    """

    model: nn.Module
    device: torch.device
    budget: str | float | None = None
    gpu: str | os.PathLike[str] | GpuSpec | None = None

    def memory(self) -> DeviceMemory:
        """The card, and what torch may reserve there.

        Raises:
            UsageError: the device's own card is none that vramfit knows, or it is the CPU and no budget was given.
        """
        card = _card(self.device, self.gpu)
        limit = _limit(self.model, self.device, card, self.budget, own=self.gpu is None)
        return DeviceMemory(device="cpu" if card is None else "cuda", gpu=card, budget=limit)

    def packed(self, question: Any, folder: Path) -> PackedTarget:
        """Put the model's structure down in a folder, with what is asked about it or how it is used.

        Raises:
            UsageError: it cannot go to another process.
        """
        target = pack(self.model, question, folder)
        content = Path(target.rpartition(":")[0]).with_suffix(".pickle").read_bytes()
        return PackedTarget(target=target, digest=hashlib.sha256(content).hexdigest())


class LiveAnswers:
    """What one process answers about a model and a use of it; it is started at the first question."""

    def __init__(
        self, packed: PackedTarget, memory: DeviceMemory, progress: Progress | None, stack: ExitStack
    ) -> None:
        self._packed, self._memory = packed, memory
        self._progress, self._stack = progress, stack
        self._child: ResidentChild | None = None

    def ask(self, question: PlannerQuestion[Result]) -> Result:
        """The answer to a question of plain values; the same is asked once in a process.

        Raises:
            UsageError: nothing fits.
            VramfitError: the model fails.
        """
        job = job_of(question, self._packed.target, self._memory)
        return once(self._packed, job, lambda: self._resident().ask(job, question.result_type()))

    def _resident(self) -> ResidentChild:
        if self._child is None:
            if self._progress is not None:
                self._progress("starting a process with the virtual card")
            child = resident_child(self._packed.target, self._memory, self._progress)
            self._child = self._stack.enter_context(child)
        return self._child


@contextmanager
def live_answers(live: LiveModel, use: Any, progress: Progress | None) -> Iterator[LiveAnswers]:
    """Ask one other process several questions about a model.

    Args:
        use: what questions need to run it, which `QuestionContext.packed` gives them.

    Raises:
        UsageError: the model or its use cannot go to another process.
    """
    memory = live.memory()
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="vramfit-"))
        yield LiveAnswers(live.packed(use, Path(name)), memory, progress, stack)


def _card(device: torch.device, gpu: str | os.PathLike[str] | GpuSpec | None) -> GpuSpec | None:
    """The card that is asked about; None for the CPU.

    Raises:
        UsageError: the device's own card is none that vramfit knows.
    """
    if gpu is not None:
        return find_gpu(gpu)
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    try:
        return replace(find_gpu(name), total_bytes=torch.cuda.mem_get_info(device)[1])
    except UnknownGpuError as error:
        raise UsageError(
            f"the card {name} is not in the catalogue", "Say which one comes near: gpu=, or give tile="
        ) from error


def _limit(
    model: nn.Module, device: torch.device, card: GpuSpec | None, budget: str | float | None, *, own: bool
) -> int:
    """Bytes that torch may reserve.

    Raises:
        UsageError: it is for the CPU, and no budget was given.
    """
    if budget is not None:
        return size_argument("budget", budget)
    if card is None:
        raise UsageError(
            "nothing says how large the parts of the input may be",
            'Give their size, or a budget such as budget="2GiB"',
        )
    if not own or device.type != "cuda":
        return card.total_bytes - card.typical_context_bytes - round(MARGIN * card.total_bytes)
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    there = sum(one.nbytes for one in {*model.parameters(), *model.buffers()} if one.device == device)
    return max(1, free + held + there - round(MARGIN * total))
