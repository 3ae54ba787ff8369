"""Chunked losses: cross-entropy of a large vocabulary without all the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.chunked_loss.deferred import Chunking, DeferredLogits, default_rows
from vramfit.techniques.chunked_loss.operations import defer
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.surround import has_own_forward, plain_class, surroundings_of
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.torch_internals.dispatch import (
    get_tracing_state,
    is_traceable_wrapper_subclass,
    peek_interpreter_stack,
)

# Below this share of the peak the logits are not worth the trouble.
_NOTABLE = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedLossSetting(Setting):
    """Which logits, and how many at once.

    Attributes:
        heads: the linear layers that give the logits, by name; empty finds the one of the vocabulary.
        chunk_rows: rows of logits (tokens) that exist at once; 0 takes as many as hidden states need memory, at least
            an eighth of the width.
        recompute: compute logits again in the backward pass, rather than gradients with the loss.
        into_grad: add the head's gradient to the ``grad`` that the weight has already, without a detour.
    """

    heads: tuple[str, ...] = ()
    chunk_rows: int = 0
    recompute: bool = False
    into_grad: bool = False


class ChunkedLoss(Technique[ChunkedLossSetting]):
    """Computes cross-entropy from hidden states, some rows of logits at a time.

    A model with a large vocabulary spends most of its peak on logits: (tokens, vocabulary) several times over, for
    themselves, their log-softmax and their gradient. The head's output is deferred here until the loss asks for it:
    ``F.cross_entropy`` (any reduction, ``ignore_index``, class weights, label smoothing), log-softmax with ``nll_loss``
    or ``gather``, and so the losses of transformers' models with ``labels``, take it in chunks; rows may be shifted,
    selected, reshaped, cast, scaled or capped by a tanh in between. Anything else gets the logits as ever. Under
    ``torch.no_grad()`` nothing changes at all.

    It pays when the vocabulary is several times the model's width, and saves about all of the logits' memory. It does
    not where the loss takes logits otherwise (probabilities as targets, a loss written by hand from a softmax), where
    the model multiplies with its embedding without an ``nn.Linear``, or inside ``torch.compile``, which sees the plain
    head.

    Cost: no extra arithmetic, for gradients are computed with the loss, as fused kernels do (Liger, arXiv:2410.10989);
    that of the weight, as large as the weight, is then there from the loss on, rather than from the start of the
    backward pass, which is the next thing to happen. A loss without a backward pass pays for them in vain.
    ``recompute`` computes the head's product once more instead. Rows that are reduced by the program (``none``) and
    products in float16, whose gradients want the scale of a ``GradScaler`` before they are rounded, are recomputed in
    any case. Each chunk reads the weight and its gradient once, which small chunks feel.

    The gradient of the weight is summed in a tensor of its own dtype and reaches ``weight.grad`` through autograd, so
    that tied weights, hooks and distributed data parallel are as ever. Autograd holds it until all parts of a tied
    weight's gradient are there, which is the end of the backward pass. Where a ``grad`` exists already, after the first
    micro-batch or with ``zero_grad(set_to_none=False)``, ``into_grad`` adds to it in place: at once, and with
    ``recompute`` without a tensor of its own at all, which saves the weight's size at the peak. It keeps to the detour
    where hooks listen, ``torch.distributed`` is in use, or ``torch.autograd.grad`` asks; a library that hooks into
    autograd's accumulation by other ways would miss the gradient, so this has to be asked for.
    """

    name: ClassVar[str] = "chunked-loss"
    summary: ClassVar[str] = "computes cross-entropy without the full logits"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.LOSS
    setting_type = ChunkedLossSetting
    follows: ClassVar[str | None] = "gradient-caching"
    quickens: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterable[ChunkedLossSetting]:
        """The usual chunk, a quarter of it, and that without a gradient of its own, where logits are notable.

        Computed with the loss, the weight's gradient is there from the loss until it is added, which with ``into_grad``
        is at once; ``recompute`` then has none at all.
        """
        if not profile.trains or profile.logits_bytes < _NOTABLE * profile.peak_allocated_bytes:
            return
        if not profile.logits_bytes or (head := find_head(profile.model)) is None:
            return
        yield ChunkedLossSetting()
        linear = profile.model.get_submodule(head)
        assert isinstance(linear, nn.Linear)
        rows = profile.logits_bytes // (linear.out_features * linear.weight.element_size())
        usual = default_rows(rows, linear.in_features, linear.out_features)
        few = usual // 4 if usual >= 32 else 0
        if few:
            yield ChunkedLossSetting(chunk_rows=few)
        yield ChunkedLossSetting(chunk_rows=few, into_grad=True)
        yield ChunkedLossSetting(chunk_rows=few, recompute=True, into_grad=True)

    def attach(self, live: AttachedProgram, setting: ChunkedLossSetting) -> None:
        """Surround the heads."""
        if setting.chunk_rows < 0:
            raise UsageError(
                f"chunk_rows of chunked-loss is {setting.chunk_rows}", "Give 0 to choose, or a number of rows"
            )
        names = setting.heads or tuple(filter(None, (find_head(live.model),)))
        if not names:
            raise UsageError(
                "chunked-loss finds no linear layer that gives the logits",
                "Name it: heads = [...], by its name in the model",
            )
        heads = [_head(live.model, name) for name in names]
        for head in heads:
            chunking = Chunking(
                rows=setting.chunk_rows, recompute=setting.recompute, into_grad=setting.into_grad
            )
            live.surround(head, DeferHead(chunking))

    def promise(self, setting: ChunkedLossSetting) -> Promise:  # noqa: ARG002  # the same for all
        """Sums in another order."""
        return Promise(
            self.numerics, "the head's gradient is summed chunk by chunk, rounded to its dtype each time"
        )


class DeferHead:
    """Makes a head give `DeferredLogits` where gradients may be asked for."""

    def __init__(self, chunking: Chunking) -> None:
        self.chunking = chunking

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Deferred logits, or the plain ones where nothing could be deferred."""
        weight: Any = module.weight
        bias: Any = module.bias
        # What lies inside has to run, and a forward pass of the instance's own may be anything.
        alone = surroundings_of(module)[0] is self and not has_own_forward(module)
        if not alone or len(args) != 1 or kwargs or not _can_defer(args[0], weight, bias):
            return forward(*args, **kwargs)
        return defer(args[0], weight, bias, self.chunking)


