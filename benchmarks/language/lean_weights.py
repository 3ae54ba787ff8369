"""What formats of weights, pruned channels, zeros and top-k activations save, and what they do to a model's outputs.

    python benchmarks/language/lean_weights.py [--gpu NAME] [--steps N]

A small language model (byte_model.py: one block and a head) that learns for half a minute, in bfloat16. Bytes are those
of the virtual card, exact: what the weights hold, and peaks of tensors in a pass over 256 tokens and over one, from the
model on the card on. The divergence is that of the logits from the plain model's, on the CPU, in nats; so is the loss
on text that no step saw. Pruned models were not trained on afterwards, which is what one would do.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from benchmarks.language.byte_model import batch, config, trained
from rich.console import Console
from rich.table import Table
from torch import nn

import vramfit
from vramfit.gpus import find_gpu
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.techniques import AttachedProgram, Choice, with_choices
from vramfit.techniques.activation_compression import (
    ActivationCompression,
    ActivationCompressionSetting,
    Method,
)
from vramfit.techniques.pruning.channels import prune_channels
from vramfit.techniques.pruning.zeros import two_of_four, zero_smallest
from vramfit.techniques.quantization.quality import LogitsDivergence
from vramfit.techniques.quantization.quantised_layers import quantise_layers
from vramfit.techniques.quantization.weight_formats import WeightFormat, has_format, quantisable
from vramfit.units import MIB
from vramfit.workload import Workload

console = Console(width=150)
Change = Callable[[nn.Module, torch.device], Any]
TOKENS = 256


def in_format(one: WeightFormat, model: nn.Module, device: torch.device) -> Any:
    """All linear layers in a format."""
    live = AttachedProgram(model, None)
    quantise_layers(live, dict.fromkeys(quantisable(model), one), device)
    return live


def placed(change: Callable[[nn.Module], Any], model: nn.Module, device: torch.device) -> Any:
    """A change that is made where the model computes."""
    model.to(device)
    return change(model)


def with_csr(share: float, model: nn.Module, device: torch.device) -> Any:
    """Weights of zeros as sparse tensors: as many values as would be left, wherever they are."""
    if device.type == "cpu":
        return zero_smallest(model, share=share)
    model.to(device)
    for layer in quantisable(model).values():
        rows, columns = layer.weight.shape
        count = round(layer.weight.numel() * (1 - share))
        sparse = torch.sparse_csr_tensor(
            torch.empty(rows + 1, dtype=torch.int32, device=device),
            torch.empty(count, dtype=torch.int32, device=device),
            torch.empty(count, dtype=layer.weight.dtype, device=device),
            size=(rows, columns),
            check_invariants=False,
        )
        layer.weight = nn.Parameter(sparse, requires_grad=False)
    return None


def card_bytes(gpu: str, change: Change) -> tuple[int, int | None, int | None]:
    """Bytes of the model on the card, and peaks of a pass over many tokens and over one."""
    device = torch.device("cuda")
    with vramfit.VirtualGPU(gpu), torch.no_grad():
        model = transformers.LlamaForCausalLM(config(1)).bfloat16().eval().requires_grad_(False)
        live = change(model, device)
        model.to(device)
        held = torch.cuda.memory_allocated()
        peaks = [pass_peak(model, tokens) for tokens in (TOKENS, 1)]
        del live
    return held, peaks[0], peaks[1]


def pass_peak(model: Any, tokens: int) -> int | None:
    """Most bytes of tensors in a pass; None where it fails, which is printed."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
    for _ in range(2):  # the first sets up the library's workspace
        torch.cuda.reset_peak_memory_stats()
        try:
            model(input_ids=ids, use_cache=False)
        except (NotImplementedError, RuntimeError) as error:
            console.print(f"[dim]{str(error)[:200]}[/dim]")
            return None
    return torch.cuda.max_memory_allocated()


def mib(size: int | None) -> str:
    """A size, or that there is none."""
    return "fails" if size is None else f"{size / MIB:,.2f}"


