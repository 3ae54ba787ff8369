"""Whether the need that a report of running out names is that of a card without a limit, for fifty programs.

    python benchmarks/shortage_reports.py [--only PATTERN] [--seed N]

Each program is a family of models with an optimizer, a precision and a batch. It first runs on a virtual card without
a limit, which tells what it reserves. Then it is run as users do (`vramfit.run`) on the same card with 50 to 92 % of
what it took, so that it runs out at different places, and the report's need is held against the first figure. A row has
the program, its card, what it needs, what is named and how far that is off, the lower bound that is known without a
second run (``--no-need``) as a share of the need, and the card that is named. Ctrl-C ends with the rows so far.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import vramfit
from vramfit.analysis import verdict
from vramfit.gpus import find_gpu
from vramfit.options.run_options import RunOptions
from vramfit.units import TIB, format_bytes
from vramfit.virtual.virtual_run import run_in_child

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a program needs, and what its report says. Bytes throughout.

    Attributes:
        needs: of the card without a limit, its context included.
        named: by the report; None where the program fits once the cache is given back.
        whole: the report says that this is all.
        least: what the report says without a second run.
        holds: a card is named, and it holds the program.
    """

    needs: int
    named: int | None = None
    whole: bool = False
    least: int = 0
    holds: bool = False
    why_not: str = ""
    card: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the report is right to the byte."""
        return self.whole and self.named == self.needs

    def words(self) -> str:
        """The row of the table."""
        if self.named is None:
            return f"{format_bytes(self.needs):>11}  fits once the cache is given back"
        told = f"{format_bytes(self.named):>11} {self.named - self.needs:>12,} B"
        if not self.whole:
            told = f"at least {format_bytes(self.named)}: {self.why_not}"
        share = f"{self.least / self.needs:.0%}"
        return f"{format_bytes(self.needs):>11} {told}  {share:>5}  {self.card}"


def measured(case: Case, folder: Path) -> Row:
    """Run a program without a limit and with one.

    Raises:
        SystemExit: the program fails by itself.
    """
    script = folder / "program.py"
    script.write_text(case.text)
    spec = find_gpu(case.card)
    unlimited = run_in_child([str(script)], RunOptions(gpu=replace(spec, total_bytes=TIB), alloc_conf=""))
    if unlimited.exit_code != 0:
        raise SystemExit(f"{case.name} fails: {unlimited.error}")
    device = unlimited.devices[0]
    needs = device.peak_reserved_bytes + device.context_bytes
    total = device.context_bytes + int(case.share * device.peak_reserved_bytes)
    report = vramfit.run(str(script), gpu=replace(spec, total_bytes=total), alloc_conf="")
    need, card = report.need, report.verdict.smallest_gpu
    if need is None:
        return Row(needs=needs)
    reserved = device.peak_reserved_bytes
    return Row(
        needs=needs,
        named=need.bytes,
        whole=need.whole,
        least=verdict(replace(report.run, again=None)).needed,
        holds=card is not None and card.total_bytes >= reserved + card.typical_context_bytes,
        why_not=need.why_not,
        card="no card" if card is None else card.name,
    )


def summary(rows: Sequence[Row]) -> str:
    """What all rows together say."""
    out = [row for row in rows if row.named is not None]
    if not out:
        return f"{len(rows)} programs, none of which runs out."
    shares = [row.least / row.needs for row in out]
    return (
        f"{len(rows)} programs, {len(out)} of which run out. The need equals that of a card without a limit "
        f"to the byte in {sum(row.is_equal for row in out)} of them, and the card that is named holds the program in "
        f"{sum(row.holds for row in out)}. Without a second run the lower bound is {min(shares):.0%} to "
        f"{max(shares):.0%} of the need."
    )


def main() -> None:
    """Run them, print a row for each, and what they say together."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", default="*", metavar="PATTERN", help="names to run")
    options.add_argument("--seed", type=int, default=37)
    given = options.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        for case in cases(given.seed):
            if fnmatch.fnmatch(case.name, given.only):
                row = measured(case, Path(folder))
                rows.append(row)
                print(f"{case.name:62} {case.card:10} {row.words()}", flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
