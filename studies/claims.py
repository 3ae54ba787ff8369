"""Common sayings about GPU memory, each checked on the virtual GPU.

    python studies/claims.py                      # all of them, a table each
    python studies/claims.py randn lazy-to        # some
    python studies/claims.py --list
    python studies/claims.py --write docs/claims.md
    python studies/claims.py --check                # exit code 3 where docs/claims.md is out of date
    python studies/claims.py --check FILE NAME ...  # some of it, or of another page

All take some minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from folklore.finding import Answer, Finding, Saying
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

SAYINGS = (
    Saying(name="resnet50", text="ResNet-50 has 98 MB of parameters.", check="sizes.resnet50_parameters"),
    Saying(
        name="one-convolution",
        text="One convolution on 64 x 3 x 224 x 224 can hold over 500 MB.",
        check="sizes.one_convolution",
    ),
    Saying(name="resnet152", text="ResNet-152 in fp32 needs about 11 GB.", check="sizes.resnet152"),
    Saying(
        name="bert-large", text="BERT-Large at batch 32 exceeds 24 GB.", check="sizes.bert_large_batch_32"
    ),
    Saying(
        name="randn",
        text="`torch.randn(1000, 1000).cuda()` takes about 8 MB.",
        check="sizes.randn_of_a_million",
    ),
    Saying(
        name="unet3d",
        text="A 512 x 512 x 128 volume in a 3D U-Net takes 42 GB.",
        check="sizes.volume_in_a_unet",
    ),
    Saying(
        name="volume-blocks",
        text="A 512 x 512 x 128 volume by blocks of 256 x 256 x 64 in half precision takes 18 GB instead of 42, 1.8 "
        "times faster.",
        check="inference.volume_by_blocks",
    ),
    Saying(
        name="long-document",
        text="A document model goes from 1,024 to 2,048 tokens at no more than 35 % more memory.",
        check="inference.document_twice_as_long",
    ),
    Saying(name="context", text="A CUDA context takes about 200 MB.", check="sizes.context"),
    Saying(name="amp", text="Mixed precision (AMP) saves about 40 %.", check="savings.amp"),
    Saying(
        name="checkpointing",
        text="Checkpointing saves 60 to 70 % for 20 to 30 % more time.",
        check="savings.checkpointing",
    ),
    Saying(name="adam", text="Adam holds three times as much as SGD.", check="savings.adam_and_sgd"),
    Saying(
        name="accumulation",
        text="Gradient accumulation divides the memory by its steps.",
        check="savings.accumulation",
    ),
    Saying(name="fsdp", text="FSDP saves up to ten times.", check="several_cards.fsdp"),
    Saying(name="ddp", text="DDP pools the memory of cards.", check="several_cards.ddp"),
    Saying(name="half", text="`.half()` halves the memory.", check="savings.half"),
    Saying(name="fragmentation", text="Fragmentation can cost 30 to 50 %.", check="runtime.fragmentation"),
    Saying(
        name="pinned",
        text="Copies from pinned memory are two to three times faster.",
        check="runtime.pinned_copies",
    ),
    Saying(name="lazy-to", text="`.to('cuda')` copies lazily.", check="runtime.to_is_lazy"),
    Saying(
        name="kv-cache",
        text="A key-value cache grows exponentially with the sequence.",
        check="runtime.key_value_cache",
    ),
    Saying(
        name="page-threshold",
        text="`CUDA_LAZY_ALLOC_PAGE_THRESHOLD` controls when memory migrates.",
        check="runtime.page_threshold",
    ),
    Saying(
        name="empty-cache",
        text="`empty_cache()` leaves reserved memory as it is.",
        check="runtime.empty_cache",
    ),
    Saying(
        name="learnt-sizes",
        text="Reinforcement learning finds the best batch size for each step.",
        check="policies.sizes_by_learning",
    ),
)
PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
OUT_OF_DATE = 3
STYLES = {Answer.RIGHT: "green", Answer.WRONG: "red", Answer.DEPENDS: "yellow", Answer.OPEN: "blue"}


def main(arguments: list[str] | None = None) -> int:
    """Check what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check common sayings about GPU memory on the virtual GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which of them; none: all")
    parser.add_argument("--list", action="store_true", help="print the names and the sayings")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of all of them")
    parser.add_argument(
        "--check",
        type=Path,
        nargs="?",
        const=PAGE,
        metavar="FILE",
        help="compare with a page, docs/claims.md, instead of printing",
    )
    options = parser.parse_args(arguments)
    console = Console()
    known = {saying.name: saying for saying in SAYINGS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no saying {', '.join(unknown)}; --list names them")
    if options.write is not None and (options.names or options.check is not None):
        parser.error("--write writes the page of all sayings; leave out names and --check")
    if options.check is not None and not options.check.is_file():
        parser.error(f"there is no page {options.check}; --write makes it")
    if options.list:
        for saying in SAYINGS:
            console.print(f"{saying.name:<16} {saying.text}", highlight=False)
        return 0
    chosen = [known[name] for name in options.names] or list(SAYINGS)
    found: list[tuple[Saying, Finding]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for saying in chosen:
            progress.update(task, description=saying.name)
            found.append((saying, saying.find()))
            progress.advance(task)
            if options.write is None and options.check is None:
                show(*found[-1], console)
    if options.write is not None:
        options.write.write_text(page(found), encoding="utf-8")
        console.print(f"{len(found)} sayings written to {options.write}")
    return 0 if options.check is None else compare(options.check, found, console)


def compare(path: Path, found: list[tuple[Saying, Finding]], console: Console) -> int:
    """Tell which sections of the page are out of date; returns the exit code."""
    written = path.read_text(encoding="utf-8")
    stale = [saying.name for saying, finding in found if section(saying, finding) not in written]
    for name in stale:
        console.print(f"{path} is out of date: {name}", soft_wrap=True)
    return OUT_OF_DATE if stale else 0


def show(saying: Saying, finding: Finding, console: Console) -> None:
    """Print one saying with its answer and its figures."""
    console.print(f"\n[bold]{saying.text}[/bold]", highlight=False)
    style = STYLES[finding.answer]
    console.print(f"[{style}]{finding.answer.value}.[/{style}] {finding.why}", highlight=False)
    table = Table(*finding.columns)
    for row in finding.rows:
        table.add_row(*row)
    console.print(table)


def page(found: list[tuple[Saying, Finding]]) -> str:
    """The page of all sayings, in Markdown."""
    import torch

    lines = [
        "# Common sayings about GPU memory, checked",
        "",
        "Each was run on the virtual GPU (torch "
        f"{torch.__version__.split('+')[0]}; an A100 80GB, or a card of 1 TiB where that is too small). "
        "Memory is exact but for the workspaces of cuDNN, which are estimated; times are estimates from data sheets. "
        "*With context* is what torch reserves and the CUDA context, as nvidia-smi shows it; where memory is short, "
        "torch gives cached blocks back first, so that a program may fit a card with less. "
        "`python studies/claims.py --write docs/claims.md` makes this page anew.",
        "",
        "| saying | answer |",
        "|---|---|",
        *(f"| [{saying.text}](#{saying.name}) | {finding.answer.value} |" for saying, finding in found),
    ]
    return "\n".join(lines) + "\n" + "".join("\n" + section(saying, finding) for saying, finding in found)


def section(saying: Saying, finding: Finding) -> str:
    """The part of the page about one saying."""
    lines = [
        f'<a id="{saying.name}"></a>',
        f"## {saying.text}",
        "",
        f"**{finding.answer.value}.** {finding.why}",
        "",
        "| " + " | ".join(finding.columns) + " |",
        "|" + "---|" * len(finding.columns),
        *("| " + " | ".join(row) + " |" for row in finding.rows),
        "",
        f"    python studies/claims.py {saying.name}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
