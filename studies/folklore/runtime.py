"""Sayings about what torch and CUDA do."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

import vramfit
from folklore.finding import CARD, Answer, Finding, gib, measure, mib, percent
from folklore.networks import gpt2
from vramfit.gpus import find_gpu


def fragmentation() -> Finding:
    """Reserved against allocated where sizes vary."""

    def lengths_vary() -> None:
        model = gpt2(layers=6).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        draw = random.Random(0)
        for _ in range(25):
            tokens = torch.zeros(8, draw.randrange(64, 1024), dtype=torch.int64, device="cuda")
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def lengths_are_equal() -> None:
        model = gpt2(layers=6).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            tokens = torch.zeros(8, 1024, dtype=torch.int64, device="cuda")
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def a_cache_grows() -> None:
        cache = torch.empty(16, 32, 1, 128, dtype=torch.float16, device="cuda")
        for _ in range(1500):
            cache = torch.cat([cache, torch.empty(16, 32, 1, 128, dtype=torch.float16, device="cuda")], dim=2)

    rows, lost = [], {}
    for name, program in (
        ("GPT-2, all lengths 1024", lengths_are_equal),
        ("GPT-2, lengths 64 to 1023", lengths_vary),
        ("a KV cache grown by cat, 1500 steps", a_cache_grows),
    ):
        for conf in ("", "expandable_segments:True"):
            found = measure(program, alloc_conf=conf)
            lost[name, conf] = 1 - found.allocated / found.reserved
            rows.append(
                (
                    name,
                    "expandable segments" if conf else "default",
                    gib(found.allocated),
                    gib(found.reserved),
                    percent(lost[name, conf]),
                )
            )
    equal, equal_expandable, varied, varied_expandable, grown, grown_expandable = lost.values()
    return Finding(
        answer=Answer.DEPENDS,
        why=f"Equal sizes fit the gaps that they leave: {percent(equal)} lost. Lengths that vary lose "
        f"{percent(varied)}, a tensor that grows by a little each step {percent(grown)}: no gap is large enough for "
        f"the next. Expandable segments bring these three to {percent(equal_expandable)}, "
        f"{percent(varied_expandable)} and {percent(grown_expandable)}.",
        columns=("program", "allocator", "peak allocated", "peak reserved", "reserved beyond the peak"),
        rows=tuple(rows),
    )


def pinned_copies() -> Finding:
    """The virtual GPU has no wires to measure: what it assumes of them."""
    numbers = 1 << 28

    def to_card(pinned: bool) -> None:
        torch.empty(numbers, pin_memory=pinned).to("cuda")

    def to_host(pinned: bool) -> None:
        torch.empty(numbers, pin_memory=pinned).copy_(torch.empty(numbers, device="cuda"))

    rows = []
    for direction, copy in (("host to card", to_card), ("card to host", to_host)):
        for pinned in (True, False):
            assumed = measure(lambda copy=copy, pinned=pinned: copy(pinned)).seconds
            kind = "pinned" if pinned else "pageable"
            rows.append((f"{kind}, {direction}", f"{4 * numbers:,}", "not measured", f"{assumed:.3f}"))
    return Finding(
        answer=Answer.OPEN,
        why="A speed of wires, which only a card can tell: `vramfit calibrate` measures it, for both kinds of memory "
        "in both directions. A copy from pageable memory goes through a pinned buffer of the driver and waits for it; "
        "one from pinned memory goes at the rate of the link and can overlap with computing if `non_blocking=True` is "
        f"given. Without a profile vramfit takes the {find_gpu(CARD).host_link / 1e9:.1f} GB/s of the link on the data "
        f"sheet of an {CARD} for both kinds, which says nothing for or against the saying.",
        columns=("copy", "bytes", "seconds on a card", "seconds assumed by vramfit"),
        rows=tuple(rows),
    )


def to_is_lazy() -> Finding:
    """When the memory is taken."""
    seen: list[int] = []

    def run() -> None:
        model = nn.Linear(4096, 4096)
        seen.append(torch.cuda.memory_allocated())
        model.to("cuda")
        seen.append(torch.cuda.memory_allocated())
        x = torch.zeros(4096, 4096).pin_memory()
        y = x.to("cuda", non_blocking=True)
        seen.append(torch.cuda.memory_allocated())
        del y

    measure(run)
    return Finding(
        answer=Answer.WRONG,
        why="The memory is taken inside the call. What may come later is the copying itself, and only from pinned "
        "memory with `non_blocking=True`; the allocation is there at once in that case too.",
        columns=("moment", "allocated"),
        rows=tuple(
            zip(
                ("before", "after model.to('cuda')", "after x.to('cuda', non_blocking=True)"),
                (mib(amount) for amount in seen),
                strict=True,
            )
        ),
    )


def key_value_cache() -> Finding:
    """The cache of a decoder at lengths that double each time."""
    layers, heads, width, batch = 32, 8, 128, 8  # Llama-3-8B
    lengths = [1024 << doubling for doubling in range(5)]

    def cache(length: int) -> None:
        shape = (2, layers, batch, heads, length, width)
        torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    taken = [measure(lambda length=length: cache(length)).allocated for length in lengths]
    token = taken[0] // lengths[0] // batch
    return Finding(
        answer=Answer.WRONG,
        why=f"It grows in proportion: each token adds the same keys and values, here {token:,} bytes for each sequence "
        f"(2 x {layers} layers x {heads} heads x {width} numbers of 2 bytes). {lengths[-1] // lengths[0]} times the "
        f"tokens take {taken[-1] / taken[0]:g} times the memory, in batches too. What grows with the square of the "
        "length are the scores of attention in plain operators, and they are not kept.",
        columns=(f"tokens (Llama-3-8B in bfloat16, {batch} sequences)", "keys and values", "bytes a token"),
        rows=tuple(
            (f"{length:,}", gib(amount), f"{amount // length // batch:,}")
            for length, amount in zip(lengths, taken, strict=True)
        ),
    )


def page_threshold() -> Finding:
    """Whether anything knows the variable."""
    name = "CUDA_LAZY_ALLOC_PAGE_THRESHOLD"
    known = ("CUDA_VISIBLE_DEVICES", "PYTORCH_NO_CUDA_MEMORY_CACHING")
    found = dict.fromkeys((name, *known), 0)
    root = Path(torch.__file__).parent
    for file in (*root.glob("**/*.py"), *root.glob("lib/*")):
        if file.is_file() and (content := file.read_bytes()):
            for one in found:
                found[one] += one.encode() in content
    return Finding(
        answer=Answer.WRONG,
        why="Nothing is known to read such a variable: none of the files of torch's CPU build names it. And there is "
        "no migration to control: torch takes the memory of its tensors with `cudaMalloc`, which stays on the card "
        "until it is given back. Only managed memory (`cudaMallocManaged`) moves page by page between host and card.",
        columns=("variable", "named in files of torch (CPU build)"),
        rows=tuple((f"`{one}`", "yes" if count else "no") for one, count in found.items()),
    )


def empty_cache() -> Finding:
    """What is given back, and what is not."""
    rows: list[tuple[str, str, str]] = []

    def note(moment: str) -> None:
        rows.append((moment, mib(torch.cuda.memory_allocated()), mib(torch.cuda.memory_reserved())))

    def run() -> None:
        whole = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        parts = [torch.empty(5 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
        note("a tensor of 256 MiB and four of 5 MiB in one segment")
        del whole
        del parts[1:]
        note("after del of all but one of 5 MiB")
        torch.cuda.empty_cache()
        note("after empty_cache()")

    with vramfit.VirtualGPU(CARD, alloc_conf=""):
        run()
    return Finding(
        answer=Answer.WRONG,
        why="It gives back every segment that holds no live tensor, so reserved falls, here by the 256 MiB. What stays "
        "reserved are segments with a live tensor in them, free as the rest of them may be. Allocated never "
        "changes, and torch would have given the segments back itself before running out of memory.",
        columns=("moment", "allocated", "reserved"),
        rows=tuple(rows),
    )
