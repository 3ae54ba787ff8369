"""What one virtual rank costs against the size of its world, and whether virtual ranks hold what real ones hold.

    python benchmarks/ranks.py [--worlds 8,64,256,1024] [--steps N] [--json FILE]
    python benchmarks/ranks.py --gloo

The first runs the last rank of each world in an interpreter of its own: a Llama of 7 billion parameters, each layer
sharded by FSDP2 in bfloat16, batch 1 of 2,048 tokens, AdamW. The second runs every program of
tests/virtual/ranks/gloo_programs.py in worlds of 2 and 4 real processes (gloo, CPU tensors, metered) and of virtual
ranks, and compares what they hold after each part of a step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vramfit.errors import VramfitError
from vramfit.writing import write_text

SCHEMA = "vramfit.ranks/1"
MIB = 1 << 20
ROOT = Path(__file__).parents[1]
GLOO_WORLDS = (2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a rank cost.

    Attributes:
        world: ranks of its world.
        ops: that ran on the card.
        ready: seconds of a processor until the model is sharded, imports apart.
        step: seconds of a processor for the last step.
        resident: bytes of the interpreter at most.
        peak: bytes allocated on the card at most.
        simulated: seconds of the last step on the card.
    """

    world: int
    ops: int
    ready: float
    step: float
    resident: int
    peak: int
    simulated: float


def measure(world: int, steps: int) -> Cost:
    """Run the last rank of a world in this process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    import vramfit

    size = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    with vramfit.VirtualGPU("H100", rank=world - 1, world_size=world, alloc_conf="") as gpu:
        dist.init_process_group("nccl")
        torch.cuda.set_device((world - 1) % 8)
        began = time.process_time()
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, use_cache=False, **size))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.to_empty(device="cuda")
        ready = time.process_time() - began
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        clock = gpu.mode.machine.clock
        step = simulated = 0.0
        for _ in range(steps):
            began, then = time.process_time(), clock.now_us
            tokens = torch.randint(0, 32000, (1, 2048), device="cuda")
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step, simulated = time.process_time() - began, (clock.now_us - then) / 1e6
    return Cost(
        world=world,
        ops=gpu.run.ops,
        ready=ready,
        step=step,
        resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak=gpu.peak_allocated_bytes,
        simulated=simulated,
    )


def in_child(world: int, steps: int) -> Cost:
    """Run a rank in an interpreter of its own.

    Raises:
        VramfitError: it failed; what it printed is in the message.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--one", str(world), "--steps", str(steps), "--json", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise VramfitError(f"rank {world - 1} of {world} failed: {done.stderr.strip().splitlines()[-1]}")
        return Cost(**json.loads(Path(file.name).read_text()))


def table(costs: list[Cost]) -> Table:
    """A line for each world."""
    out = Table(
        "ranks", "ops", "ready, CPU s", "step, CPU s", "resident, MiB", "peak, MiB", "simulated step, ms"
    )
    for cost in costs:
        out.add_row(
            f"{cost.world:,}",
            f"{cost.ops:,}",
            f"{cost.ready:.1f}",
            f"{cost.step:.2f}",
            f"{cost.resident / MIB:,.0f}",
            f"{cost.peak / MIB:,.0f}",
            f"{cost.simulated * 1e3:,.0f}",
        )
    return out


def against_gloo() -> Table:
    """Figures of each program that differ between a real rank and a virtual one, of how many.

    Raises:
        VramfitError: a rank failed.
    """
    sys.path.insert(0, str(ROOT))
    from tests.virtual.ranks import gloo_programs

    out = Table("program", "world", "figures", "different")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, gloo_programs.__file__, folder, *map(str, GLOO_WORLDS)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise VramfitError(f"a rank failed: {done.stderr.strip().splitlines()[-1]}")
        for name in gloo_programs.PROGRAMS:
            for world in GLOO_WORLDS:
                figures = different = 0
                for rank in gloo_programs.virtual_ranks(world, list(gloo_programs.PROGRAMS)):
                    real, virtual = (
                        json.loads((Path(folder) / f"{kind}-{world}-{rank}.json").read_text())[name]
                        for kind in ("real", "virtual")
                    )
                    on_host = gloo_programs.ON_HOST.get(name, 0)
                    figures += len(real)
                    different += sum(a != b + on_host for a, b in zip(real, virtual, strict=True))
                out.add_row(name, str(world), str(figures), str(different))
    return out


def main() -> int:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", default="8,64,256,1024", help="sizes of worlds")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gloo", action="store_true", help="compare with real processes instead")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console()
    if options.one is not None:
        write_text(options.json, json.dumps(asdict(measure(options.one, options.steps))))
        return 0
    try:
        if options.gloo:
            console.print(against_gloo())
            return 0
        costs = [in_child(int(world), options.steps) for world in options.worlds.split(",")]
    except VramfitError as error:
        console.print(str(error))
        return 1
    console.print(table(costs))
    if options.json is not None:
        write_text(options.json, json.dumps({"schema": SCHEMA, "costs": [asdict(cost) for cost in costs]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
