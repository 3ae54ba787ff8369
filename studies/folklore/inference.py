"""Sayings about inference in parts."""

from __future__ import annotations

import torch

from folklore.finding import UNLIMITED, Answer, Finding, Measured, gib, measure, mib
from folklore.networks import UNet3d
from vramfit.inference.arrays import Blank
from vramfit.inference.tile_settings import TileSettings
from vramfit.inference.tiled_inference import make_job, run_job

BLOCK = (256, 256, 64)


def volume_by_blocks() -> Finding:
    """A 3D U-Net over a whole volume, and over blocks of it in half precision."""

    def whole(depth: int, dtype: torch.dtype) -> None:
        model = UNet3d(32).eval().to("cuda", dtype)
        with torch.inference_mode():
            model(torch.empty(1, 1, 512, 512, depth, device="cuda", dtype=dtype))

    def blocks(depth: int, dtype: torch.dtype, overlap: float) -> None:
        model = UNet3d(32).eval().to("cuda", dtype)
        settings = TileSettings(tile=BLOCK, overlap=overlap, reduce="argmax")
        run_job(make_job(model, Blank((1, 1, 512, 512, depth)), settings), out=Blank((1, 1, 512, 512, depth)))

    rows: list[tuple[str, Measured]] = []
    for depth in (128, 256):
        shape = f"512 x 512 x {depth}"
        rows += [
            (f"{shape}, whole, fp32", measure(lambda d=depth: whole(d, torch.float32), card=UNLIMITED)),
            (f"{shape}, whole, fp16", measure(lambda d=depth: whole(d, torch.float16), card=UNLIMITED)),
            (
                f"{shape}, blocks, fp32",
                measure(lambda d=depth: blocks(d, torch.float32, 0.0), card=UNLIMITED),
            ),
            (
                f"{shape}, blocks, fp16",
                measure(lambda d=depth: blocks(d, torch.float16, 0.0), card=UNLIMITED),
            ),
            (
                f"{shape}, blocks that share a quarter, fp16",
                measure(lambda d=depth: blocks(d, torch.float16, 0.25), card=UNLIMITED),
            ),
        ]
    plain, best = rows[0][1], rows[3][1]
    return Finding(
        answer=Answer.DEPENDS,
        why=f"A whole volume takes {gib(plain.total)} in fp32 here, and blocks of 256 x 256 x 64 in fp16, joined on "
        f"the host with labels alone, {gib(best.total)}: {plain.total / best.total:.0f} times less, not 2.3 times, in "
        f"{plain.seconds / best.seconds:.1f} times less time; half precision alone makes it "
        f"{rows[1][1].total / plain.total:.2f} of the bytes. Twice the depth takes twice the time and the same bytes. "
        "Blocks that share a quarter with their neighbours are computed more than once: they cost the time again.",
        columns=(
            "inference by a 3D U-Net of four levels, 32 channels",
            "allocated",
            "with context",
            "seconds",
        ),
        rows=tuple((name, gib(one.allocated), gib(one.total), f"{one.seconds:.2f}") for name, one in rows),
    )


def document_twice_as_long() -> Finding:
    """A document model at 1,024 and 2,048 tokens."""
    from transformers import LayoutLMConfig, LayoutLMModel

    from vramfit.techniques import Choice, with_choices
    from vramfit.techniques.attention_chunking import AttentionChunking, AttentionChunkingSetting
    from vramfit.workload import Workload

    def model(attention: str) -> torch.nn.Module:
        config = LayoutLMConfig(max_position_embeddings=2048)
        config._attn_implementation = attention
        return LayoutLMModel(config).eval()

    def documents(batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
        shape = (batch_size, sequence_length)
        ids = torch.zeros(shape, dtype=torch.long)
        boxes = torch.zeros((*shape, 4), dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "bbox": boxes}

    chunks = Choice(technique=AttentionChunking(), setting=AttentionChunkingSetting(slice_bytes=16 << 20))

    def run(length: int, attention: str, *, cut: bool = False) -> None:
        sizes = {"batch_size": 1, "sequence_length": length}
        workload = Workload(model=lambda: model(attention), batch=documents, sizes=sizes)
        if cut:
            workload = with_choices(workload, (chunks,))
        workload.run_step(workload.start("cuda"), sizes)

    runs = {
        "1,024 tokens, attention written out": measure(lambda: run(1024, "eager")),
        "2,048 tokens, attention written out": measure(lambda: run(2048, "eager")),
        "2,048 tokens, some rows at a time": measure(lambda: run(2048, "eager", cut=True)),
        "1,024 tokens, fused attention": measure(lambda: run(1024, "sdpa")),
        "2,048 tokens, fused attention": measure(lambda: run(2048, "sdpa")),
    }
    found = [one.allocated for one in runs.values()]
    return Finding(
        answer=Answer.RIGHT if found[2] <= 1.35 * found[0] else Answer.DEPENDS,
        why=f"Written out, attention scores take four times as much: {found[1] / found[0] - 1:+.0%} in all. Some rows "
        f"of them at a time, the peak is {found[2] / found[0] - 1:+.0%} of that at 1,024 tokens, with the same results "
        f"but for rounding. A fused kernel has no scores at all: {found[4] / found[3] - 1:+.0%}.",
        columns=("LayoutLM of base size, one document, fp32", "allocated", "reserved"),
        rows=tuple((name, mib(one.allocated), mib(one.reserved)) for name, one in runs.items()),
    )
