"""Inference in float16 or bfloat16, with those modules in float32 that need it, found by comparing outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.samples import Samples
from vramfit.techniques.core.surround import plain_class
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.half_inference.half_program import float32_tensors, make_half
from vramfit.techniques.half_inference.island_search import (
    TOLERANCE,
    FoundIslands,
    IslandSearchError,
    find_float32_islands,
    with_sharers,
)
from vramfit.techniques.mixed_precision import HalfType
from vramfit.techniques.support.casting import find_islands, is_norm
from vramfit.techniques.support.inference_only import refuse_training
from vramfit.workload import Batch

# CUDA C++ Programming Guide, arithmetic instructions: bfloat16 from 8.0 on, float16 from 5.3 on.
_FROM = {HalfType.FLOAT16: (5, 3), HalfType.BFLOAT16: (8, 0)}
_BITS = {HalfType.FLOAT16: 11, HalfType.BFLOAT16: 8}
_EXPONENTIALS = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfInferenceSetting(Setting):
    """In which type, and what not.

    Attributes:
        dtype: of weights and activations.
        islands: names of modules that stay in float32, with all that is in them.
        island_kinds: names of classes whose modules stay in float32.
        handing_on: those of the islands whose outputs other islands, or the model's caller, get in float32.
        error: what the outputs of a sample differed by with these islands: the norm of the difference as a part of
            float32's; None where nothing was measured.
        float32_outputs: whether the model's outputs are cast to float32.
        restores: whether the float32 values wait on the host for an undo, 4 bytes each.
    """

    dtype: HalfType = HalfType.FLOAT16
    islands: tuple[str, ...] = ()
    island_kinds: tuple[str, ...] = ()
    handing_on: tuple[str, ...] = ()
    error: float | None = None
    float32_outputs: bool = True
    restores: bool = True


class HalfInference(Technique[HalfInferenceSetting]):
    """Weights and activations in 16 bits, for inference; modules that half precision would spoil stay in float32.

    Weights, activations and the traffic between take half of their bytes, and tensor cores are quicker. float16 has 11
    bits of precision and ends at 65,504; bfloat16 has 8 bits and float32's range. Both are computed in wherever a card
    has them, and the one that needs fewer islands is offered.

    Which modules stay in float32 is found on a sample, on the CPU: each module's output in half precision is compared
    with its output in float32, and the worst stay in float32 until the outputs of the whole model differ from
    float32's by at most 1 % of their norm; what overflows comes first. The names are part of the setting, and so is
    the error that was measured. See `find_float32_islands`, which does this for any model and batch. What was measured
    holds for inputs like the sample's.

    A model that is too large for that here gets islands by rule: norms, softmax layers, losses, and routers of
    experts. Its promise says that nothing was measured.

    An island gets its inputs in float32, and what comes from the caller or from another island as it was before it was
    cast (``handing_on``), so that nothing overflows in between. Parameters and statistics of batch norms stay in
    float32 in any case, which costs nothing: their kernels take inputs of 16 bits. Frequencies of rotary embeddings
    stay too. Only the model's forward pass casts its inputs: other methods are called with half precision.

    The float32 values wait on the host for the undo, which then restores them bit for bit; without them (``restores``)
    it widens what is there.
    """

    name: ClassVar[str] = "half-inference"
    summary: ClassVar[str] = "weights and activations in 16 bits, what needs it in float32"
    numerics: ClassVar[Numerics] = Numerics.PRECISION
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = HalfInferenceSetting
    follows: ClassVar[str | None] = "low-precision-training"
    quickens: ClassVar[bool] = True
    least: ClassVar[Numerics] = Numerics.PRECISION
    excludes: ClassVar[dict[str, str]] = {
        "mixed-precision": "the whole model is in half precision already",
        "low-precision-training": "the whole model is in half precision already",
    }

    def options(self, profile: Profile) -> Iterable[HalfInferenceSetting]:
        """The type with the fewest islands, as measured; without a sample, islands by rule."""
        if profile.trains or not any(True for _ in float32_tensors(profile.model)):
            return
        types = _types_of(profile)
        weights = sum(4 * tensor.numel() for tensor in float32_tensors(profile.model))
        restores = weights <= profile.host_bytes - profile.host_peak_bytes
        samples = profile.samples
        tried = [] if samples is None else [_searched(samples, one) for one in types]
        measured = [one for one in tried if isinstance(one, HalfInferenceSetting)]
        if measured:
            best = min(measured, key=lambda one: (len(one.islands), one.error))
        elif types and not any(isinstance(one, IslandSearchError) and one.refuted for one in tried):
            # Nothing is known of the values' range: bfloat16 has all of float32's.
            best = HalfInferenceSetting(dtype=types[-1], island_kinds=ruled_kinds(profile.model))
        else:
            return
        yield replace(best, restores=restores)

    def promise(self, setting: HalfInferenceSetting) -> Promise:
        """What has fewer bits, and what that was seen to do."""
        bits = _BITS[setting.dtype]
        note = f"weights and activations have {bits} bits of precision ({setting.dtype.value})"
        if setting.islands or setting.island_kinds:
            note += f", but for {', '.join((*setting.islands, *setting.island_kinds))}"
        if setting.error is None:
            note += "; what that does to the outputs was not measured"
        else:
            note += f"; outputs of a sample differed by {setting.error:.2g} of their norm"
        return Promise(Numerics.PRECISION, note)

    def attach(self, live: AttachedProgram, setting: HalfInferenceSetting) -> None:
        """Cast the model, and surround it and its islands.

        Raises:
            UsageError: it has nothing in float32, an island is not there, or the program trains.
        """
        if not any(True for _ in float32_tensors(live.model)):
            raise UsageError("the model has no float32 parameter to cast", "Leave half-inference out")
        refuse_training(live, self.name)
        islands = find_islands(live.model, setting.islands, setting.island_kinds)
        make_half(
            live,
            setting.dtype.dtype,
            islands,
            handing_on=find_islands(live.model, setting.handing_on, ()),
            float32_outputs=setting.float32_outputs,
            restores=setting.restores,
        )


def half_setting(
    model: nn.Module,
    batch: Batch,
    *,
    dtype: torch.dtype = torch.float16,
    tolerance: float = TOLERANCE,
    seconds: float = 60.0,
) -> HalfInferenceSetting:
    """The setting for a model whose islands are found on a batch; see `find_float32_islands` for the arguments.

    Raises:
        IslandSearchError: no time was left, the outputs cannot be compared, or no islands keep the tolerance.
    """
    found = find_float32_islands(model, batch, dtype, tolerance=tolerance, seconds=seconds)
    return _setting(model, HalfType(str(dtype).removeprefix("torch.")), found)


def _setting(model: nn.Module, dtype: HalfType, found: FoundIslands) -> HalfInferenceSetting:
    islands = with_sharers(model, found.islands)
    return HalfInferenceSetting(
        dtype=dtype, islands=islands, handing_on=found.handing_on, error=float(f"{found.error:.3g}")
    )


def _types_of(profile: Profile) -> list[HalfType]:
    """The types that a device computes in, the most precise first."""
    if profile.device_type == "cpu":
        return [HalfType.BFLOAT16]  # few processors have instructions for float16
    return [one for one in HalfType if profile.capability >= _FROM[one]][::-1]


def _searched(samples: Samples, dtype: HalfType) -> HalfInferenceSetting | IslandSearchError | None:
    """The islands that a sample needs, or why they are not known; None without a sample."""

    def search() -> HalfInferenceSetting | IslandSearchError | None:
        sample = samples.small()
        if sample is None:
            return None
        try:
            found = find_float32_islands(sample.model, sample.batch, dtype.dtype, seconds=sample.seconds)
        except IslandSearchError as error:
            return error
        return _setting(sample.model, dtype, found)

    return samples.once(f"half-inference {dtype.value}", search)


def ruled_kinds(model: nn.Module) -> tuple[str, ...]:
    """Names of the classes of a model's modules that stay in float32 where nothing can be measured."""
    return tuple(
        sorted(
            {
                plain_class(module).__name__
                for module in model.modules()
                if is_norm(module)
                or isinstance(module, _EXPONENTIALS)
                or plain_class(module).__name__.endswith(("Loss", "Router"))
            }
        )
    )
