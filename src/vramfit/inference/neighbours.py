"""Whether an entry of a model's output depends on other entries of its input: tried on a few of them.

NOTE [What the probe can see]: a few entries are run several times with the values of others changed, and once in parts.
What couples entries only where there are more of them than were tried (a dilated convolution that reaches further,
a router whose capacity is exceeded) is not seen; what couples them at all in those few entries is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.layers import BatchNorm
from vramfit.workload.containers import mapped_leaves, named_tensors_in, tensors_in

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, and those by name."""

_SAME_RUN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""How far outputs may differ, as a part of the largest, where the same shapes ran with other neighbours."""

_OTHER_RUN = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""The same where the shapes differ too, so that other kernels may have run."""


class Coupling(Enum):
    """What stands in the way of running entries apart.

    Attributes:
        NONE: nothing that the probe saw.
        RANDOM: two equal calls give different outputs.
        NEIGHBOURS: outputs depend on the values of other entries.
        PLACE: outputs depend on where in the input an entry stands, or on how many there are.
        SUMMARY: an output has no entry for each of the input's.
    """

    NONE = "none"
    RANDOM = "random"
    NEIGHBOURS = "neighbours"
    PLACE = "place"
    SUMMARY = "summary"


@dataclass(frozen=True, kw_only=True, slots=True)
class NeighbourReport:
    """What the probe found.

    Attributes:
        why: in one line, without a full stop; empty where nothing couples entries.
        hint: what to do about it.
        entries: how many were tried; 0 where nothing could be.
    """

    coupling: Coupling
    why: str = ""
    hint: str = ""
    entries: int = 0

    def demand_none(self) -> None:
        """Refuse to run entries apart.

        Raises:
            UsageError: something couples them.
        """
        if self.coupling is not Coupling.NONE:
            raise UsageError(self.why, self.hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What is tried, and on how much.

    Attributes:
        dim: the dimension of the entries.
        run: calls the model.
        take: cuts a call to some entries, given their indices.
        entries: how many are tried; of fewer than two nothing can be said.
        extent: how many the call has.
        model: where the reason is looked for; None where the function is no module.
    """

    dim: int
    run: Callable[[Call], Any]
    take: Callable[[Call, torch.Tensor], Call]
    entries: int
    extent: int
    model: nn.Module | None = None


def holds_values(call: Call) -> bool:
    """Whether the tensors of a call have values to be compared: not on the virtual GPU."""
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors_in(call))


def coupled_by_structure(model: nn.Module) -> NeighbourReport | None:
    """What the structure of a model says already: batch norm with the statistics of its input."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and (module.training or module.running_mean is None):
            return NeighbourReport(
                coupling=Coupling.NEIGHBOURS,
                why=f"{name or 'the model'} is a {type(module).__name__} that normalises with the statistics of its "
                "whole input, so that outputs of an entry depend on all others",
                hint="Call model.eval() first, if it has running statistics",
            )
    return None


def probe_neighbours(probe: Probe, call: Call) -> NeighbourReport:
    """Try whether entries of the outputs depend on other entries of the inputs.

    The model runs about seven times on so few entries, in its own mode and without gradients. Buffers that it changes
    and the random numbers that it draws are put back.
    """
    if probe.model is not None and (found := coupled_by_structure(probe.model)) is not None:
        return found
    entries, extent = probe.entries, probe.extent
    if entries < 2:
        return NeighbourReport(coupling=Coupling.NONE)
    with torch.no_grad(), _unchanged(probe.model, call):
        few = probe.take(call, torch.arange(entries))
        plain, again = probe.run(few), probe.run(few)
        # One object for both calls, as a parameter, is nothing that was computed from the entries.
        pairs = zip(named_tensors_in(plain), named_tensors_in(again), strict=False)
        fixed = {path for (path, one), (_, other) in pairs if one is other}
        run = probe.run
        probe = replace(probe, run=lambda some: _without(run(some), fixed))
        plain, again = _without(plain, fixed), _without(again, fixed)
        if not _agree(again, plain, _SAME_RUN):
            return NeighbourReport(
                coupling=Coupling.RANDOM,
                why="two equal calls give different outputs, as with dropout: chunks would draw other numbers",
                hint="Call model.eval() first, or allow it with check=False",
                entries=entries,
            )
        summary = _summary(plain, probe.dim, entries)
        if summary:
            return NeighbourReport(
                coupling=Coupling.SUMMARY,
                why=f"{summary} has no entry for each of the input's along dimension {probe.dim}",
                hint="Compute what sums up all entries from the joined outputs",
                entries=entries,
            )
        shift = entries if extent > entries else 1
        others = probe.take(call, (torch.arange(entries) + shift) % extent)
        return _neighbours(probe, few, others, plain) or _parts(probe, few, plain, entries)


def _neighbours(probe: Probe, few: Call, others: Call, plain: Any) -> NeighbourReport | None:
    """Change the values of some entries, and look at the rest."""
    entries = probe.entries
    numbers = torch.arange(entries)
    halves, parity = numbers < (entries + 1) // 2, numbers % 2 == 0
    for kept in (halves, ~halves, parity, ~parity):
        changed = _altered(few, others, ~kept, probe)
        if not _agree(
            _picked(probe.run(changed), probe.dim, kept), _picked(plain, probe.dim, kept), _SAME_RUN
        ):
            where = _culprit(probe, few, changed, kept)
            axis = "of the batch" if probe.dim == 0 else f"along dimension {probe.dim}"
            return NeighbourReport(
                coupling=Coupling.NEIGHBOURS,
                why=f"outputs of an entry depend on other entries {axis}, as a change of their values shows{where}",
                hint="Cut along another dimension, or in tiles with a halo, windows or layers; name in "
                "whole= what only happens to have the same size",
                entries=entries,
            )
    return None


def _parts(probe: Probe, few: Call, plain: Any, entries: int) -> NeighbourReport:
    """Run two parts, and compare with the whole."""
    middle = (entries + 1) // 2
    for numbers in (torch.arange(middle), torch.arange(middle, entries)):
        kept = torch.zeros(entries, dtype=torch.bool)
        kept[numbers] = True
        try:
            found = probe.run(probe.take(few, numbers))
        except (RuntimeError, ValueError, IndexError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return _place(f"a part of the entries cannot be run alone: {line}", entries)
        if not _agree(found, _picked(plain, probe.dim, kept), _OTHER_RUN):
            return _place(
                "outputs of an entry depend on where it stands, or on how many entries there are", entries
            )
    return NeighbourReport(coupling=Coupling.NONE, entries=entries)


def _place(why: str, entries: int) -> NeighbourReport:
    return NeighbourReport(
        coupling=Coupling.PLACE,
        why=why,
        hint="Give what counts positions as an argument that is cut along, such as position_ids; name in whole= what "
        "only happens to have the same size",
        entries=entries,
    )


# -- values --------------------------------------------------------------------------------------------------------


def _altered(few: Call, others: Call, changed: torch.Tensor, probe: Probe) -> Call:
    """The call with the values of other entries in some of its entries, floating ones with noise besides.

    Whole numbers are indices more often than not: values of other entries are valid ones, made up ones might not be.
    """
    generator = torch.Generator().manual_seed(0)
    at = torch.nonzero(changed)[:, 0]
    # What is cut is found by cutting: a tensor that keeps its shape belongs to all entries.
    one = {path: leaf.shape for path, leaf in named_tensors_in(probe.take(few, at[:1]))}
    values = dict(named_tensors_in(others))

    def leaf(path: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape == one[path]:
            return value
        numbers = at.to(value.device)
        new = values[path].index_select(probe.dim, numbers)
        if value.is_floating_point() or value.is_complex():
            noise = torch.randn(new.shape, generator=generator).to(value.device, value.dtype)
            finite = torch.nan_to_num(value.abs(), posinf=0, neginf=0)
            spread = finite.mean()
            new = new + noise * torch.where(spread > 0, spread, torch.ones_like(spread)).to(value.dtype)
        return value.index_copy(probe.dim, numbers, new)

    altered: Call = mapped_leaves(few, leaf)
    return altered


def _summary(outputs: Any, dim: int, entries: int) -> str:
    """The output that has no entry for each of the input's, in words; empty where all have."""
    for path, tensor in named_tensors_in(outputs):
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != entries:
            name = f"output {path}" if path else "the output"
            return f"{name} of shape {list(tensor.shape)} for {entries} entries"
    return ""


def _without(outputs: Any, paths: set[str]) -> Any:
    """The outputs without some tensors."""
    return mapped_leaves(outputs, lambda path, leaf: None if path in paths else leaf)


def _picked(outputs: Any, dim: int, kept: torch.Tensor) -> Any:
    numbers = torch.nonzero(kept)[:, 0]

    def leaf(_path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.index_select(dim, numbers.to(value.device))
        return value

    return mapped_leaves(outputs, leaf)


def _agree(found: Any, expected: Any, bounds: dict[torch.dtype, float]) -> bool:
    """Whether all tensors agree, floating ones but for rounding."""
    these, those = list(tensors_in(found)), list(tensors_in(expected))
    if len(these) != len(those):
        return False
    return all(_close(one, other, bounds) for one, other in zip(these, those, strict=True))


def _close(one: torch.Tensor, other: torch.Tensor, bounds: dict[torch.dtype, float]) -> bool:
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    bound = bounds.get(other.dtype, bounds[torch.float32])
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    finite = other.abs()[torch.isfinite(other.abs())]
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=bound * largest, equal_nan=True)


# -- the reason ----------------------------------------------------------------------------------------------------


def _culprit(probe: Probe, few: Call, changed: Call, kept: torch.Tensor) -> str:
    """The first part of the model whose outputs change for entries whose inputs do not, in words; or nothing."""
    if probe.model is None:
        return ""
    seen: list[dict[str, tuple[Any, Any]]] = []
    for call in (few, changed):
        record: dict[str, tuple[Any, Any]] = {}
        with _recording(probe, kept, record):
            probe.run(call)
        seen.append(record)
    before, after = seen
    for name, (inputs, outputs) in after.items():
        same_inputs = name in before and _agree(inputs, before[name][0], _SAME_RUN)
        if same_inputs and outputs and not _agree(outputs, before[name][1], _SAME_RUN):
            kind = type(probe.model.get_submodule(name)).__name__
            return f" (first in {name}, a {kind})" if name else f" (in the forward of {kind})"
    return ""


@contextlib.contextmanager
def _recording(probe: Probe, kept: torch.Tensor, record: dict[str, tuple[Any, Any]]) -> Iterator[None]:
    """Note the kept entries of what each part of the model is given and gives, the inner parts first."""
    assert probe.model is not None

    def parts(value: Any) -> list[torch.Tensor]:
        numbers = torch.nonzero(kept)[:, 0]
        return [
            tensor.index_select(probe.dim, numbers.to(tensor.device)).clone()
            for tensor in tensors_in(value)
            if -tensor.dim() <= probe.dim < tensor.dim() and tensor.shape[probe.dim] == probe.entries
        ]

    with contextlib.ExitStack() as stack:
        for name, module in probe.model.named_modules():

            def note(_module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                record.setdefault(name, (parts((args, kwargs)), parts(output)))

            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        yield


@contextlib.contextmanager
def _unchanged(model: nn.Module | None, call: Call) -> Iterator[None]:
    """Put buffers and random numbers back."""
    buffers = [] if model is None else [(buffer, buffer.clone()) for buffer in model.buffers()]
    cards = {tensor.device for tensor in tensors_in(call)} | {buffer.device for buffer, _ in buffers}
    if model is not None:
        cards |= {parameter.device for parameter in model.parameters()}
    indices = sorted({card.index or 0 for card in cards if card.type == "cuda"})
    with torch.random.fork_rng(devices=indices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
