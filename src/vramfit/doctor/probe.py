"""Runs in a child: asks what may crash or hang, and leaves the answer in the job's folder.

Started as ``python -P -m vramfit.doctor.probe JOB`` by `gather`, one process for each question.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from vramfit.doctor.card_accounting import match_card
from vramfit.doctor.facts import NvidiaDriver, Torch, TorchDevice
from vramfit.launch.job import Job


class Question(Enum):
    """What a child finds out."""

    DRIVER = "driver"
    TORCH = "torch"
    VIRTUAL = "virtual"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeJob(Job):
    """A question to a child.

    Attributes:
        question: what it finds out.
        settings: of the allocator, to be tried on torch.
    """

    question: Question
    settings: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverAnswer:
    """The driver and its cards, or why they do not answer."""

    driver: NvidiaDriver | None
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualAnswer:
    """Why the virtual GPU cannot run here; empty if it can."""

    error: str


def query_driver() -> tuple[NvidiaDriver | None, str]:
    """The driver by NVML, else by nvidia-smi; or why neither answers."""
    reason = ""
    try:
        pynvml: Any = importlib.import_module("pynvml")  # nvidia-ml-py, an extra that brings no types
    except ImportError:
        pass
    else:
        from vramfit.doctor.nvidia import query_nvml

        try:
            return query_nvml(pynvml), ""
        except pynvml.NVMLError as error:
            reason = f"NVML: {error}"
    from vramfit.doctor.nvidia import SmiError, query_smi

    try:
        return query_smi(), ""
    except FileNotFoundError:
        return None, reason
    except SmiError as error:
        return None, reason or f"nvidia-smi: {error}"


def query_torch(settings: str = "") -> Torch:
    """What torch was built with, what it says to settings of its allocator, and each card that it sees with a context
    of ours on it."""
    import torch

    settings_error = _try_settings(settings)
    found = Torch(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        architectures=tuple(torch.cuda.get_arch_list()) if torch.version.cuda else (),
        settings_error=settings_error,
    )
    if torch.version.cuda is None and torch.version.hip is None:
        return found
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            torch.cuda.init()
            count, error = torch.cuda.device_count(), ""
        except Exception as failure:
            count, error = 0, _line(failure)
        if not count and not error:
            error = next((_line(warning.message) for warning in told), "")
    devices = tuple(_device(torch, index) for index in range(count))
    return replace(found, count=count, devices=_with_driver(devices), error=error)


def _try_settings(settings: str) -> str:
    """What torch itself says to the settings of the environment, which this process was started without."""
    from vramfit.torch_internals.cuda_memory import settings_setter  # torch is imported late here

    setter = settings_setter()
    if not settings or setter is None:
        return ""
    try:
        setter(settings)
    except Exception as failure:
        return _line(failure)
    return ""


def _device(torch: Any, index: int) -> TorchDevice:
    try:
        torch.empty(1, device=f"cuda:{index}")
        free, total = torch.cuda.mem_get_info(index)
        facts = torch.cuda.get_device_properties(index)
        bus = getattr(facts, "pci_bus_id", None)
        place = "" if bus is None else f"{facts.pci_domain_id:08X}:{bus:02X}:{facts.pci_device_id:02X}.0"
        return TorchDevice(
            index=index,
            name=facts.name,
            uuid=str(getattr(facts, "uuid", "")),
            pci_bus_id=place,
            capability=(facts.major, facts.minor),
            total_bytes=total,
            free_bytes=free,
            reserved_bytes=torch.cuda.memory_reserved(index),
            integrated=bool(facts.is_integrated),
        )
    except Exception as failure:
        return TorchDevice(index=index, name="", error=_line(failure))


def _with_driver(devices: tuple[TorchDevice, ...]) -> tuple[TorchDevice, ...]:
    """The devices with what the driver says while our contexts exist."""
    if not devices:
        return devices
    driver, _ = query_driver()
    found = []
    for device in devices:
        card = match_card(driver.cards if driver else (), device)
        if card is not None:
            own = [process.used_bytes for process in card.processes if process.pid == os.getpid()]
            device = replace(device, driver_used_bytes=card.used_bytes, own_bytes=own[0] if own else None)
        found.append(device)
    return tuple(found)


def query_virtual() -> str:
    """Why the virtual GPU cannot run in a fresh process of this interpreter; empty if it can."""
    from vramfit.errors import VramfitError
    from vramfit.torch_internals import build_check, build_shim
    from vramfit.virtual.gpu import check_interpreter

    try:
        check_interpreter()
        build_shim.install()
        build_check.self_check()
    except VramfitError as error:
        return str(error)
    return ""


def _line(error: object) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def main(job_file: str) -> None:
    """Answer the question of a job."""
    job = ProbeJob.read(job_file)
    if job.question is Question.DRIVER:
        driver, reason = query_driver()
        job.answer(DriverAnswer(driver=driver, error=reason))
    elif job.question is Question.TORCH:
        job.answer(query_torch(job.settings))
    else:
        job.answer(VirtualAnswer(error=query_virtual()))
    os._exit(0)  # autograd's threads could abort an interpreter that ends in the ordinary way


if __name__ == "__main__":
    main(sys.argv[1])
