"""The other modules' models under ``torch.compile``: whole, block by block, functions alone, with what breaks graphs.

What is compiled is an option, `SCOPES`; everything else is as in the eager programs. Sharded programs compile the same
way (`configurations.sharded`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configurations import language, vision
from configurations.training import DEVICE, Program, images, inference, place, tokens, training

SCOPES = ("model", "module", "blocks", "loss", "step", "broken")
"""``torch.compile(model)``, ``model.compile()``, each block, the loss alone, the optimizer's step, a forward pass that
prints in its middle."""

Loss = Callable[[Tensor, Tensor], Tensor]


class Chatty(nn.Module):
    """A block that reads a value on the host, where Dynamo breaks the graph."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        self.largest = max(self.largest, float(out.detach().abs().max()))
        return out


def compiled(
    model: nn.Module, loss: Loss, scope: str, mode: str | None, dynamic: bool | None
) -> tuple[Callable[..., Tensor], Loss]:
    """What is called in the model's place, and the loss."""
    options: dict[str, Any] = {"mode": mode, "dynamic": dynamic}
    if scope in ("model", "broken"):
        if scope == "broken":
            middle = len(model.blocks) // 2
            model.blocks[middle] = Chatty(model.blocks[middle])
        return torch.compile(model, **options), loss
    if scope == "module":
        model.compile(**options)
    elif scope == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, **options)
    elif scope == "loss":
        return model, torch.compile(loss, **options)
    return model, loss


def compile_step(program: Program) -> Program:
    """The same program with its optimizer's step compiled."""
    for optimizer in program.optimizers:
        optimizer.step = torch.compile(optimizer.step)
    return program


def language_model(
    *,
    kind: str = "gpt",
    size: str = "gpt2-small",
    batch: int = 8,
    length: int = 1024,
    lengths: tuple[int, ...] = (),
    recompute: str = "no",
    scope: str = "model",
    mode: str | None = None,
    dynamic: bool | None = None,
    float8: bool = False,
    precision: str,
    optimizer: str | None = None,
    **loop: Any,
) -> Program:
    """GPT-2 or Llama in training, in inference without an optimizer.

    Args:
        lengths: of the sequences of each step in turn; empty for ``length`` in all.
        scope: one of `SCOPES`.
        float8: linear layers of the blocks multiply in float8 (torchao).
    """
    shape = language.SHAPES[size]
    made = {"gpt": language.GPT, "llama": language.Llama}[kind]
    model = place(lambda: made(shape, recompute=recompute), precision, on_card=kind == "llama")
    if float8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.blocks)
    batches = itertools.cycle([tokens(batch, wanted, shape.vocabulary) for wanted in lengths or (length,)])
    ask, loss = compiled(model, language.next_token_loss, scope, mode, dynamic)
    if optimizer is None:
        return inference(model, lambda: ask(next(batches)), precision=precision)

    def forward() -> Tensor:
        batch_BS = next(batches)
        return loss(ask(batch_BS), batch_BS)

    program = training(model, forward, precision=precision, optimizer=optimizer, **loop)
    return compile_step(program) if scope == "step" else program


def classifier(
    *,
    model: str = "resnet50",
    batch: int = 32,
    side: int = 224,
    channels_last: bool = False,
    precision: str,
    optimizer: str,
) -> Program:
    """An image classifier in training, compiled whole; ``timm/NAME`` is one of timm's."""
    library, _, name = model.rpartition("/")
    if library == "timm":
        import timm

        network = place(lambda: timm.create_model(name), precision)
    else:
        network = place(lambda: vision.network_of(name, side), precision)
    pixels = images(batch, 3, side, side)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ask = torch.compile(network)
    return training(
        network, lambda: F.cross_entropy(ask(pixels), labels), precision=precision, optimizer=optimizer
    )


def diffusion(*, batch: int = 16, side: int = 64, precision: str, optimizer: str) -> Program:
    """The denoising U-Net in training, compiled whole."""
    model = place(lambda: vision.DiffusionUNet(128, (1, 2, 2, 4)), precision)
    pixels = images(batch, 3, side, side)
    times = torch.randint(1000, (batch,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ask = torch.compile(model)

    def loss() -> Tensor:
        noise = torch.randn_like(pixels)
        return F.mse_loss(ask(0.7 * pixels + 0.7 * noise, times), noise)

    return training(model, loss, precision=precision, optimizer=optimizer)


def denoise(*, batch: int = 2, side: int = 64, steps: int = 4, precision: str) -> Program:
    """The U-Net of Stable Diffusion 1 (diffusers) in a loop that denoises, compiled whole."""
    from diffusers import UNet2DConditionModel

    model = place(
        lambda: UNet2DConditionModel(sample_size=side, cross_attention_dim=768), precision, on_card=True
    )
    kind = next(model.parameters()).dtype
    latent = images(batch, 4, side, side).to(kind)
    prompt = images(batch, 77, 768).to(kind)
    ask = torch.compile(model)

    def loop() -> Tensor:
        noisy = latent
        for step in range(steps):
            noisy = noisy - 0.1 * ask(noisy, torch.tensor(step, device=DEVICE), prompt).sample
        return noisy

    return inference(model, loop, precision=precision)
