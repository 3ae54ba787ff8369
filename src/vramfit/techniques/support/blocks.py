"""Finds a model's blocks: the parts that repeat, such as transformer layers, bottlenecks and levels of a U-Net.

It says which of them can run a second time and give the same, and of which it pays most to move something over the
link.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.model_profile import ModelBlock
from vramfit.techniques.core.surround import plain_class


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlace:
    """A part of a model whose forward pass can run a second time.

    Attributes:
        path: its name in the model.
        kind: name of its class.
        parts: names in the model of the parts that it consists of, such as attention and MLP: a finer choice.
    """

    path: str
    kind: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedPlace:
    """A part of a model that looks like a block, but must not run a second time.

    Attributes:
        path: its name in the model.
        kind: name of its class.
        reason: why, as the end of a sentence that begins with its name.
    """

    path: str
    kind: str
    reason: str


def find_blocks(model: nn.Module, paths: Iterable[str] = ()) -> tuple[BlockPlace, ...]:
    """The blocks of a model, in the order in which they were made; none contains another.

    Lists of modules (``nn.ModuleList``, ``nn.ModuleDict``, ``nn.Sequential``) are searched first, from the outside:
    members whose class repeats are blocks. A member that is no more than a list itself (a stage of a ResNet or Swin
    transformer) or that contains its own kind (a level of a recursive U-Net) is searched in its turn. Then what
    repeats outside of lists is taken: levels of a U-Net that are attributes. A block holds two layers with a matrix or
    a kernel, or, where there are no such blocks, one.

    What must not be recomputed is left out; `refused_blocks` says why.

    Args:
        paths: names of the blocks instead, or patterns such as ``h.*``; these are checked in the same way.

    Raises:
        UsageError: a path names nothing in the model, one contains another, or one must not be recomputed.
    """
    wanted = tuple(paths)
    if wanted:
        return tuple(_named(model, wanted))
    return tuple(
        _place(path, module) for path, module in _candidates(model) if reason_against_rerun(module) is None
    )


def refused_blocks(model: nn.Module) -> tuple[RefusedPlace, ...]:
    """What looks like a block but must not be recomputed, each with the reason."""
    refused = []
    for path, module in _candidates(model):
        reason = reason_against_rerun(module)
        if reason is not None:
            refused.append(RefusedPlace(path=path, kind=plain_class(module).__name__, reason=reason))
    return tuple(refused)


def checked_module(model: nn.Module, path: str) -> nn.Module:
    """The module of that name, if its forward pass can run a second time.

    Raises:
        UsageError: there is none, it has no forward pass, or it must not be recomputed.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if path not in modules:
        near = difflib.get_close_matches(path, modules, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Names are those of model.named_modules()"
        raise UsageError(f"the model has no module {path!r}", hint)
    module = modules[path]
    if _is_plain_list(module):
        raise UsageError(f"{path} is a list without a forward pass", f"Name what it holds, as {path}.*")
    reason = reason_against_rerun(module)
    if reason is not None:
        raise UsageError(f"{path} cannot be recomputed: {reason}", "Leave it out")
    return module


# -- the search ----------------------------------------------------------------------------------------------------


def _candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What repeats, whether or not it can be recomputed."""
    for weights, alone in ((2, False), (1, False), (2, True)):
        found = _BlockSearch(model, weights=weights, alone=alone).run()
        if found:
            names = model.named_modules(
                remove_duplicate=False
            )  # a block may have several, and be found by any
            order = {path: index for index, (path, _) in enumerate(names)}
            return sorted(found.items(), key=lambda item: order[item[0]])
    return []


class _BlockSearch:
    """One search, with its idea of how much a block has to hold.

    Args:
        weights: of so many layers with a matrix or a kernel; a single one keeps little more than its input.
        alone: whether a member of a list need not repeat (a layer that is called again and again).
    """

    def __init__(self, model: nn.Module, *, weights: int, alone: bool = False) -> None:
        self.model = model
        self.alone = alone
        self.worthy = {
            id(module)
            for module in model.modules()
            if next(module.children(), None) is not None and _holds(module, weights)
        }
        self.inside: dict[int, frozenset[type[nn.Module]]] = {}
        kinds = [plain_class(module) for module in model.modules() if id(module) in self.worthy]
        self.kinds = Counter(kinds)
        self.recursive = {
            plain_class(module)
            for module in model.modules()
            if not _is_list(module) and plain_class(module) in self.classes_in(module)
        }

    def run(self) -> dict[str, nn.Module]:
        """Blocks by their path."""
        chosen: dict[str, nn.Module] = {}
        known: set[int] = set()  # what is chosen and what is in it, under whatever names
        for path, module in self.in_lists("", self.model):
            if id(module) not in known:
                chosen[path] = module
                known.update(id(inner) for inner in module.modules())
        above = {path[:end] for path in chosen for end, sign in enumerate(path) if sign == "."}
        beside = [
            (path, module)
            for path, module in self.model.named_modules()
            if path and path not in above and id(module) not in known and self.is_block(module)
        ]
        nested = {
            id(inner)
            for _, module in beside
            for inner in _below(module)
            if plain_class(inner) is plain_class(module)
        }
        found = [*chosen.values(), *(module for _, module in beside if id(module) not in nested)]
        kinds = Counter(plain_class(module) for module in found)
        taken: tuple[str, ...] = ()
        for path, module in beside:
            if kinds[plain_class(module)] > 1 and not path.startswith(taken):
                chosen[path] = module
                taken = (f"{path}.",)
        return chosen

    def is_block(self, module: nn.Module) -> bool:
        """Whether it could be one, apart from repeating."""
        inside = self.classes_in(module)
        return (
            id(module) in self.worthy
            and not _is_plain_list(module)
            and plain_class(module) not in self.recursive
            and not inside & self.recursive
        )

    def classes_in(self, module: nn.Module) -> frozenset[type[nn.Module]]:
        """The classes of what is below a module, found once for each: models have tens of thousands of modules."""
        if id(module) not in self.inside:
            below = tuple(module.children())
            self.inside[id(module)] = frozenset(map(plain_class, below)).union(*map(self.classes_in, below))
        return self.inside[id(module)]

    def in_lists(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The outermost members of lists whose class repeats."""
        here = self.members(module)
        repeated = max(here.values(), default=0) > 1
        for name, child in module.named_children():
            if id(child) not in self.worthy:
                continue
            place, kind = _join(path, name), plain_class(child)
            again = (
                here[kind] > 1
                or (self.kinds[kind] > 1 and not isinstance(child, nn.Sequential))
                or self.alone
            )
            if _is_list(module) and again and self.is_block(child) and not self.is_stage(child):
                yield place, child
                continue
            inner = list(self.in_lists(place, child))
            yield from inner
            if not inner and _is_list(module) and repeated and self.is_block(child):
                yield place, child  # what stands alone between blocks of a list, as a transition

    def is_stage(self, module: nn.Module) -> bool:
        """Whether it is little more than a list of blocks."""
        lists = [module] if _is_list(module) else [child for child in module.children() if _is_list(child)]
        if not any(max(self.members(child).values(), default=0) > 1 for child in lists):
            return False
        others = [child for child in module.children() if child not in lists]
        return module in lists or sum(next(child.parameters(), None) is not None for child in others) <= 1

    def members(self, module: nn.Module) -> Counter[type[nn.Module]]:
        """How often each class is there among the children that could be blocks."""
        return Counter(plain_class(child) for child in module.children() if id(child) in self.worthy)


def _holds(module: nn.Module, layers: int) -> bool:
    """Whether there are so many layers in it that hold a matrix or a kernel."""
    holding = (inner for inner in module.modules() if any(map(_is_matrix, inner._parameters.values())))
    return sum(1 for _ in islice(holding, layers)) == layers


def _is_matrix(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.dim() > 1


def _below(module: nn.Module) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if inner is not module)


def _is_plain_list(module: nn.Module) -> bool:
    """Whether it has no forward pass, as ``nn.ModuleList``."""
    return plain_class(module).forward is nn.Module.forward


def _is_list(module: nn.Module) -> bool:
    """Whether it only holds other modules, in a row or not."""
    return _is_plain_list(module) or plain_class(module).forward is nn.Sequential.forward


def _place(path: str, module: nn.Module) -> BlockPlace:
    parts = tuple(name for name, part in _parts(path, module) if reason_against_rerun(part) is None)
    return BlockPlace(path=path, kind=plain_class(module).__name__, parts=parts)


def _parts(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if _is_plain_list(child):
            yield from _parts(_join(path, name), child)
        elif next(child.children(), None) is not None and _holds(child, 1):
            yield _join(path, name), child


def _named(model: nn.Module, wanted: tuple[str, ...]) -> Iterator[BlockPlace]:
    names = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    found: list[str] = []
    for pattern in wanted:
        depth = pattern.count(".")  # a star stands for one name, not for a path
        matching = [
            name
            for name in names
            if name == pattern or (name.count(".") == depth and fnmatchcase(name, pattern))
        ]
        if not matching:
            checked_module(model, pattern)
        found += [name for name in matching if name not in found]
    for outer in found:
        inner = next((name for name in found if name.startswith(f"{outer}.")), None)
        if inner is not None:
            raise UsageError(f"the block {outer} contains {inner}", "Name one of the two")
    for path in found:
        yield _place(path, checked_module(model, path))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# -- whether a forward pass can run a second time and give the same ------------------------------------------------


def reason_against_rerun(module: nn.Module) -> str | None:
    """Why a module's forward pass must not run a second time; None where nothing is seen that speaks against it."""
    first = _first_layer(module)
    if getattr(first, "inplace", False) is True:
        return f"its first layer, {plain_class(first).__name__}, changes the block's input in place"
    for path, inner in module.named_modules():
        reason = _reason_of_one(inner)
        if reason is not None:
            return f"{path or plain_class(inner).__name__} {reason}"
    return None


def _reason_of_one(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted"
    if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
        return "draws dropout from cuDNN's own random state, which cannot be restored"
    kind = plain_class(module)
    hooks = (*module._forward_pre_hooks.values(), module)
    if any(type(hook).__name__ in ("SpectralNorm", "_SpectralNorm") for hook in hooks):
        return "changes its buffers in each forward pass (spectral norm)"
    if kind.__module__.startswith(("torch.ao.quantization", "torch.quantization")):
        return "observes values in each forward pass (quantization)"
    if kind.__name__ == "CheckpointWrapper":
        return "is checkpointed already"
    for flag in ("gradient_checkpointing", "use_checkpoint"):
        if getattr(module, flag, False) is True:
            return f"is checkpointed already ({flag} is set)"
    return None


def _first_layer(module: nn.Module) -> nn.Module:
    while plain_class(module).forward is nn.Sequential.forward:
        first = next(module.children(), None)
        if first is None:
            return module
        module = first
    return module


# -- which blocks it pays most to move something of over the link --------------------------------------------------


def best_blocks(
    blocks: list[ModelBlock], count: int, crossing_bytes: Callable[[ModelBlock], int], link: float
) -> list[ModelBlock]:
    """Those that wait least for what crosses, in the order in which they run.

    Equal ones are taken apart from one another, so that the link is never idle.

    Args:
        crossing_bytes: what crosses the link in the forward pass of a block, and again in its backward pass.
        link: bytes per second.
    """

    def waits(block: ModelBlock) -> float:
        crossing = crossing_bytes(block) / link
        waiting = max(0.0, crossing - block.forward_seconds) + max(0.0, crossing - block.backward_seconds)
        return waiting / crossing

    def chosen() -> Iterator[ModelBlock]:
        alike: dict[int, list[ModelBlock]] = {}
        for block in blocks:
            alike.setdefault(block.like, []).append(block)
        left = count
        for kind in sorted(alike.values(), key=lambda same: (waits(same[0]), -crossing_bytes(same[0]))):
            taken = min(left, len(kind))
            yield from (kind[index * len(kind) // taken] for index in range(taken))
            left -= taken

    return sorted(chosen(), key=lambda block: block.index)