def inference(gpu: str, steps: int) -> None:
    """The table of weights."""
    model = trained(1, steps)
    measure = LogitsDivergence(model, [batch(0)])
    given = batch(0)
    changes: dict[str, Change] = {"as it is": lambda _model, _device: None}
    for one in WeightFormat:
        if one is not WeightFormat.NONE and has_format(one, find_gpu(gpu).compute_capability):
            changes[one.value] = partial(in_format, one)
    for share in (0.25, 0.5):
        prune = partial(prune_channels, batch=given, share=share)
        changes[f"channels, {share:.0%} of each feed-forward"] = partial(pruned_first, prune)
    for share in (0.5, 0.9):
        changes[f"zeros, {share:.0%}"] = partial(placed, partial(zero_smallest, share=share))
        changes[f"zeros, {share:.0%}, as CSR"] = partial(with_csr, share)
    changes["two of four"] = partial(placed, two_of_four)
    table = Table(title=f"weights of linear layers on a virtual {gpu}, MiB")
    for head in (
        "",
        "model",
        f"peak, {TOKENS} tokens",
        "peak, one token",
        "divergence, nats",
        "loss on other text",
    ):
        table.add_column(head)
    for name, change in changes.items():
        held, many, single = card_bytes(gpu, change)
        live = change(model, torch.device("cpu"))
        cost, loss = measure.cost(model), loss_of(model)
        if live is not None:
            live.undo()
        table.add_row(name, mib(held), mib(many), mib(single), f"{cost:.2g}", f"{loss:.3f}")
    console.print(table)


def pruned_first(prune: Callable[..., Any], model: nn.Module, device: torch.device) -> Any:
    """Channels go before the model does to the card."""
    del device
    return prune(model)


def loss_of(model: Any) -> float:
    """The mean loss on text that neither training nor the divergence saw."""
    given = batch(7, rows=4)
    with torch.no_grad():
        return float(model(**given, labels=given["input_ids"]).loss)


# -- activations of training --------------------------------------------------------------------------------


_BLOCKS = ("model.layers.0", "model.layers.1")
"""Where activations are compressed: of a softmax over classes the largest numbers are those of the unlikely ones."""


def activations(gpu: str) -> None:
    """What top-k of saved activations saves, by the technique activation-compression."""
    workload = Workload(
        model=lambda: transformers.LlamaForCausalLM(config(2, 256, 1024)),
        batch=lambda batch_size: {"input_ids": torch.zeros(batch_size, 256, dtype=torch.long)},
        sizes={"batch_size": 8},
        loss=lambda model, given: model(**given, labels=given["input_ids"]).loss,
    )
    table = Table(
        title=f"training step on a virtual {gpu}: what autograd saves, the largest of each group of 256"
    )
    for head in ("kept", "peak of tensors, MiB", "cosine of the gradients with the plain ones"):
        table.add_column(head)
    device = VirtualBackend(find_gpu(gpu))
    plain = gradients(workload, ())
    for keep in (1.0, 0.5, 0.25, 0.1):
        setting = ActivationCompressionSetting(method=Method.TOP_K, keep=keep, min_bytes=0, modules=_BLOCKS)
        choices = () if keep == 1 else (Choice(technique=ActivationCompression(), setting=setting),)
        peak = device.step_cost(with_choices(workload, choices), {"batch_size": 8}).peak_allocated_bytes
        cosine = float(torch.nn.functional.cosine_similarity(gradients(workload, choices), plain, dim=0))
        table.add_row("all, as it is" if keep == 1 else f"{keep:.0%}", mib(peak), f"{cosine:.4f}")
    console.print(table)
    inference_peak(gpu)


def gradients(workload: Workload, choices: tuple[Choice, ...]) -> torch.Tensor:
    """All gradients of a step on the CPU, at two examples of text."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config(2, 256, 1024))
    live = AttachedProgram(model, None)
    live.attach(choices)
    given = batch(3, rows=2)
    assert workload.loss is not None
    live.backward(workload.loss(model, given))
    found = torch.cat([one.grad.flatten().double() for one in model.parameters() if one.grad is not None])
    live.undo()
    return found


def inference_peak(gpu: str) -> None:
    """Without training nothing is saved: a compressed activation is there beside the dense one that it came from."""
    with vramfit.VirtualGPU(gpu), torch.no_grad():
        first, second = (nn.Linear(1024, 4096).cuda(), nn.Linear(4096, 1024).cuda())
        x = torch.empty(4096, 1024, device="cuda")
        peaks = []
        for compressed in (False, True):
            torch.cuda.reset_peak_memory_stats()
            hidden = torch.relu_(first(x))
            if compressed:
                kept = hidden.topk(410, dim=1)
                hidden = torch.zeros_like(hidden).scatter_(1, kept.indices, kept.values)
            second(hidden)
            peaks.append(torch.cuda.max_memory_allocated())
            del hidden
    console.print(
        f"a feed-forward without training: peak {mib(peaks[0])} MiB, with its hidden values as the largest tenth "
        f"{mib(peaks[1])} MiB: the next product wants them dense"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--steps", type=int, default=40, help="steps that the model learns")
    parser.add_argument("--activations", action="store_true", help="top-k activations alone")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with vramfit.VirtualGPU(arguments.gpu):  # before the first backward pass of this process
        pass
    if not arguments.activations:
        inference(arguments.gpu, arguments.steps)
    activations(arguments.gpu)


if __name__ == "__main__":
    main()
