"""Runs whose tiles were checked by values: the same model is not checked again for inputs of the same sizes.

NOTE [When a check counts again]: what a check says depends on the model, on the input's lengths and dtype, and on how
tiles are cut. A model is the same while its modules, their modes, their plain attributes and its parameters are, and
nothing has been written into a parameter. A function without a module may hold anything, and is checked every time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.inference.tile_check import check_tiles
from vramfit.inference.trial_ways import CheckedRun
from vramfit.torch_internals.tensor_objects import times_written

_KEPT = 8
"""Sizes that are remembered for one model."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Attributes that may decide what a forward pass computes, and are compared in no time."""


def check_once(run: CheckedRun, module: nn.Module | None, seconds: float | None = None) -> None:
    """Check a run's tiles by values, unless the same model has passed with the same sizes.

    Args:
        module: whose forward pass the run's model is; None where it is not known, and the check is made.
        seconds: how long the check may take; None for 30, or what the whole run is expected to take if that is more.

    Raises:
        UsageError: tiles would give another result than the whole run, or there was not enough time to know.
    """
    made = None if module is None else _CheckedCase.of(run, module)
    if module is None or made is None:
        check_tiles(run, seconds)
        return
    passed = _PASSED.setdefault(module, [])
    if any(case.same(made) for case in passed):
        return
    check_tiles(run, seconds)
    passed.append(made)
    del passed[:-_KEPT]


@dataclass(frozen=True, kw_only=True)
class _CheckedCase:
    """What a check depended on.

    Attributes:
        sizes: lengths, tiles, halo, stride and dtype of the run, and the name of the method that runs.
        attributes: plain attributes of all modules, their modes among them.
        tensors: parameters and buffers, which are not kept alive.
        writes: for each parameter, its dtype, its device and how often it has been written to.
        prepare: what is called before the model, not kept alive.
    """

    sizes: tuple[Any, ...]
    attributes: tuple[Any, ...]
    tensors: tuple[weakref.ref[torch.Tensor], ...]
    writes: tuple[Any, ...]
    prepare: weakref.ref[Any] | None

    @classmethod
    def of(cls, run: CheckedRun, module: nn.Module) -> _CheckedCase | None:
        """The case of a run; None where a parameter does not say whether it has been written to."""
        parameters = list(module.parameters())
        if any(parameter.is_inference() for parameter in parameters):
            return None
        layout = run.layout
        return cls(
            sizes=(
                *(layout.spatial, layout.tile, layout.halo, layout.stride, layout.channels),
                # Of more examples it matters whether they change each other, not how many they are.
                *(layout.items > 1 or layout.tile_batch > 1, str(run.given.dtype), run.device),
                *(_name_of(run.model), type(module).forward),
            ),
            attributes=tuple(_attributes(module)),
            tensors=tuple(weakref.ref(one) for one in (*parameters, *module.buffers())),
            writes=tuple((one.dtype, one.device, times_written(one)) for one in parameters),
            prepare=None if run.prepare is None else weakref.ref(run.prepare),
        )

    def same(self, other: _CheckedCase) -> bool:
        """Whether the check of one counts for the other."""
        mine, others = [one() for one in self.tensors], [one() for one in other.tensors]
        return (
            self.sizes == other.sizes
            and self.attributes == other.attributes
            and self.writes == other.writes
            and len(mine) == len(others)
            and all(one is not None and one is another for one, another in zip(mine, others, strict=True))
            and _same_object(self.prepare, other.prepare)
        )


def _same_object(one: weakref.ref[Any] | None, other: weakref.ref[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one() is not None and one() is other()


def _name_of(model: Callable[..., Any]) -> str:
    """A bound method's name; of a module or another callable its class's."""
    return str(getattr(model, "__name__", type(model).__qualname__))


def _attributes(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        yield type(part)
        for name, value in vars(part).items():
            parts = value if isinstance(value, tuple) else (value,)
            if not name.startswith("_") and all(isinstance(one, _PLAIN) for one in parts):
                yield name, value


_PASSED: weakref.WeakKeyDictionary[nn.Module, list[_CheckedCase]] = weakref.WeakKeyDictionary()
