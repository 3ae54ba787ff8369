"""DeepSpeed's ZeRO on one virtual rank: what it holds after each part of a step, as JSON.

Usage: ``python zero_program.py RANK WORLD SETTINGS.json``: a list of what goes to ``zero_optimization``, and any other
settings of DeepSpeed under ``"else"``. All engines are made one after the other in one world.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vramfit

WIDTH, LAYERS = 512, 8
BUCKET = 1 << 18
"""Elements of a bucket for reducing: one layer's gradients."""


def held() -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def steps(zero: dict[str, Any], more: dict[str, Any]) -> dict[str, int]:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": BUCKET, **zero},
        **more,
    }
    before = held()
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=zero["stage"] == 3):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    built = held() - before
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    found = {"built": built, "made": held() - before}
    for _ in range(2):
        loss = engine(torch.zeros(4, WIDTH, device=engine.device, dtype=torch.bfloat16)).sum()
        engine.backward(loss)
        del loss
        found["backward"] = held() - before
        engine.step()
        found["stepped"] = held() - before
    engine.destroy()
    return found


def main(rank: int, world: int, cases: list[dict[str, Any]]) -> None:
    found: list[dict[str, int]] = []
    with vramfit.VirtualGPU(
        "H100", rank=rank, world_size=world, alloc_conf="expandable_segments:True"
    ) as gpu:
        import deepspeed

        deepspeed.init_distributed()
        for case in cases:
            more = case.pop("else", {})
            found.append(steps(case, more))
    pinned = gpu.run.host_pinned_peak_bytes
    print(json.dumps({"held": found, "pinned": pinned, "codes": [one.code for one in gpu.run.warnings]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text(encoding="utf-8")))
