"""Runs one op on the virtual card: describes it, places and times it, follows its values, and remembers all of that.

`VirtualMode` decides which ops come here; rules of fake_impls/ use single steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.capture.attribution import ProgramPhase
from vramfit.capture.ops import OpInfo, OpTable, device_of, tensors_in
from vramfit.torch_internals.autograd_engine import current_graph_task_id, storage_use_count
from vramfit.torch_internals.cuda_device import initialize
from vramfit.torch_internals.dispatch import OpOverload, TorchDispatchMode
from vramfit.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    devices_apart,
)
from vramfit.trace import Category
from vramfit.virtual import kernels, roofline
from vramfit.virtual.data_dependent.assume import Extent
from vramfit.virtual.data_dependent.expectations import WATCHED, expectation, is_whole, rewritten
from vramfit.virtual.data_dependent.guesses import Guesses
from vramfit.virtual.data_dependent.shading import Shading
from vramfit.virtual.data_dependent.shadow import ShadowStore, map_tensors, may_be_known
from vramfit.virtual.describe import (
    Describer,
    DynamicSizes,
    SparseOperation,
    VirtualFakeMode,
    advice,
    fake_implementation,
    has_sparse,
    key_of,
    known_of_aten,
    recipe_of,
)
from vramfit.virtual.fills import Concern
from vramfit.virtual.machine import Machine
from vramfit.virtual.meter import Meter
from vramfit.virtual.noted import Noted, PageLocked
from vramfit.virtual.op_cache import MAX_PLANS, RememberedCall, Shades, plan_of, plan_of_view
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.placing import Placing
from vramfit.virtual.simulated_streams import Engine
from vramfit.virtual.tensor_subclasses import Twins
from vramfit.virtual.workspaces import Workspaces

_ADD = torch.ops.aten.add.Tensor
_FORGET, _IF_KNOWN, _FOLLOW = Shades.FORGET, Shades.IF_KNOWN, Shades.FOLLOW
_ALWAYS = Concern.ALWAYS


class OpRunner(TorchDispatchMode):
    """Runs ops on fake tensors. Rules are given it, and enter it where an op is made of others."""

    def __init__(self, machine: Machine, meter: Meter, workspaces: Workspaces, ops: OpTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine
        self.meter = meter
        self.workspaces = workspaces
        self.placing = Placing(meter, workspaces)
        self.fake = VirtualFakeMode()
        cards = tuple(spec.compute_capability for spec in machine.specs)
        self.describer = Describer(self.fake, known_of_aten(cards))
        self.shadows = ShadowStore()
        self.guesses = Guesses(machine, lambda: meter.backward_frames)
        self.shading = Shading(
            machine, self.shadows, meter.expected, meter.note_count, self.guesses.ends_loop
        )
        self.made_up: Noted[bool] = Noted()  # copies on the host of results of assumed sizes
        self.ops = ops
        self.twins = Twins()
        self._plans = 0
        self.page_locked = PageLocked(machine)
        self.exclusive_counts: tuple[int, int] | None = None  # see mode.py
        self.observed_counts: list[tuple[int, int]] | None = None  # filled while they are measured

    # -- the general treatment -----------------------------------------------------------------------------------

    def call(self, func: OpOverload, *args: Any, **kwargs: Any) -> OpCall:
        """A call of an op, to be run or settled."""
        return OpCall(func, self.ops[func], args, kwargs)

    def run(self, call: OpCall, *, real: bool = True, category: Category | None = None) -> Any:
        """Run an op on fake tensors, place what it allocates, and keep the shadows true.

        Args:
            real: there may be real tensors among its arguments.
            category: what its results are for; None takes that from the phase of the program.
        """
        if real:
            written = [t for t in call.written() if type(t) is not FakeTensor]
            if written and written[0].device.type == "cpu":
                return self._write_host(call.info, written)
            self._wrap_all(call)
        func, info, args, kwargs = call.func, call.info, call.args, call.kwargs
        if func is _ADD and self._accumulates(args):
            return self._accumulate(call)
        tensors: list[FakeTensor] = []
        unlike = self.describer.never(func) or kwargs.get("pin_memory")  # pages are locked each time
        key = None if unlike else key_of(args, kwargs, tensors)
        if key is not None:
            plan = info.plans.get(key)
            if plan is not None and self._holds(plan, tensors):
                return self._repeat(plan, call, tensors, category)
        if self.meter.follows_use:
            self.meter.use(tensors if key is not None else tensors_in(args))
        out = self.describe(call)
        worked = self.settle(call, out, category=category)
        if key is None:
            self.placing.adopt_parts(out, info.name)
        elif self.meter.repeats:
            self._remember(key, call, tensors, worked)
        if kwargs.get("pin_memory") and isinstance(out, torch.Tensor) and out.device.type == "cpu":
            self.page_locked.pin(out)
        return out

    # -- what was done before (see op_cache.py) ---------------------------------------------------------------

    def _holds(self, plan: RememberedCall, tensors: list[FakeTensor]) -> bool:
        """Whether a call with these tensors does what the plan says."""
        if plan.view:
            return True
        if self.machine.init_pid is None:
            return False
        context = plan.context
        if context is not None and self.workspaces.context(plan.device) is not context:
            return False
        return not self.meter.assuming or self._is_certain(plan, tensors)

    def _is_certain(self, plan: RememberedCall, tensors: list[FakeTensor]) -> bool:
        """Whether nothing that a call makes rests on assumed sizes."""
        return not plan.named and not any(self.meter.extents_of(t) for t in tensors)

    def _remember(self, key: Any, call: OpCall, tensors: list[FakeTensor], microseconds: float) -> None:
        recipe = recipe_of(call.out, tensors)
        if recipe is None:
            return
        if call.info.view:
            plan: RememberedCall | None = plan_of_view(recipe)
        else:
            if call.device is None:
                return
            plan = plan_of(
                call,
                call.device,
                recipe,
                tensors=tensors,
                microseconds=microseconds,
                builder=self.meter.builder,
            )
            if plan is None or (self.meter.assuming and not self._is_certain(plan, tensors)):
                return
        if self._plans >= MAX_PLANS:
            self.ops.forget_plans()
            self._plans = 0
        self._plans += 1
        call.info.plans[key] = plan

    def _repeat(
        self,
        plan: RememberedCall,
        call: OpCall,
        tensors: list[FakeTensor],
        category: Category | None,
    ) -> Any:
        """Do what `run` would, in the same order, by a plan that holds most of it."""
        meter = self.meter
        call.out = out = self.describer.build(plan.recipe, tensors)
        meter.ops += 1
        if plan.view:
            return out
        if meter.follows_use:
            meter.use(tensors)
        self.placing.place_again(plan, call.info.name, out, category)
        if plan.expects:
            self._expect(call)
        call.device = device = plan.device
        self._let_work(call, device, plan.microseconds)
        shading, shades = self.shading, plan.shades
        if shades is _FOLLOW or (shades is _IF_KNOWN and not shading.stays_unknown(call, tensors)):
            shading.follow(call)
            return out
        if shades is _FORGET:
            shading.forget_written(call)
        if plan.counts:
            shading.masks.follow(call)
        if plan.fills and (plan.fills == _ALWAYS or len(shading.fills)):
            shading.fills.follow(call)
        return out

    def describe(self, call: OpCall) -> Any:
        """Results of an op on fake tensors, not placed yet.

        Raises:
            NotImplementedError: torch cannot say what the op returns, and vramfit has no rule for it.
        """
        func, args, kwargs = call.func, call.args, call.kwargs
        if "generator" in kwargs:
            kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
            func = _without_generator(func)
        try:
            corrected = kernels.METAS.get(func)
            if corrected is not None:
                out = corrected(self.fake, *args, **kwargs)
                return out if self.machine.measured is None else self._with_reserve(call, out)
            return self.describer.describe(func, args, kwargs)
        except (
            UnsupportedOperatorException,
            DataDependentOutputException,
            DynamicOutputShapeException,
        ) as error:
            if has_sparse(args, kwargs):
                raise SparseOperation from error
            if isinstance(error, DynamicOutputShapeException) and fake_implementation(func) is not None:
                raise DynamicSizes from error
            message = (
                f"the virtual GPU has no rule for {func} yet, and does not run ops for real{advice(func)}"
            )
            self.machine.warn("op-without-rule", message)
            raise NotImplementedError(f"vramfit: {message}") from error
        except RuntimeError as error:
            if (told := devices_apart(error)) is not None:
                raise RuntimeError(told) from None
            raise
        except ValueError as error:
            # torch's descriptions in Python find some misuse that its C++ reports as RuntimeError.
            raise RuntimeError(str(error)) from None

    def _with_reserve(self, call: OpCall, out: Any) -> Any:
        """The results of an op, with as many bytes kept by cuDNN among them as were measured."""
        device, measured = device_of(out, call.args, call.kwargs), self.machine.measured
        if device is None or measured is None:
            return out
        call.runs_on(device, self.workspaces.context(device))
        size = measured.reserve(call)
        if size is None:
            return out
        return tuple(
            self.fake_empty((size,), torch.uint8, item.device)
            if isinstance(item, torch.Tensor) and item.dtype is torch.uint8 and item.dim() == 1
            else item
            for item in out
        )

    def settle(
        self,
        call: OpCall,
        out: Any,
        *,
        category: Category | None = None,
        extents: tuple[Extent, ...] = (),
        engine: Engine = Engine.COMPUTE,
    ) -> float:
        """Place an op's results, temporaries and workspaces, update the shadows, and return its microseconds of work.

        Args:
            call: the op, with fake tensors as arguments.
            out: its results, not placed yet.
            category: what they are for; None takes that from the phase of the program.
            extents: assumed sizes of the results, beside those on which the arguments rest.
            engine: what does the work. Copy engines take no time here: that of the link is accounted for separately.
        """
        call.out = out
        if call.info.view:
            self.meter.ops += 1
            return 0.0
        microseconds = 0.0
        device = call.find_device()
        if device is not None:
            self.meter.ops += 1
            if self.machine.init_pid is None:
                # torch remembers in C++ that CUDA was initialised once, and would not say so again.
                initialize()
            context = self.workspaces.context(device)
            call.runs_on(device, context)
            if context.profile is not None and (library := context.profile.library(call.func)) is not None:
                self.machine.devices[device].use_library(library)
            self.placing.place(call, device, category=category, extents=extents)
            if engine is Engine.COMPUTE:
                microseconds = self._work(call, device)
        elif self.meter.phases.phase is ProgramPhase.OPTIMIZER:
            # Steps of an offloaded optimizer; other work of the host has no time of its own.
            moved = call.args, call.kwargs, out, call.written()
            self.machine.clock.work_host(1e6 * roofline.host_seconds(moved))
        self._expect(call)
        self.shading.follow(call)
        return microseconds

    def _work(self, call: OpCall, device: int) -> float:
        """Let a card work on an op for the microseconds that are returned."""
        microseconds = 1e6 * roofline.seconds(call, self.machine.devices[device].spec, self.machine.rates)
        self._let_work(call, device, microseconds)
        return microseconds

    def _let_work(self, call: OpCall, device: int, microseconds: float) -> None:
        """Let a card work on an op for so long."""
        self.machine.advance(microseconds, device)
        if self.machine.hooks.on_work is not None:
            self.machine.hooks.on_work(call)

    def _expect(self, call: OpCall) -> None:
        """Follow expectations: a tensor that is written loses its own, and one that is made may get one."""
        found = expectation(call, self.meter.expected)
        if call.info.mutated:
            for tensor in call.written():
                if tensor.dtype in WATCHED:
                    known, written = self.meter.expected(tensor), None if found is None else found[1]
                    self.meter.expect(tensor, rewritten(known, tensor, written))
            if found is not None and not is_whole(found[0]):
                return  # a part was written, so nothing is known of the whole
        if found is not None:
            self.meter.expect(*found)

    # -- wrapping ------------------------------------------------------------------------------------------------

    def wrap(self, tensor: torch.Tensor, device: torch.device | None = None) -> FakeTensor:
        """A fake tensor of the same shape and strides as a real CPU one, with a shadow when it is small."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = self.describer.factory.make(meta, device or tensor.device)
        if may_be_known(fake) and tensor.device.type == "cpu":
            self.shadows.set(fake, tensor.detach())
        return fake

    def over(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor in place of a real CPU one: both share values, where these are followed, and pinned memory."""
        real = tensor.untyped_storage()
        storage = torch.UntypedStorage(real.nbytes(), device="meta")
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        fake = self.describer.factory.make(meta, tensor.device)
        if may_be_known(fake):
            self.shadows.share(fake, real)
        if self.page_locked.holds(tensor):
            self.page_locked.stand_for(storage, real)
        return fake

    def _wrap_all(self, call: OpCall) -> None:
        """Put fake tensors in the place of real ones among a call's arguments."""

        def to_fake(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if type(tensor) is FakeTensor or tensor.device.type == "meta" else self.wrap(tensor)

        call.args = map_tensors(to_fake, call.args)
        call.kwargs = {k: map_tensors(to_fake, v) for k, v in call.kwargs.items()}

    def _write_host(self, info: OpInfo, written: list[torch.Tensor]) -> Any:
        """Leave a real CPU tensor as it is that virtual ones were to be written into, with a warning."""
        self.machine.warn(
            "host-values-unknown",
            f"{info.name} writes virtual values into a real CPU tensor: its values stay as they were",
        )
        return written[0] if len(written) == 1 else None

    # -- fresh fake tensors for rules ----------------------------------------------------------------------------

    def fake_empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous fake tensor, not placed yet."""
        return self.describer.factory.make(torch.empty(shape, dtype=dtype, device="meta"), device)

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same shape, dtype, device and (dense) strides, not placed yet."""
        return self.describer.like(tensor)

    # -- gradient accumulation -----------------------------------------------------------------------------------

    def _accumulates(self, args: tuple[Any, ...]) -> bool:
        """Whether this ``add`` is the engine summing two gradients of which the first is its own.

        See NOTE [Gradients summed in place] in vramfit/capture/gradient_sums.py.
        """
        if current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        if not (
            type(args[0]) is FakeTensor and type(args[1]) is FakeTensor and args[0].shape == args[1].shape
        ):
            return False
        if args[0].layout is not torch.strided:  # nothing to add in place (InputBuffer::accumulate)
            return False
        counts = (
            args[0]._use_count(),  # type: ignore[attr-defined]
            storage_use_count(args[0].untyped_storage()._cdata),
        )
        if self.observed_counts is not None:
            self.observed_counts.append(counts)
        limits = self.exclusive_counts
        return limits is not None and counts[0] <= limits[0] and counts[1] <= limits[1]

    def _accumulate(self, call: OpCall) -> torch.Tensor:
        self.meter.ops += 1
        target: torch.Tensor = call.args[0]
        call.out = target
        self.shading.accumulate(target, call.args[1])
        if target.device.type == "cuda":
            self._work(call, target.device.index or 0)
        return target


def _without_generator(func: OpOverload) -> OpOverload:
    """The overload without a generator: ``randint.low`` for ``randint.low_generator``."""
    name = func._overloadname
    if "generator" not in name:
        return func
    plain = (
        name.replace("generator_with_", "").replace("_generator", "").replace("generator", "") or "default"
    )
    sibling: OpOverload = getattr(func._overloadpacket, plain)
    return sibling


Handler = Callable[[OpRunner, OpCall], Any]
"""A rule of an op, in place of the general treatment."""