def _head(model: nn.Module, name: str) -> nn.Module:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise UsageError(f"the model has no module {name!r}", "Check heads of chunked-loss") from None
    if plain_class(module) is not nn.Linear:
        kind = plain_class(module).__name__
        raise UsageError(
            f"{name} is of type {kind}, not an nn.Linear", "Give chunked-loss the layer of the logits"
        )
    return module


def _can_defer(hidden: Any, weight: Any, bias: Any) -> bool:
    """Whether a head's product is a plain one that autograd would record."""
    if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or hidden.is_nested:
        return False
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or get_tracing_state() is not None:
        return False
    tensors = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    if any(
        isinstance(t, DeferredLogits) or is_traceable_wrapper_subclass(t) or t.is_inference() for t in tensors
    ):
        return False
    if peek_interpreter_stack() is not None:
        return False
    fits = all(tensor.device == weight.device for tensor in tensors) and hidden.shape[-1] == weight.shape[1]
    autocast = torch.is_autocast_enabled(hidden.device.type)
    same = all(tensor.dtype == weight.dtype for tensor in tensors)
    return fits and (same or autocast) and any(tensor.requires_grad for tensor in tensors)


# -- the layer that gives the logits -------------------------------------------------------------------------------


def find_head(model: nn.Module) -> str | None:
    """The linear layer that gives a language model's logits, by name.

    What ``get_output_embeddings`` of transformers' models says; else the last that has as many outputs as the largest
    embedding has rows; else the last of all linear layers, if none has more outputs and it has more than inputs.
    """
    linear: dict[str, nn.Linear] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and plain_class(module) is nn.Linear
    }
    for module in model.modules():
        head_of = getattr(module, "get_output_embeddings", None)
        found = head_of() if callable(head_of) else None
        for name, known in linear.items():
            if known is found:
                return name
    words = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    of_words = [name for name, module in linear.items() if module.out_features == words]
    if of_words:
        return of_words[-1]
    if not linear:
        return None
    name, last = list(linear.items())[-1]
    widest = max(module.out_features for module in linear.values())
    return name if last.out_features == widest and last.out_features > last.in_features else None
