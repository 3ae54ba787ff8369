"""Surrounded modules: identity, state, copies and pickles stay as they were."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.surround import plain_class, release, surround, surroundings_of


class Twice:
    """Runs the forward pass and doubles it."""

    def __call__(
        self, _module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return 2 * forward(*args, **kwargs)


class PlusOne:
    """Adds one to the output."""

    def __call__(
        self, _module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(*args, **kwargs) + 1


def test_the_later_one_is_outside() -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain = module(x)
    surround(module, Twice())
    surround(module, PlusOne())
    assert torch.equal(module(x), 2 * plain + 1)


def test_everything_is_as_before_after_the_release() -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain, attributes = module(x), set(vars(module))
    first, second = Twice(), PlusOne()
    surround(module, first)
    surround(module, second)
    release(module, first)
    assert torch.equal(module(x), plain + 1)
    release(module, second)
    assert torch.equal(module(x), plain)
    assert type(module) is nn.Linear
    assert set(vars(module)) == attributes


def test_names_class_and_signature_stay() -> None:
    module = nn.Linear(3, 2)
    keys, signature = list(module.state_dict()), inspect.signature(module.forward)
    surround(module, Twice())
    assert list(module.state_dict()) == keys
    assert isinstance(module, nn.Linear)
    assert type(module).__name__ == "Linear"
    assert plain_class(module) is nn.Linear
    assert inspect.signature(module.forward) == signature


def test_a_deep_copy_runs_its_own_parameters() -> None:
    module, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    surround(module[0], Twice())
    other = copy.deepcopy(module)
    before = other(x)
    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(other(x), before)
    assert not torch.equal(module(x), before)


def test_a_saved_module_is_loaded_surrounded() -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    surround(module, Twice())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), module(x))
    assert [type(around) for around in surroundings_of(loaded)] == [Twice]
    release(loaded, surroundings_of(loaded)[0])
    assert type(loaded) is nn.Linear


def test_a_forward_that_was_put_onto_the_instance_is_kept() -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    module.forward = lambda y: y.sum()  # type: ignore[method-assign]
    around = Twice()
    surround(module, around)
    assert torch.equal(module(x), 2 * x.sum())
    release(module, around)
    assert torch.equal(module(x), x.sum())


def test_hooks_run_around_it() -> None:
    module, seen = nn.Linear(3, 2), []
    module.register_forward_hook(lambda _m, _i, output: seen.append(output.detach().clone()))
    surround(module, PlusOne())
    output = module(torch.randn(4, 3))
    assert torch.equal(seen[0], output)


def test_a_scripted_module_is_refused() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):  # the latter since 2.14
        module = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(UsageError, match="scripted"):
        surround(module, Twice())
