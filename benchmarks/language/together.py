"""Two trainings on one card: what `vramfit together` says, beside what each limit and emptied cache gives in a run.

    python benchmarks/language/together.py [--gpu NAME] [--missing PART] [--json FILE]

A GPT with AdamW and a convolutional network with SGD run by themselves on a virtual card, and are told side by side on
it, and on a smaller one on which they fit only within limits. Then each runs again, within the limit that it was given,
and with its cache emptied after each step; what these runs take stands beside what was told. A plain sum of
``max_memory_allocated``, which is what one reads off two logs, is there too. Bytes are exact on the virtual GPU, times
simulated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import vramfit
from vramfit.analysis import SharedProcess
from vramfit.units import MIB, format_bytes
from vramfit.writing import write_text

GPT = """
import sys, torch
from torch import nn
layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True, dropout=0.0)
model = nn.Sequential(nn.Embedding(32000, 1024), nn.TransformerEncoder(layer, 8, enable_nested_tensor=False),
                      nn.Linear(1024, 32000, bias=False)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    tokens = torch.randint(0, 32000, (8, 513), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    del logits, loss
    optimizer.step()
    optimizer.zero_grad()
    if "empty" in sys.argv:
        torch.cuda.empty_cache()
        print(torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())
"""
CONVOLUTIONAL = """
import sys, torch
from torch import nn
def block(a, b, stride):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True))
widths = [3, 64, 64, 128, 128, 256, 256, 512, 512]
model = nn.Sequential(*(block(a, b, 2 if a < b else 1) for a, b in zip(widths, widths[1:])),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(4):
    pictures = torch.randn(96, 3, 224, 224, device="cuda")
    loss = nn.functional.cross_entropy(model(pictures), torch.randint(0, 1000, (96,), device="cuda"))
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()
    if "empty" in sys.argv:
        torch.cuda.empty_cache()
        print(torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())
"""
SCRIPTS = {"gpt.py": GPT, "convolutional.py": CONVOLUTIONAL}


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """One process run again. Bytes.

    Attributes:
        limit: that it was given; None where no limits fit.
        reserved: peak of the run within it; None where it ran out.
        left: the most that emptying left between its steps.
        peak: with emptying.
    """

    limit: int | None
    reserved: int | None
    left: int
    peak: int


def confirmed(one: SharedProcess, script: Path, gpu: str, card_bytes: int) -> Confirmed:
    """Run a program within the limit that it was given, and with an emptied cache."""
    limit = reserved = None
    if one.fraction is not None:
        # A share of the small card, as a share of the one that the programs see.
        limit = int(one.fraction * card_bytes)
        fraction = limit / vramfit.gpus.find_gpu(gpu).total_bytes
        again = vramfit.run(script, gpu=gpu, alloc_conf=f"per_process_memory_fraction:{fraction:.9f}")
        reserved = again.peak_reserved_bytes if again.exit_code == 0 else None
    child = [
        sys.executable,
        "-m",
        "vramfit",
        "run",
        "--gpu",
        gpu,
        "--json",
        "/dev/null",
        str(script),
        "empty",
    ]
    printed = subprocess.run(child, capture_output=True, text=True, check=True).stdout
    told = [line.split() for line in printed.splitlines() if line.replace(" ", "").isdigit()]
    return Confirmed(
        limit=limit,
        reserved=reserved,
        left=max(int(left) for left, _ in told[:-1]),
        peak=int(told[-1][1]),
    )


def figure(size: int | None) -> str:
    return "–" if size is None else format_bytes(size)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="RTX 4090", help="the card that the programs run on")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--missing", default=0.5, type=float, help="part of what limits save that is there")
    options = parser.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="together-") as folder:
        scripts = []
        for name, text in SCRIPTS.items():
            scripts.append(Path(folder) / name)
            scripts[-1].write_text(text)
        whole = vramfit.together(*scripts, gpu=options.gpu)
        whole.print()
        sharing = whole.sharing
        # A card on which they fit only within limits: between the sum of the peaks and that of the least.
        saved = sharing.total - sharing.with_limits
        size = (sharing.total - round(saved * (1 - options.missing))) // (2 * MIB) * 2 * MIB
        small = vramfit.analysis.share_card(
            whole.runs,
            [one.name for one in sharing.processes],
            small_card(options.gpu, size),
        )
        console.print()
        vramfit.report.print_report(small, console=console)
        table = Table(title="Run again")
        for head in ("process", "limit", "peak in it", "emptied: told", "left", "peak told", "peak"):
            table.add_column(head, justify="left" if head == "process" else "right")
        told = []
        for one, script in zip(small.processes, scripts, strict=True):
            found = confirmed(one, script, options.gpu, small.card_bytes)
            between = one.between_steps
            table.add_row(
                script.stem[:6],
                figure(found.limit),
                figure(found.reserved) if found.limit is None or found.reserved is not None else "ran out",
                figure(None if between is None else between.emptied),
                figure(found.left),
                figure(None if between is None else between.peak),
                figure(found.peak),
            )
            told.append(
                {
                    "name": one.name,
                    "limit": found.limit,
                    "peak": found.reserved,
                    "left": found.left,
                    "emptied_peak": found.peak,
                }
            )
        console.print(table)
    allocated = sum(one.allocated for one in sharing.processes)
    console.print(
        f"A sum of max_memory_allocated says {format_bytes(allocated)}; contexts and caches make it "
        f"{format_bytes(sharing.total)}, {sharing.total / allocated - 1:.0%} more."
    )
    if options.json is not None:
        document = {"whole": whole.to_dict(), "small": vramfit.report.to_json(small), "again": told}
        write_text(options.json, json.dumps(document, indent=2) + "\n")
    return 0


def small_card(gpu: str, size: int) -> vramfit.gpus.GpuSpec:
    """The same card with less memory."""
    from dataclasses import replace

    return replace(vramfit.gpus.find_gpu(gpu), total_bytes=size)


if __name__ == "__main__":
    sys.exit(main())
