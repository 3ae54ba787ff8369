"""Whether the need that a report of running out names is that of a card without a limit, for fifty programs.

    python benchmarks/shortage_reports.py [--only PATTERN] [--seed N]

Each program is a family of models with an optimizer, a precision and a batch. It first runs on a virtual card without
a limit, which tells what it reserves. Then it is run as users do (`vramfit.run`) on the same card with 50 to 92 % of
what it took, so that it runs out at different places, and the report's need is held against the first figure. A row
also tells what the report would say without a second run (``--no-need``).
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

import vramfit
from vramfit.gpus import find_gpu
from vramfit.units import GIB, TIB, format_bytes
from vramfit.virtual.virtual_run import VirtualRun, run_in_child

CARDS = ("RTX 3060", "RTX 4090", "A100 40GB", "H100")

MODELS = {
    "mlp": """
model = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())))
def batch(): return torch.randn(size * 64, width, device="cuda")
""",
    "transformer": """
layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
def batch(): return torch.randn(size, 256, width, device="cuda")
""",
    "cnn": """
model = nn.Sequential(nn.Conv2d(3, width // 8, 3, padding=1), *(
    m for _ in range(depth)
    for m in (nn.Conv2d(width // 8, width // 8, 3, padding=1), nn.BatchNorm2d(width // 8), nn.ReLU())))
def batch(): return torch.randn(size, 3, 96, 96, device="cuda")
""",
    "lstm": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(width, width, depth, batch_first=True)
    def forward(self, x): return self.rnn(x)[0]
model = Net()
def batch(): return torch.randn(size, 64, width, device="cuda")
""",
    "embedding": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50_000, width), nn.Linear(width, 50_000)
    def forward(self, x): return self.head(self.table(x))
model = Net()
def batch(): return torch.randint(0, 50_000, (size, 32), device="cuda")
""",
    "attention": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
model = nn.Sequential(*(Block() for _ in range(depth)))
def batch(): return torch.randn(size, 256, width, device="cuda")
""",
}
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW(model.parameters())",
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "Adafactor": "torch.optim.Adafactor(model.parameters())",
    "RMSprop": "torch.optim.RMSprop(model.parameters())",
}
LOOPS = {
    "training": """
optimizer = {optimizer}
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16, enabled={autocast}):
        loss = model(batch()).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "accumulation": """
optimizer = {optimizer}
for _ in range(2):
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16, enabled={autocast}):
            loss = model(batch()).float().square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
""",
    "inference": """
model.eval()
kept = []
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled={autocast}):
    for _ in range(6):
        kept.append(model(batch()))
""",
    "validation": """
optimizer = {optimizer}
losses = []
for _ in range(2):
    loss = model(batch()).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(4):  # gradients are left on
    losses.append(model(batch()).float().square().mean())
""",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One program and the card that it runs on."""

    name: str
    text: str
    card: str
    share: float


def cases(seed: int) -> Iterator[Case]:
    """Fifty programs: every family in every loop twice, and two more, with the rest drawn."""
    chance = random.Random(seed)
    kinds = [(family, loop) for family in MODELS for loop in LOOPS] * 2
    kinds += [("transformer", "training"), ("cnn", "training")]
    for number, (family, loop) in enumerate(kinds):
        optimizer = chance.choice(sorted(OPTIMIZERS))
        precision = chance.choice(("float32", "bfloat16", "autocast"))
        width, depth = chance.choice((512, 1024, 2048)), chance.choice((2, 4, 8))
        size = chance.choice((4, 8, 16, 32))
        if family == "lstm" and precision == "bfloat16":
            precision = "autocast"
        head = f"import torch\nfrom torch import nn\nwidth, depth, size = {width}, {depth}, {size}\n"
        kind = "torch.bfloat16" if precision == "bfloat16" else "torch.float32"
        data = (
            ""
            if precision != "bfloat16" or family == "embedding"
            else "\nfloats = batch\ndef batch(): return floats().bfloat16()\n"
        )
        body = LOOPS[loop].format(optimizer=OPTIMIZERS[optimizer], autocast=precision == "autocast")
        yield Case(
            name=f"{number:02} {family} {loop} {optimizer if loop != 'inference' else '-'} {precision} "
            f"{width}x{depth}x{size}",
            text=f"{head}{MODELS[family]}{data}model = model.cuda().to({kind})\n{body}",
            card=chance.choice(CARDS),
            share=chance.uniform(0.5, 0.92),
        )


def main() -> None:
    """Run them and print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", default="*", metavar="PATTERN", help="names to run")
    options.add_argument("--seed", type=int, default=37)
    given = options.parse_args()
    table = Table(
        "program", "card", "needs", "named", "difference", "without a second run", "card that is named"
    )
    ran = equal = fits = unnamed = 0
    short: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(given.seed):
            if not fnmatch.fnmatch(case.name, given.only):
                continue
            script = Path(folder, "program.py")
            script.write_text(case.text)
            spec = find_gpu(case.card)
            whole = run_in_child([str(script)], VirtualRun(gpu=replace(spec, total_bytes=TIB), alloc_conf=""))
            if whole.exit_code != 0:
                raise SystemExit(f"{case.name} fails: {whole.error}")
            device = whole.devices[0]
            needs = device.peak_reserved_bytes + device.context_bytes
            total = device.context_bytes + int(case.share * device.peak_reserved_bytes)
            small = replace(spec, name=f"{case.card} of {total / GIB:.2f} GiB", total_bytes=total)
            report = vramfit.run(str(script), gpu=small, alloc_conf="")
            ran += 1
            if report.fits:  # the allocator gave back what it had cached
                fits += 1
                table.add_row(case.name, small.name, format_bytes(needs), "fits", "", "", "")
                continue
            need, card = report.need, report.verdict.smallest_gpu
            assert need is not None
            least = vramfit.analysis.verdict(replace(report.run, again=None)).needed
            short.append(least / needs)
            equal += need.whole and need.bytes == needs
            unnamed += (
                card is None or card.total_bytes < needs - device.context_bytes + card.typical_context_bytes
            )
            table.add_row(
                case.name,
                small.name,
                format_bytes(needs),
                f"{'' if need.whole else 'at least '}{format_bytes(need.bytes)}",
                f"{need.bytes - needs:,} B" if need.whole else need.why_not,
                f"{format_bytes(least)} ({least / needs:.0%})",
                "none" if card is None else card.name,
            )
    console = Console(width=200)
    console.print(table)
    out = ran - fits
    console.print(
        f"{ran} programs, of which {fits} fit once the cache is given back. Of the {out} that run out the need equals "
        f"that of a card without a limit, to the byte, in {equal}; a card that has it is named in {out - unnamed}. "
        f"Without a second run the lower bound is {min(short, default=1):.0%} to {max(short, default=1):.0%} of it."
    )


if __name__ == "__main__":
    main()
