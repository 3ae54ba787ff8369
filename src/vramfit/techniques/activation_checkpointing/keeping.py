"""Which results of a recomputed block are kept all the same: selective activation checkpointing.

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

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from vramfit.errors import UsageError
from vramfit.techniques.activation_checkpointing.specs import Matcher

_CAST = torch.ops.aten._to_copy.default
_SEEDED = torch.Tag.nondeterministic_seeded


class Keeping:
    """What one call of a block keeps: the modes for its two runs.

    Args:
        specs: what is kept.
        path: the block's name, for errors.
    """

    def __init__(self, specs: Iterable[str], path: str) -> None:
        # The modes hold the policy and what is kept; nothing leads back from there, so that all goes with the graph.
        self._policy = _Policy(specs, path)
        caching, cached = create_selective_checkpoint_contexts(self._policy, allow_cache_entry_mutation=True)
        self.forward = _Delegate(caching)
        self.again = _Delegate(cached, self._policy.random)

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
    """Decides op by op.

    Args:
        specs: what is kept.
        path: the block's name, for errors.
    """

    def __init__(self, specs: Iterable[str], path: str) -> None:
        self.random: dict[str, dict[int, _RandomState]] = {}
        self._matcher = Matcher(specs)
        self._path = path
        self._kept: dict[int, _Kept] = {}
        self._calls: Counter[str] = Counter()
        self._state: _RandomState | None = None
        self._decided: defaultdict[Any, deque[CheckpointPolicy]] = defaultdict(deque)

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
        name = _name(op)
        wanted = self._matcher.wants(name)
        changed = list(self._touched(_changed_arguments(op, args, kwargs)))
        if _changes_an_argument(op):
            wanted = bool(changed)
            self._refuse_if_read(name, changed)
        elif wanted:
            self._keep(name, context.op_output)
        if not getattr(op, "is_view", False):
            for kept in self._touched((args, kwargs)):
                kept.read = kept.read or kept not in changed
        if _SEEDED in getattr(op, "tags", ()):
            self._remember_state(name, args, kept=wanted)
        policy = CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.MUST_RECOMPUTE
        self._decided[op].append(policy)
        return policy

    def _keep(self, name: str, output: Any) -> None:
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._kept:
                self._kept[storage] = _Kept(name, _alias(tensor))

    def _touched(self, values: Any) -> Iterator[_Kept]:
        for tensor in _tensors(values) if self._kept else ():
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
        state = _RandomState.now(args)
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


class _RandomState:
    """The state of the generators: the CPU's, and those of the devices that some tensors are on."""

    def __init__(self, cpu: torch.Tensor, devices: list[int], states: list[torch.Tensor], kind: str) -> None:
        self.cpu = cpu
        self.devices = devices
        self.states = states
        self.kind = kind

    @classmethod
    def now(cls, values: Any) -> _RandomState:
        """The present one."""
        tensors = list(_tensors(values))
        kind = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        devices, states = get_device_states(*tensors)
        return cls(torch.get_rng_state(), devices, states, kind)

    def set(self) -> None:
        """Make it the present one."""
        torch.set_rng_state(self.cpu)
        if self.kind != "cpu":
            set_device_states(self.devices, self.states, device_type=self.kind)

    def __eq__(self, other: object) -> bool:
        """Whether nothing was drawn between the two."""
        return (
            isinstance(other, _RandomState)
            and self.devices == other.devices
            and torch.equal(self.cpu, other.cpu)
            and all(torch.equal(mine, its) for mine, its in zip(self.states, other.states, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # states are compared, never looked up


class _Delegate(TorchDispatchMode):
    """Hands ops on to a mode of torch's that is not entered itself, so that an op can pass it by.

    Args:
        mode: made by ``create_selective_checkpoint_contexts``.
        random: the state to set after the n-th call of an op that draws random numbers, in the second run.
    """

    def __init__(self, mode: Any, random: dict[str, dict[int, _RandomState]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._random = random if random is not None else {}
        self._calls: Counter[str] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _CAST and _is_cached_by_autocast(args[0]):
            return func(*args, **(kwargs or {}))
        out = self._mode.__torch_dispatch__(func, types, args, kwargs)
        if self._random and _SEEDED in func.tags:
            name = _name(func)
            state = self._random.get(name, {}).get(self._calls[name])
            self._calls[name] += 1
            if state is not None:
                state.set()
        return out


def _is_cached_by_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast caches this tensor's copy: a leaf that needs gradients (aten/src/ATen/autocast_mode.cpp)."""
    return tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


def _name(op: Any) -> str:
    """An op's name without its overload: ``addmm``."""
    text: str = op.name() if callable(getattr(op, "name", None)) else str(op)
    return text.rpartition("::")[2].partition(".")[0]


def _changes_an_argument(op: Any) -> bool:
    schema = getattr(op, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _changed_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    changed: list[Any] = []
    if not _changes_an_argument(op):
        return changed
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return changed


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, and with its count of changes in place (_detach_helper in checkpoint.py)."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
