"""A model larger than the card generates: streamed weights beside accelerate's and diffusers' offloading.

    python benchmarks/language/streaming.py [--budget 4GiB] [--gpu 'RTX 4090'] [--prompt 512] [--tokens 8] [--layers 32]

A model of Llama 7B's shape (huggyllama/llama-7b: 32 layers of width 4,096) in float16 with drawn weights generates on
the virtual card, within the budget that the context is a part of. Bytes are exact, seconds simulated: each way runs the
call twice, and the second is timed. Beside the seconds is what they are of the larger of two bounds that no way with
the same layers on the card can beat: what the link needs for the bytes that this way carries, and what the card needs
to compute (the seconds of the model that is whole on a card, which is large enough). Then a small model with the same
code on the CPU: the tokens of each way, and of streaming with copies delayed at random, beside the plain model's.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map
from diffusers.hooks import apply_group_offloading
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

import vramfit
from vramfit.errors import VramfitError
from vramfit.gpus import find_gpu
from vramfit.inference.host_lane import CopyLane
from vramfit.inference.streaming.weight_placement import WeightPlacement
from vramfit.inference.streaming.weight_stream import WeightStream
from vramfit.techniques import AttachedProgram
from vramfit.techniques.weight_streaming import attach_stream, streamed_layers
from vramfit.units import GIB, parse_bytes
from vramfit.virtual.fake_impls import host
from vramfit.virtual.simulated_streams import Engine

ENDLESS = 1 << 44
"""Memory of a card on which all fits, for what others take without a limit."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is generated, and where."""

    gpu: str
    budget: int
    prompt: int
    tokens: int
    layers: int

    def model(self) -> nn.Module:
        """The large model without values."""
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=self.layers,
            num_attention_heads=32,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            with no_init_weights():
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def generate(self, model: nn.Module, device: Any) -> Any:
        """The call that has to fit."""
        ids = torch.ones(1, self.prompt, dtype=torch.long, device=device)
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.tokens,
            min_new_tokens=self.tokens,
            do_sample=False,
            pad_token_id=0,
        )


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a way took: bytes, simulated seconds of the second call, and what crossed the link for it."""

    allocated: int
    reserved: int
    context: int
    pinned: int
    seconds: float
    carried: int

    @property
    def total(self) -> int:
        """All that the card has to have."""
        return self.reserved + self.context


def measured(task: Task, prepare: Callable[[nn.Module], object]) -> Taken:
    """Prepare the model in some way and generate twice on a card that never runs out."""
    spec = find_gpu(task.gpu)
    endless = replace(spec, total_bytes=ENDLESS, context_bytes=spec.typical_context_bytes)
    with vramfit.VirtualGPU(endless) as gpu, counted_uploads() as carried:
        model = task.model()
        kept = prepare(model)  # what streams lives as long as it is used
        task.generate(model, "cuda")
        torch.cuda.synchronize()
        began, before = gpu.run.seconds_simulated, carried[0]
        task.generate(model, "cuda")
        torch.cuda.synchronize()
        seconds, crossed = gpu.run.seconds_simulated - began, carried[0] - before
        del model, kept
    device = gpu.run.devices[0]
    return Taken(
        allocated=device.peak_allocated_bytes,
        reserved=device.peak_reserved_bytes,
        context=device.context_bytes,
        pinned=gpu.run.host_pinned_peak_bytes,
        seconds=seconds,
        carried=crossed,
    )


@contextmanager
def counted_uploads() -> Iterator[list[int]]:
    """Bytes of all copies to the card so far, by whoever."""
    total, plain = [0], host._pass_link

    def counted(mode: Any, device: int, nbytes: int, engine: Any, *args: Any, **options: Any) -> None:
        if engine is Engine.UPWARDS:
            total[0] += nbytes
        plain(mode, device, nbytes, engine, *args, **options)

    host._pass_link = counted
    try:
        yield total
    finally:
        host._pass_link = plain


def streamed_at(placement: WeightPlacement) -> Callable[[nn.Module], object]:
    """Streaming, with the layers where they were found to fit."""
    return lambda model: vramfit.streamed(model, placement=placement, device="cuda")


def accelerate_all(model: nn.Module) -> None:
    """Every module's weights are copied when it is called, from pageable memory."""
    cpu_offload(model, execution_device=torch.device("cuda", 0))


def accelerate_map(weights: int) -> Callable[[nn.Module], None]:
    """What `infer_auto_device_map` puts on the card stays, the rest as in `accelerate_all`."""

    def prepare(model: nn.Module) -> None:
        places = infer_auto_device_map(
            model,
            max_memory={0: weights, "cpu": ENDLESS},
            no_split_module_classes=["LlamaDecoderLayer"],
        )
        dispatch_model(model, places)

    return prepare


def diffusers_blocks(model: nn.Module) -> None:
    """Blocks come one after another, the next one on a stream of its own; the head stays."""
    card = torch.device("cuda")
    model.lm_head.to(card)  # blocks are looked for among the children of what is given
    apply_group_offloading(
        model.model, onload_device=card, offload_type="block_level", num_blocks_per_group=1, use_stream=True
    )


def diffusers_leaves(model: nn.Module) -> None:
    """Every layer comes when it is called, the next one on a stream of its own."""
    apply_group_offloading(
        model, onload_device=torch.device("cuda"), offload_type="leaf_level", use_stream=True
    )


def whole(model: nn.Module) -> None:
    """The plain model on a card that is large enough."""
    model.cuda()


