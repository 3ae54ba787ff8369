"""The cards of this machine as the NVIDIA driver sees them: bytes of a process and its neighbours, heat and power."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any

from vramfit.watching.watch_reading import CardNeighbour, CardState

_GPU_SENSOR = 0
"""nvml.h: NVML_TEMPERATURE_GPU."""


class CardProbe:
    """Looks at cards through NVML.

    Args:
        nvml: the module ``pynvml`` of nvidia-ml-py, already started.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in self._handles]

    def look(self, family: Collection[int]) -> tuple[CardState, ...]:
        """The cards now.

        Args:
            family: numbers of the watched process and its children. Cards that none of them is on are told all the
                same where none is on any, since a container hides numbers.
        """
        cards = [self._card(index, handle, frozenset(family)) for index, handle in enumerate(self._handles)]
        used = [card for card in cards if card.own]
        return tuple(used or cards)

    def close(self) -> None:
        """Let go of the driver."""
        self._nvml.nvmlShutdown()

    def _card(self, index: int, handle: Any, family: frozenset[int]) -> CardState:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        found: dict[int, int | None] = {}
        for question in (
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
            nvml.nvmlDeviceGetComputeRunningProcesses,
        ):
            for process in self._ask(question, handle) or ():
                used = process.usedGpuMemory
                found[int(process.pid)] = None if used is None else int(used)
        own = [used for pid, used in found.items() if pid in family]
        neighbours = tuple(
            CardNeighbour(pid=pid, name=_text(self._ask(nvml.nvmlSystemGetProcessName, pid) or ""), used=used)
            for pid, used in sorted(found.items())
            if pid not in family
        )
        return CardState(
            index=index,
            name=self._names[index],
            total=0 if memory is None else int(memory.total),
            used=0 if memory is None else int(memory.used),
            free=0 if memory is None else int(memory.free),
            own=sum(one for one in own if one is not None) if own and None not in own else None,
            neighbours=neighbours,
            temperature=self._ask(nvml.nvmlDeviceGetTemperature, handle, _GPU_SENSOR),
            watts=_watts(self._ask(nvml.nvmlDeviceGetPowerUsage, handle)),
            watts_limit=_watts(self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """An answer; None where the card or a virtual machine does not give it."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def card_probe() -> tuple[CardProbe | None, str]:
    """The probe of this machine's cards; None, with the reason, where there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed: pip install 'vramfit[nvml]'"
    try:
        nvml.nvmlInit()
        return CardProbe(nvml), ""
    except nvml.NVMLError as error:
        return None, f"NVML does not answer: {error}"


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: Any) -> str:
    """Older versions of the library give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
