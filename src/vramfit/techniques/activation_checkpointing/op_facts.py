"""What is known of the ops of a block, and the specs by which they are chosen.

A spec names ops: ``addmm``, its third call ``addmm#2``, ``_scaled_dot_product_*``, or a preset such as ``matmuls``.

NOTE [Keeping results exactly]: ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` keeps what a policy
says and gives it out again in the second run. Taken alone it changes results in four cases, which are handled here:

1. An op draws random numbers and is kept. It does not run a second time, so that all later draws of the second
   run would differ. The random state after it is remembered and set.
2. A kept result is changed in place afterwards (``relu_`` after a convolution). The change is kept with it, and
   does not run a second time; torch refuses this case. Where somebody read the first value, there is an error.
3. An op that changes its argument in place is named, but what it changes is not kept. The second run would get
   memory that nobody wrote to. Such an op runs again.
4. Under autocast a parameter's copy in lower precision is cached. A second module that uses the parameter finds the
   copy in the forward pass, but makes it anew in the second run, where torch finds an op too many. Such copies are
   not counted.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from vramfit.errors import UsageError
from vramfit.torch_internals.autograd_engine import save_past_hooks
from vramfit.torch_internals.dispatch import (
    DispatchKey,
    SetExcludeDispatchKeyGuard,
    TorchDispatchMode,
    all_op_names,
)

CAST = torch.ops.aten._to_copy.default
"""What autocast calls to make a copy in lower precision."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is known of an op.

    Attributes:
        name: without its overload: ``addmm``.
        changes: its arguments that it changes in place, each with its place and its name.
        is_view: whether it gives a view of its argument.
        draws: whether it may draw random numbers.
    """

    name: str
    changes: tuple[tuple[int, str], ...]
    is_view: bool
    draws: bool


_NAMESPACES = ("aten", "prims")


def repeats(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a second call gives the same: torch's own ops do nothing but compute, unlike collectives and others.

    What draws random numbers repeats where it is known from which generator before it runs: the default one of the CPU,
    or of the device of its arguments.
    """
    if getattr(op, "namespace", None) not in _NAMESPACES:
        return False
    if not op_facts(op).draws:
        return True
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        return False
    device = torch.device(kwargs.get("device") or "cpu")
    return device.type == "cpu" or any(True for _ in tensors_in((args, kwargs)))


@functools.cache
def op_facts(op: Any) -> OpFacts:
    """What is known of an op."""
    schema = getattr(op, "_schema", None)  # higher-order ops have none
    arguments = schema.arguments if schema is not None else ()
    text: str = schema.name if schema is not None else str(op)
    return OpFacts(
        name=text.rpartition("::")[2],
        changes=tuple(
            (index, argument.name)
            for index, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        is_view=bool(getattr(op, "is_view", False)),
        draws=torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()),
    )