def large(task: Task, console: Console) -> bool:
    """The table of the large model; whether streaming kept the budget and the bound."""
    spec = find_gpu(task.gpu)
    context = spec.typical_context_bytes
    model = task.model()
    began = time.perf_counter()
    found = vramfit.streamed(
        model,
        task.generate,
        budget=task.budget - context,
        gpu=task.gpu,
        device="cpu",
        progress=lambda text: console.print(f"[dim]{text}[/dim]"),
    )
    searched = time.perf_counter() - began
    placement = found.placement
    found.undo()
    del model, found
    ways: list[tuple[str, Callable[[nn.Module], object]]] = [
        ("whole, on a larger card", whole),
        ("vramfit.streamed", streamed_at(placement)),
        ("accelerate cpu_offload", accelerate_all),
        ("accelerate device_map, budget", accelerate_map(task.budget)),
        ("accelerate device_map, budget less 10 %", accelerate_map(task.budget * 9 // 10)),
        ("diffusers group offloading, blocks", diffusers_blocks),
        ("diffusers group offloading, leaves", diffusers_leaves),
    ]
    table = Table(
        title=f"Llama 7B's shape, float16, on a virtual {spec.name}, budget {task.budget / GIB:.2f} GiB"
    )
    for head in ("way", "total GiB", "allocated GiB", "pinned GiB", "carried GiB", "seconds", "of the bound"):
        table.add_column(head, justify="left" if head == "way" else "right")
    kept, compute = True, 0.0
    for name, prepare in ways:
        taken = measured(task, prepare)
        compute = compute or taken.seconds
        bound = max(taken.carried / spec.host_link, compute)
        fits = "" if taken.total <= task.budget else " (over)"
        sizes = (taken.allocated, taken.pinned, taken.carried)
        table.add_row(
            name,
            f"{taken.total / GIB:.2f}{fits}",
            *(f"{size / GIB:.2f}" for size in sizes),
            f"{taken.seconds:.3f}",
            f"{taken.seconds / bound:.3f}",
        )
        if name == "vramfit.streamed":
            kept = taken.total <= task.budget and taken.seconds <= 1.05 * bound
    console.print(table)
    waiting, layers = len(placement.streamed), len(placement.layers)
    console.print(
        f"{layers - waiting} of {layers} layers stay, {placement.slots} slots of "
        f"{placement.slot_bytes / GIB:.3f} GiB; found in {placement.runs} runs and {searched:.0f} s"
    )
    try:
        vramfit.streamed(
            task.model(),
            task.generate,
            budget=task.budget - context,
            gpu=task.gpu,
            device="cpu",
            offload="never",
        )
    except VramfitError as error:
        console.print(f'offload="never": {error.message}')
    return kept


# -- values ----------------------------------------------------------------------------------------------------------


class DelayedLane(CopyLane):
    """Copies by threads of their own after random times; what is there before is no number."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def mark(self) -> threading.Event:
        """What the CPU was given is done."""
        end = threading.Event()
        end.set()
        return end

    def into(self, places: list[torch.Tensor], hosts: list[torch.Tensor], after: Sequence[Any]) -> Any:
        """See `vramfit.inference.host_lane.Lane`."""
        end, delay = threading.Event(), self._random.uniform(0, 2e-3)

        def copy() -> None:
            for one in after:
                one.wait()
            with torch.no_grad():
                for place in places:
                    place.fill_(float("nan"))
                time.sleep(delay)
                for place, host in zip(places, hosts, strict=True):
                    place.copy_(host)
            end.set()

        threading.Thread(target=copy, daemon=True).start()
        return end

    def wait(self, end: Any) -> None:
        """See `vramfit.inference.host_lane.Lane`."""
        end.wait()

    finish = wait


def small_model() -> nn.Module:
    """A model that the CPU computes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


def small_tokens(model: nn.Module) -> torch.Tensor:
    """What the small model generates."""
    ids = torch.arange(3, 35).view(2, 16)
    mask = torch.ones_like(ids)
    found: torch.Tensor = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    return found


def small(console: Console) -> bool:
    """The tokens of each way on the CPU; whether all of ours are the plain model's."""
    wanted = small_tokens(small_model())
    table = Table(title="24 tokens of a small model on the CPU")
    table.add_column("way")
    table.add_column("equal to the plain model's", justify="right")
    equal = True
    for slots in (1, 2, 3):
        for seed in range(3):
            model = small_model()
            live = AttachedProgram(model, None, torch.device("cpu"))
            layers = streamed_layers(model, ())
            attach_stream(live, WeightStream(live.device, len(layers), slots, lane=DelayedLane(seed)), layers)
            same = torch.equal(small_tokens(model), wanted)
            live.undo()
            equal = equal and same and torch.equal(small_tokens(model), wanted)
            table.add_row(f"streamed, {slots} slots, copies delayed at random (seed {seed})", str(same))
    peer = small_model()
    cpu_offload(peer, execution_device=torch.device("cpu"))
    table.add_row("accelerate cpu_offload", str(torch.equal(small_tokens(peer), wanted)))
    console.print(table)
    return equal


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 0 where the budget and the bound were kept and tokens are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args(arguments)
    task = Task(
        gpu=options.gpu,
        budget=parse_bytes(options.budget),
        prompt=options.prompt,
        tokens=options.tokens,
        layers=options.layers,
    )
    console = Console(width=120)
    equal = small(console)
    return 0 if large(task, console) and equal else 1


if __name__ == "__main__":
    sys.exit(main())
