"""One family: built, trained for a step, run without gradients, asked to generate; on the CPU or the virtual GPU."""

from __future__ import annotations

import contextlib
import gc
import resource
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import vramfit
from transformer_families.batches import batch_for
from transformer_families.kinds import Kind, families, kind_of
from transformer_families.overrides import OVERRIDES, SILENT, UNTRAINED
from transformer_families.realistic import configuration
from transformer_families.sizes import tiny
from vramfit.trace import EventKind, MemoryTrace

Step = Callable[[nn.Module, dict[str, Any], dict[str, Any]], None]

CARD = "1TiB"
GENERATES = (Kind.CAUSAL_LM, Kind.SEQ_TO_SEQ, Kind.SPEECH_TO_TEXT, Kind.IMAGE_TEXT)


def build(name: str) -> tuple[nn.Module, dict[str, Any], Kind]:
    """A tiny model of a family on the CPU with a batch for it."""
    torch.manual_seed(0)
    if name.startswith("realistic:"):
        class_name, config = configuration(name.removeprefix("realistic:"))
        kind = kind_of(class_name)
    else:
        kind, class_name = families()[name]
        config = tiny(name, OVERRIDES.get(name, {}))
    model = getattr(transformers, class_name)(config)
    return model, batch_for(model, kind), kind


def on_virtual_gpu(name: str) -> dict[str, Any]:
    """What happens to a family on the virtual GPU."""
    started, held = time.perf_counter(), _most_resident()
    with vramfit.VirtualGPU(CARD if name.startswith("realistic:") else "A100 80GB", alloc_conf="") as gpu:
        result = _try(name, "cuda", gpu)
    facts = gpu.run
    result["peak_bytes"] = facts.devices[0].peak_allocated_bytes
    result["warnings"] = sorted({warning.code for warning in facts.warnings})
    result["seconds"] = round(time.perf_counter() - started, 2)
    result["resident_bytes"] = _most_resident() - held
    gc.collect()
    return result


def _most_resident() -> int:
    """Most memory that this process has held so far, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_cpu(name: str) -> dict[str, Any]:
    """The same for real on the CPU."""
    return _try(name, "cpu", None)


def _try(name: str, device: str, gpu: vramfit.VirtualGPU | None) -> dict[str, Any]:
    result: dict[str, Any] = {"family": name, "device": device}
    try:
        model, batch, kind = build(name)
        model.to(device)
        batch = {key: _moved(value, device) for key, value in batch.items()}
    except Exception as error:
        return result | {"build": describe(error)}
    result["class"] = type(model).__name__
    result["parameters"] = sum(p.numel() for p in model.parameters())
    if name in UNTRAINED:
        result["untrained"] = UNTRAINED[name]
    for step in _steps(name, model, kind):
        label = step.__name__.removeprefix("_")
        if gpu is not None:
            torch.cuda.reset_peak_memory_stats()
        try:
            step(model, batch, result)
            result[label] = "ok"
        except Exception as error:
            result[label] = describe(error)
        if gpu is not None:
            result[f"{label}_bytes"] = torch.cuda.max_memory_allocated()
    if result["infer"] == "ok" and not name.startswith("realistic:"):
        result["live_bytes"] = _live(model, batch, gpu)
    return result


def _steps(name: str, model: nn.Module, kind: Kind) -> list[Step]:
    steps: list[Step] = [] if name in UNTRAINED else [_train]
    steps.append(_infer)
    if kind in GENERATES and name not in SILENT and model.can_generate():
        steps.append(_generate)
    return steps


def _live(model: nn.Module, batch: dict[str, Any], gpu: vramfit.VirtualGPU | None) -> int | None:
    """Most bytes that the tensors of a pass without gradients take at once.

    Attention is spelled out in plain operators, so that the CPU and the card run the same ones.
    """
    with contextlib.suppress(Exception):  # a family may have one form of attention, or none
        model.set_attn_implementation("eager")
    try:
        if gpu is not None:
            start = len(gpu.trace)
            with torch.no_grad():
                model(**batch)
            return requested_peak(gpu.trace, start)
        with torch.no_grad(), LiveBytes() as counted:
            model(**batch)
        return counted.peak
    except Exception:  # not every family has the plain form
        return None


def _moved(value: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _train(model: nn.Module, batch: dict[str, Any], result: dict[str, Any]) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = _loss(model(**batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    result["loss"] = str(loss.dtype)


def _loss(outputs: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    first = next(t for t in _flat(outputs) if t.is_floating_point() and t.requires_grad)
    return first.float().square().mean()


def _infer(model: nn.Module, batch: dict[str, Any], result: dict[str, Any]) -> None:
    model.eval()
    with torch.no_grad():
        outputs = model(**batch)
    result["outputs"] = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _flat(outputs)]


def _generate(model: nn.Module, batch: dict[str, Any], result: dict[str, Any]) -> None:
    given = {key: value for key, value in batch.items() if not key.startswith(("labels", "decoder_"))}
    with torch.no_grad():
        tokens = model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    result["generated"] = list(tokens.shape)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _flat(item)] if isinstance(value, (list, tuple)) else []


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


class LiveBytes(TorchDispatchMode):
    """Sums the storages that operators create, for as long as they live.

    Attributes:
        live: bytes alive now.
        peak: most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given | self._known:
                self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self.live += size
        self._known.add(key)

        def gone() -> None:
            self.live -= size
            self._known.discard(key)

        weakref.finalize(storage, gone)


def requested_peak(trace: MemoryTrace, start: int) -> int:
    """Most bytes that tensors born since an event had requested at once.

    Without what only a card has: workspaces, and temporaries inside kernels.

    Args:
        trace: of the virtual GPU.
        start: the first event that counts.
    """
    live: dict[int, int] = {}
    total = peak = 0
    for row in range(start, len(trace)):
        kind, address = trace.kind[row], int(trace.address[row])
        if kind == EventKind.ALLOC and trace.tensor[row] >= 0:
            live[address] = int(trace.size[row])
            total += live[address]
            peak = max(peak, total)
        elif kind == EventKind.FREE_REQUESTED:
            total -= live.pop(address, 0)
    return peak