def changed_arguments(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op changes in place."""
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in facts.changes]


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, and with its count of changes in place (_detach_helper in checkpoint.py)."""
    with SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments or results: called for each op, so without a general walk."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


def is_cached_by_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast caches this tensor's copy: a leaf that needs gradients (aten/src/ATen/autocast_mode.cpp)."""
    return tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


# -- the state of random generators --------------------------------------------------------------------------------


class RandomState:
    """The state of the generators: the CPU's, and those of the devices that some tensors are on."""

    def __init__(self, cpu: torch.Tensor, devices: list[int], states: list[torch.Tensor], kind: str) -> None:
        self.cpu = cpu
        self.devices = devices
        self.states = states
        self.kind = kind

    @classmethod
    def now(cls, tensors: Iterable[torch.Tensor]) -> RandomState:
        """The present state of the generators."""
        tensors = list(tensors)
        kind = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        devices, states = get_device_states(*tensors)
        return cls(torch.get_rng_state(), devices, states, kind)

    def set(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.kind != "cpu":
            set_device_states(self.devices, self.states, device_type=self.kind)

    def __eq__(self, other: object) -> bool:
        """Whether nothing was drawn between the two."""
        return (
            isinstance(other, RandomState)
            and self.devices == other.devices
            and torch.equal(self.cpu, other.cpu)
            and all(torch.equal(mine, its) for mine, its in zip(self.states, other.states, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # states are compared, never looked up


# -- specs ---------------------------------------------------------------------------------------------------------

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_scaled_mm", "_grouped_mm", "linear")
_CONVOLUTIONS = ("convolution", "cudnn_convolution*", "mkldnn_convolution")
_ATTENTION = ("_scaled_dot_product_*", "_flash_attention_forward", "_efficient_attention_forward")


PRESETS = {
    "matmuls": _PRODUCTS,
    "convolutions": _CONVOLUTIONS,
    "attention": _ATTENTION,
    "expensive": (*_PRODUCTS, *_CONVOLUTIONS, *_ATTENTION),
}
"""Names for groups of ops."""


def check_specs(specs: Iterable[str]) -> None:
    """Make sure that specs of ops mean something.

    Raises:
        UsageError: one is written otherwise, or no op has such a name.
    """
    for spec in specs:
        name, sign, ordinal = spec.partition("#")
        if not name or (sign and not ordinal.isdecimal()) or (sign and name in PRESETS):
            raise UsageError(
                f"{spec!r} names no op to keep",
                f"Write an aten op (addmm), its n-th call from 0 on (addmm#2), a pattern, or {', '.join(PRESETS)}",
            )
        if name in PRESETS or any(fnmatchcase(known, name) for known in _all_ops()):
            continue
        near = difflib.get_close_matches(name, (*PRESETS, *_all_ops()), n=1)
        hint = f"Did you mean {near[0]}?" if near else "Give the name of an aten op"
        raise UsageError(f"torch has no op {name!r} to keep", hint)


@functools.cache
def _all_ops() -> frozenset[str]:
    """The names of all ops that are known now, without overloads."""
    names = all_op_names()
    return frozenset(name.rpartition("::")[2].partition(".")[0] for name in names)


def op_specs(names: Iterable[str]) -> tuple[str, ...]:
    """The ops of a block, in the order in which they run, each as the spec that means it alone: ``addmm#0``."""
    seen: Counter[str] = Counter()
    specs = []
    for name in names:
        specs.append(f"{name}#{seen[name]}")
        seen[name] += 1
    return tuple(specs)


def keeps(specs: Iterable[str], names: Iterable[str]) -> list[bool]:
    """Of each op of a block, in the order in which they run, whether these specs keep it."""
    matcher = Matcher(specs)
    return [matcher.wants(name) for name in names]


class Matcher:
    """Counts ops as they come, and says which are meant."""

    def __init__(self, specs: Iterable[str]) -> None:
        self.patterns: list[tuple[str, int | None]] = []
        for spec in specs:
            for pattern in PRESETS.get(spec, (spec,)):
                name, _, ordinal = pattern.partition("#")
                self.patterns.append((name, int(ordinal) if ordinal else None))
        self._matching: dict[str, list[int]] = {}
        self._seen = [0] * len(self.patterns)

    def wants(self, name: str) -> bool:
        """Whether the next op, of that name, is meant."""
        matching = self._matching.get(name)
        if matching is None:
            matching = [i for i, (pattern, _) in enumerate(self.patterns) if fnmatchcase(name, pattern)]
            self._matching[name] = matching
        found = False
        for index in matching:
            ordinal = self.patterns[index][1]
            found |= ordinal is None or ordinal == self._seen[index]
            self._seen[index] += 1
        return found


# -- Which results of a recomputed block are kept all the same: selective activation checkpointing -----------


class Keeping:
    """What one call of a block keeps: the modes for its two runs."""

    def __init__(self, specs: Iterable[str], path: str) -> None:
        # The modes hold the policy and what is kept; nothing leads back from there, so that all goes with the graph.
        self._policy = _Policy(specs, path)
        caching, cached = create_selective_checkpoint_contexts(self._policy, allow_cache_entry_mutation=True)
        save_past_hooks(caching)
        self.forward = _Delegate(caching, self._policy, again=False)
        self.again = _Delegate(cached, self._policy, again=True)

    def close(self) -> None:
        """The forward pass is over: what is kept must not change any more."""
        self._policy.close()

    def check(self) -> None:
        """Before the second run.

        Raises:
            RuntimeError: what was kept has been changed in place since the forward pass.
        """
        self._policy.check()


class _Policy:
    """Decides op by op."""

    def __init__(self, specs: Iterable[str], path: str) -> None:
        self.random: dict[str, dict[int, RandomState]] = {}
        self._matcher = Matcher(specs)
        self._path = path
        self._kept: dict[int, _Kept] = {}
        self._calls: Counter[str] = Counter()
        self._state: RandomState | None = None
        self._coming: str | None = None  # the op whose result is to be kept
        self._drawing: tuple[str, Any, bool] | None = (
            None  # the op that draws, its arguments, and whether it is kept
        )
        self._decided: defaultdict[Any, deque[CheckpointPolicy]] = defaultdict(deque)

    def pass_by(self, op: Any) -> None:
        """An op runs that is never kept; it counts as a call."""
        self._matcher.wants(op_facts(op).name)

    def close(self) -> None:
        """Remember how often each kept result was changed."""
        for kept in self._kept.values():
            kept.version = kept.alias._version

    def check(self) -> None:
        """Compare, and let the aliases go."""
        for kept in self._kept.values():
            if kept.alias._version != kept.version:
                raise RuntimeError(
                    f"the result of {kept.name}, kept from the forward pass of {self._path}, was changed in place "
                    "after it; keep another op there"
                )
        self._kept.clear()

    def __call__(
        self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Whether an op's result is kept."""
        if context.is_recompute:  # torch before 2.13 asks again in the second run
            return self._decided[op].popleft()
        facts = op_facts(op)
        wanted = self._matcher.wants(facts.name)
        changed: list[_Kept] = []
        if facts.changes:
            changed = list(self._touched(changed_arguments(facts, args, kwargs)))
            self._refuse_if_read(facts.name, changed)
            wanted = bool(changed)
        elif wanted:
            self._coming = facts.name
        if not facts.is_view:
            for kept in self._touched((args, kwargs)):
                kept.read = kept.read or kept not in changed
        self._drawing = (facts.name, args, wanted) if facts.draws else None
        policy = CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.MUST_RECOMPUTE
        self._decided[op].append(policy)
        return policy

    def made(self, output: Any) -> None:
        """An op has run: until 2.11 torch asks about it before, since 2.12 afterwards."""
        if self._drawing is not None:
            name, args, kept = self._drawing
            self._drawing = None
            self._remember_state(name, args, kept=kept)
        if self._coming is not None:
            name, self._coming = self._coming, None
            self._keep(name, output)

    def _keep(self, name: str, output: Any) -> None:
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._kept:
                self._kept[storage] = _Kept(name, alias_of(tensor))

    def _touched(self, values: Any) -> Iterator[_Kept]:
        for tensor in tensors_in(values) if self._kept else ():
            kept = self._kept.get(tensor.untyped_storage()._cdata)
            if kept is not None:
                yield kept

    def _refuse_if_read(self, name: str, changed: list[_Kept]) -> None:
        for kept in changed:
            if kept.read:
                raise UsageError(
                    f"{self._path} keeps the result of {kept.name}, but {name} changes it in place after it was read",
                    f"Keep another op there in place of {kept.name}",
                )

    def _remember_state(self, name: str, args: Any, *, kept: bool) -> None:
        state = RandomState.now(tensors_in(args))
        if kept and self._state != state:
            self.random.setdefault(name, {})[self._calls[name]] = state
        self._state = state
        self._calls[name] += 1


class _Kept:
    """A result that is kept."""

    def __init__(self, name: str, alias: torch.Tensor) -> None:
        self.name = name
        self.alias = alias
        self.version = alias._version
        self.read = False


class _Delegate(TorchDispatchMode):
    """Hands ops on to a mode of torch's that is not entered itself, so that an op can pass it by."""

    def __init__(self, mode: Any, policy: _Policy, *, again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._policy = policy
        self._again = again
        self._calls: Counter[str] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is CAST and is_cached_by_autocast(args[0]):
            if not self._again:
                self._policy.pass_by(func)
            return func(*args, **(kwargs or {}))
        out = self._mode.__torch_dispatch__(func, types, args, kwargs)
        if not self._again:
            self._policy.made(out)
        if self._again and self._policy.random and op_facts(func).draws:
            name = op_facts(func).name
            state = self._policy.random.get(name, {}).get(self._calls[name])
            self._calls[name] += 1
            if state is not None:
                state.set()
        return out
