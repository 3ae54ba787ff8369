"""What is trained: GPT-2 small as in the headline, and smaller models of other kinds.

Gradients stay allocated from step to step, so that "above parameters and gradients" means the same for everybody, and
the optimizer keeps no state and changes nothing (a learning rate of 0).

Shapes: B batch, L length, S side of an image, E width.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vramfit.workload import Workload

MIB = 1 << 20

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
"""Whose ResNet is trained here as well."""

CHUNKS = 8
"""Pieces of the rows of logits, where they are cut by hand."""

RECOMPUTED = "recomputed chunks"
"""The loss in pieces under `torch.utils.checkpoint`."""

IGNORED = -100
"""The label that counts for nothing (torch.nn.functional.cross_entropy)."""


class Keep(torch.optim.SGD):
    """An optimizer that leaves gradients allocated, as where they are views of one buffer."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill them with zeros, whatever is asked for."""
        del set_to_none
        super().zero_grad(set_to_none=False)


def keep(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all subjects."""
    return Keep(parameters, lr=0.0)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A workload with what is asked of it.

    Attributes:
        name: as the command line has it.
        title: for the table.
        workload: the plain one.
        chunked: the same with its loss in chunks, by the way that they are made; empty where it has no logits to cut.
        budgets: bytes above parameters and gradients, from the peak of the plain program.
        ratios: of the compiler's memory budget.
        every: blocks are recomputed one in so many.
    """

    name: str
    title: str
    workload: Workload
    chunked: Mapping[str, Workload]
    budgets: Callable[[int], tuple[int, ...]]
    ratios: tuple[float, ...]
    every: tuple[int, ...]


def tenths(*parts: int) -> Callable[[int], tuple[int, ...]]:
    """Budgets that are so many tenths of the plain peak, in whole MiB."""
    return lambda peak: tuple(peak * part // 10 // MIB * MIB for part in parts)


# -- language models -------------------------------------------------------------------------------------------------


def once(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Makes a model the first time and copies it from then on: drawing the weights takes as long as half a step.

    The first one stays, so it has to be made before memory is counted.
    """
    made = cache(make)

    def copied() -> nn.Module:
        if active_fake_mode() is not None:
            return make()
        return copy.deepcopy(made())

    return copied


def gpt2(**changes: Any) -> Callable[[], nn.Module]:
    """GPT-2 of transformers without dropout."""

    @once
    def make() -> nn.Module:
        import transformers

        settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, **changes}
        model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
        return model.train()

    return make


def own_loss(model: Any, ids: Tensor) -> Tensor:
    """As transformers computes it; ids are of shape [B, L]."""
    found: Tensor = model(ids, labels=ids).loss
    return found


def next_tokens(ids: Tensor) -> Tensor:
    """The labels of all rows, those of the last of each sequence ignored, of shape [B * L]."""
    return F.pad(ids, (0, 1), value=IGNORED)[:, 1:].flatten()


def torch_chunks(model: Any, ids: Tensor) -> Tensor:
    """The loss by `torch.nn.functional.linear_cross_entropy`, whose chunks compute gradients with the loss."""
    hidden = model.transformer(ids).last_hidden_state.flatten(0, 1)
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, model.lm_head.weight, next_tokens(ids), options=options)


def recomputed_chunks(model: Any, ids: Tensor) -> Tensor:
    """The loss in pieces that are checkpointed, as recipes have it."""
    hidden = model.transformer(ids).last_hidden_state.flatten(0, 1)
    weight, labels = model.lm_head.weight, next_tokens(ids)

    def piece(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, weight), wanted, ignore_index=IGNORED, reduction="sum")

    total = hidden.new_zeros(())
    for rows, wanted in zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True):
        found: Any = checkpoint(piece, rows, wanted, use_reentrant=False)
        total = total + found
    return total / (labels != IGNORED).sum()


def language_model(
    make: Callable[[], nn.Module], vocabulary: int, batch_size: int, length: int
) -> tuple[Workload, dict[str, Workload]]:
    """The plain workload, and those with their loss in chunks."""

    def training(loss: Callable[[Any, Tensor], Tensor]) -> Workload:
        return Workload(
            model=make,
            batch=lambda batch_size, sequence_length: torch.randint(
                vocabulary, (batch_size, sequence_length)
            ),
            sizes={"batch_size": batch_size, "sequence_length": length},
            loss=loss,
            optimizer=keep,
        )

    return training(own_loss), {
        "torch's chunks": training(torch_chunks),
        RECOMPUTED: training(recomputed_chunks),
    }


def llama_stack() -> nn.Module:
    """Eight blocks of a Llama with grouped queries: states of shape [B, L, E] in and out."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaModel(config)
    return model.train()


def _llama() -> Workload:
    return Workload(
        model=llama_stack,
        batch=lambda batch_size, sequence_length: torch.randint(1024, (batch_size, sequence_length)),
        sizes={"batch_size": 4, "sequence_length": 512},
        loss=lambda model, ids: model(ids).last_hidden_state.square().mean(),
        optimizer=keep,
    )


def small_t5() -> nn.Module:
    """A T5 of four layers on either side without dropout."""
    import transformers

    config = transformers.T5Config(
        vocab_size=4096,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=8,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        use_cache=False,
        decoder_start_token_id=0,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model.train()


def _t5() -> Workload:
    def pairs(batch_size: int, sequence_length: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(4096, (2, batch_size, sequence_length))
        return ids[0], ids[1]

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        source, target = batch
        found: Tensor = model(input_ids=source, labels=target).loss
        return found

    return Workload(
        model=once(small_t5),
        batch=pairs,
        sizes={"batch_size": 4, "sequence_length": 256},
        loss=loss,
        optimizer=keep,
    )


# -- images ----------------------------------------------------------------------------------------------------------


def classification(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of images [B, 3, S, S] and labels [B]."""
    images, labels = batch
    found = model(images)
    return F.cross_entropy(getattr(found, "logits", found), labels)


def images(batch_size: int, image_size: int) -> tuple[Tensor, Tensor]:
    """A batch of noise."""
    return torch.randn(batch_size, 3, image_size, image_size), torch.arange(batch_size)


def _resnet() -> Workload:
    sys.path.append(str(BENCHMARKS))
    from configurations.vision import ResNet

    return Workload(
        model=lambda: ResNet(50).train(),
        batch=images,
        sizes={"batch_size": 8, "image_size": 128},
        loss=classification,
        optimizer=keep,
    )


def small_vit() -> nn.Module:
    """ViT-S/16 of transformers."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=1000,
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model.train()


def _vit() -> Workload:
    return Workload(
        model=small_vit,
        batch=images,
        sizes={"batch_size": 8, "image_size": 224},
        loss=classification,
        optimizer=keep,
    )


def monai_unet() -> nn.Module:
    """MONAI's residual U-Net for slices [B, 1, S, S]."""
    from monai.networks.nets import UNet

    model: nn.Module = UNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        channels=(16, 32, 64, 128, 256),
        strides=(2, 2, 2, 2),
        num_res_units=2,
    )
    return model.train()


def _unet() -> Workload:
    def slices(batch_size: int, image_size: int) -> tuple[Tensor, Tensor]:
        pixels = torch.randn(batch_size, 1, image_size, image_size)
        return pixels, (pixels[:, 0] > 0).long()

    return Workload(
        model=monai_unet,
        batch=slices,
        sizes={"batch_size": 4, "image_size": 256},
        loss=classification,
        optimizer=keep,
    )


# -- all of them -----------------------------------------------------------------------------------------------------


@cache
def subjects() -> dict[str, Subject]:
    """By name, the headline first; ``sample`` is for tests and is tried only where it is named."""
    plain, chunked = language_model(gpt2(), 50257, 2, 512)
    little, cut = language_model(
        gpt2(n_layer=2, n_embd=128, n_head=4, vocab_size=2048, n_positions=128), 2048, 2, 128
    )
    coarse = (0.0, 0.25, 0.5, 0.75, 1.0)
    found = [
        Subject(
            name="gpt2",
            title="GPT-2 small, batch 2 x 512",
            workload=plain,
            chunked=chunked,
            budgets=lambda _: tuple(size * MIB for size in range(480, 1601, 160)),
            ratios=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
            every=(1, 2, 3),
        ),
        Subject(
            name="resnet50",
            title="ResNet-50, batch 8 x 3 x 128 x 128",
            workload=_resnet(),
            chunked={},
            budgets=tenths(3, 5, 7, 9),
            ratios=coarse,
            every=(1, 2, 3),
        ),
        Subject(
            name="unet",
            title="MONAI U-Net in two dimensions, batch 4 x 1 x 256 x 256",
            workload=_unet(),
            chunked={},
            budgets=tenths(3, 5, 7, 9),
            ratios=coarse,
            every=(1, 2),
        ),
        Subject(
            name="llama",
            title="8 Llama blocks of width 512, batch 4 x 512",
            workload=_llama(),
            chunked={},
            budgets=tenths(3, 5, 7, 9),
            ratios=coarse,
            every=(1, 2, 3),
        ),
        Subject(
            name="t5",
            title="T5 of 4 + 4 layers of width 256, batch 4 x 256",
            workload=_t5(),
            chunked={},
            budgets=tenths(3, 5, 7, 9),
            ratios=coarse,
            every=(1, 2, 3),
        ),
        Subject(
            name="vit",
            title="ViT-S/16, batch 8 x 3 x 224 x 224",
            workload=_vit(),
            chunked={},
            budgets=tenths(3, 5, 7, 9),
            ratios=coarse,
            every=(1, 2, 3),
        ),
        Subject(
            name="sample",
            title="GPT-2 of 2 blocks of width 128, batch 2 x 128",
            workload=little,
            chunked=cut,
            budgets=tenths(4, 6, 8),
            ratios=(0.0, 1.0),
            every=(1, 2),
        ),
    ]
    return {subject.name: subject for subject in found}
