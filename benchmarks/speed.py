"""How fast the virtual GPU and the replay are, each beside a peer, in one run.

    python benchmarks/speed.py [--full]
    python benchmarks/speed.py --beside REVISION [--only PROGRAM ...] [--pairs N]

Three tables:

1. Seconds per training step on the virtual GPU, beside the same step under torch's own ``MemTracker`` with
   ``FakeTensorMode``; the ratio is the claim, the seconds depend on the machine.
2. Llama-7B (batch 4 x 2048, AdamW, bfloat16): seconds per step, seconds in all and resident memory of the process.
3. Events per second of the replay (see replay.py).

Each row of the first two tables runs in a process of its own.

With ``--beside`` there is another table: ops a second of whole programs (training, generation token by token, tiny ops)
on this checkout and on a revision of this repository, which take turns round by round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

# MemTracker takes tens of seconds for a step of GPT-2; a larger model beside it is for --full.
ROWS = (("gpt2", "virtual GPU"), ("gpt2", "MemTracker"), ("llama-7b", "virtual GPU"))
FULL_ROWS = (*ROWS, ("llama-1b", "virtual GPU"), ("llama-1b", "MemTracker"))
STEPS = 3


def build(name: str):
    """A bfloat16 model on the default device, its optimizer and one training step, for either tool."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2":
        model, vocabulary, shape = GPT2LMHeadModel(GPT2Config(use_cache=False)), 50257, (4, 1024)
    elif name == "llama-1b":
        config = LlamaConfig(hidden_size=2048, intermediate_size=5504, num_hidden_layers=22, use_cache=False)
        model, vocabulary, shape = LlamaForCausalLM(config), 32000, (4, 2048)
    else:
        model, vocabulary, shape = LlamaForCausalLM(LlamaConfig(use_cache=False)), 32000, (4, 2048)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, vocabulary, shape)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def timed(step, after=lambda: None) -> list[float]:
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        after()
    return seconds


def on_virtual_gpu(name: str) -> dict[str, object]:
    import torch

    from vramfit import VirtualGPU

    with VirtualGPU("300GiB") as gpu:
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.bfloat16)
        _, _, step = build(name)
        seconds = timed(step)
        return {"seconds": seconds, "peak": gpu.peak_allocated_bytes}


def under_mem_tracker(name: str) -> dict[str, object]:
    """torch.distributed._tools.mem_tracker, as its documentation uses it."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from vramfit.torch_internals import build_shim

    build_shim.install()  # without it a CPU build aborts in the backward pass of fake cuda tensors
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode():
        model, optimizer, step = build(name)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            seconds = timed(step, tracker.reset_mod_stats)
        snapshot = tracker.get_tracker_snapshot("peak")
    device = next(d for d in snapshot if d.type == "cuda")
    return {"seconds": seconds, "peak": snapshot[device]["Total"]}


TOOLS = {"virtual GPU": on_virtual_gpu, "MemTracker": under_mem_tracker}


def in_child(tool: str, name: str) -> dict[str, object]:
    """Run one row in a process of its own; adds seconds in all and resident memory."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--row", tool, name], capture_output=True, text=True, check=False
    )
    if done.returncode or not done.stdout.strip():
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    row = json.loads(done.stdout.strip().splitlines()[-1])
    return {**row, "total": time.perf_counter() - start}


def run_row(tool: str, name: str) -> None:
    import os
    import resource

    row = TOOLS[tool](name)
    row["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(row), flush=True)
    os._exit(0)  # autograd's threads outlive the interpreter


def beside_revision(arguments: argparse.Namespace, console: Console) -> int:
    from speed_parts.beside import compare
    from speed_parts.programs import PROGRAMS

    unknown = [name for name in arguments.only if name not in PROGRAMS]
    if unknown or arguments.pairs < 1:
        what = (
            f"no program {unknown[0]!r}: there are {', '.join(PROGRAMS)}"
            if unknown
            else "--pairs wants 1 or more"
        )
        print(what, file=sys.stderr)
        return 2
    try:
        return 0 if compare(arguments.beside, arguments.only, arguments.pairs, console) else 1
    except RuntimeError as error:
        print(f"cannot compare with {arguments.beside}: {error}", file=sys.stderr)
        return 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="a larger model beside MemTracker too (minutes)")
    parser.add_argument("--beside", metavar="REVISION", help="ops a second here and there, in turn")
    parser.add_argument(
        "--only", nargs="+", metavar="PROGRAM", default=[], help="of those that --beside runs"
    )
    parser.add_argument(
        "--pairs", type=int, default=5, help="rounds of each program and revision (%(default)s)"
    )
    parser.add_argument("--row", nargs=2, metavar=("TOOL", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        run_row(*arguments.row)
        return
    console = Console()
    console.width = max(console.width, 120)  # the tables' own width, where the output is a file
    if arguments.beside:
        sys.exit(beside_revision(arguments, console))
    table = Table(title="Seconds per training step (median of 3), one process each")
    for column in ("model", "tool", "s/step", "first step", "in all", "resident", "peak allocated"):
        table.add_column(column, justify="left" if column in ("model", "tool") else "right")
    table.add_column("ratio", justify="right")
    medians: dict[tuple[str, str], float] = {}
    for name, tool in FULL_ROWS if arguments.full else ROWS:
        with console.status(f"{name} on {tool}"):
            row = in_child(tool, name)
        if "error" in row:
            table.add_row(name, tool, str(row["error"])[:60])
            continue
        seconds = medians[name, tool] = sorted(row["seconds"])[STEPS // 2]
        ours = medians.get((name, "virtual GPU"))
        table.add_row(
            name,
            tool,
            f"{seconds:.2f}",
            f"{row['seconds'][0]:.2f}",
            f"{row['total']:.1f}",
            f"{row['resident'] / 2**30:.2f} GiB",
            f"{row['peak'] / 2**30:.3f} GiB",
            f"{ours / seconds:.3f}" if tool == "MemTracker" and ours else "",
        )
    console.print(table)
    console.print("ratio: the virtual GPU's seconds per step over MemTracker's, in this run")
    command = [sys.executable, str(Path(__file__).with_name("replay.py"))]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
