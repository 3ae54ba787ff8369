"""What formats of weights take on a virtual card in this process, for benchmarks that ask many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from vramfit.gpus import find_gpu
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.quantization.format_trial import ModelUse, format_table, run_formats, try_formats
from vramfit.techniques.quantization.byte_program import FormatTable
from vramfit.techniques.quantization.weight_formats import WeightFormat


class BytesHere:
    """The bytes of a model on a virtual card, remembered by choice.

    Args:
        make: makes the model on the CPU; values do not matter.
    """

    def __init__(self, make: Callable[[], nn.Module], question: ModelUse, card: str) -> None:
        self.spec = find_gpu(card)
        self.device = VirtualBackend(self.spec)
        self._make, self._question = make, question
        self._known: dict[tuple[tuple[str, str], ...], int] = {}

    def table(self, formats: Sequence[WeightFormat]) -> FormatTable:
        """See `vramfit.planner.quantization.format_choice.Bytes`."""
        return format_table(self.device, self._make, self._question, formats)

    def reserved(
        self, choices: Sequence[Mapping[str, WeightFormat]], limit: int, enough: int
    ) -> Sequence[int]:
        """See `vramfit.planner.quantization.format_choice.Bytes`."""
        found: list[int] = []
        for chosen in choices:
            key = tuple(sorted((name, one.value) for name, one in chosen.items()))
            if key not in self._known:
                tried = try_formats(self.device, self._make, self._question, [chosen], limit, 1)
                self._known[key] = tried.reserved[0]
            found.append(self._known[key])
            if sum(one <= limit for one in found) >= enough:
                break
        return found

    def allocated(self, chosen: Mapping[str, WeightFormat]) -> tuple[int, int]:
        """Peaks of a run of its own: bytes of tensors, and reserved."""
        cost = run_formats(self.device, self._make, self._question, chosen)
        return cost.peak_allocated_bytes, cost.peak_reserved_bytes

    def runs_within(self, chosen: Mapping[str, WeightFormat], budget: int) -> bool:
        """Whether it runs on a card that has the budget beside the context, where more is refused."""
        total = budget + self.spec.typical_context_bytes
        return run_formats(self.device, self._make, self._question, chosen, budget=total).fits
