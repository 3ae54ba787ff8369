"""``vramfit watch`` on leaking trainings: when it says that memory runs out, when it does, and what watching costs.

    python benchmarks/survive/watching.py [--blocks 16]

Each training runs on a virtual card under ``vramfit watch``, step by step in real time, until it runs out. Its readings
are read back as JSON lines, and the time to the limit that they told is compared with the time that was left, and the
same in steps, which a busy machine does not make longer; the worst are those from a quarter to nine tenths. The
overhead is that of one process whose training steps alternate between blocks with a reporter and blocks without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import vramfit
from vramfit.capture.meter_figures import MeterFigures
from vramfit.watching.process_reporter import ProcessReporter

LEAKING = Path(__file__).with_name("leaking.py")
CASES = (
    ("slow leak, small activations", "8GiB", 100, 0.5, 256),
    ("slow leak, 2.6 GiB of activations in each step", "8GiB", 50, 0.5, 65536),
    ("fast leak", "24GiB", 500, 0.5, 1024),
    ("no leak", "8GiB", 0, 0.5, 16384),
)
AT = (0.25, 0.5, 0.75, 0.9)
"""Shares of the way at which predictions are looked at."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=16)
    given = parser.parse_args()
    print("time to running out: error of what was told, as a share of what was left")
    print(
        f"{'training':<50}{'seconds':>8}"
        + "".join(f"{f'at {at:.0%}':>9}" for at in AT)
        + f"{'worst':>9}{'in steps':>10}"
    )
    for case in CASES:
        leak(*case)
    print()
    overhead(given.blocks)


def leak(name: str, gpu: str, mib: float, pause: float, batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "watch.jsonl"
        watch = [sys.executable, "-m", "vramfit", "watch", "--plain", "--every", "0.25"]
        script = [str(LEAKING), "--leak", str(mib), "--pause", str(pause), "--batch", str(batch)]
        if not mib:
            script += ["--steps", "60"]
        command = [*watch, "--jsonl", str(lines), "--gpu", gpu, *script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        readings = [json.loads(line) for line in lines.read_text().splitlines()]
    told = [
        (one["time"], one["programs"][0]["steps"], outlook)
        for one in readings
        for outlook in one["outlooks"]
        if outlook["what"].startswith("allocated")
    ]
    if not mib:
        trends = {one["trend"] for _, _, one in told}
        print(f"{name:<50}{'':>8}  trends told in {len(told)} readings: {', '.join(sorted(trends))}")
        return
    found = re.search(r"out of memory at ([\d.]+) in step (\d+), begun at ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    out, last, begun = float(found[1]), int(found[2]), float(found[3])
    errors = {
        when: abs(one["seconds"] - (out - when)) / (out - when)
        for when, _, one in told
        if one["seconds"] is not None and when < out - 1
    }
    in_steps = [
        abs(one["seconds"] * one["per_second"] / one["per_step"] - (last - step)) / (last - step)
        for when, step, one in told
        if when in errors and begun + 0.25 * (out - begun) <= when <= begun + 0.9 * (out - begun)
    ]
    row = f"{name:<50}{out - begun:>8.0f}"
    for at in AT:
        moment = begun + at * (out - begun)
        nearest = min(errors, key=lambda when: abs(when - moment))
        row += f"{errors[nearest]:>9.1%}"
    worst = max(error for when, error in errors.items() if 0.25 <= (when - begun) / (out - begun) <= 0.9)
    print(row + f"{worst:>9.1%}{max(in_steps):>10.1%}", flush=True)


def overhead(blocks: int) -> None:
    """Blocks of steps with and without a reporter, in turn, in one process."""
    with vramfit.VirtualGPU("RTX 4090", writes="real") as gpu, tempfile.TemporaryDirectory() as folder:
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(24)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.empty(64, 256, device="cuda")

        def block(steps: int = 20) -> float:
            began = time.perf_counter()
            for _ in range(steps):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter() - began) / steps

        block()
        print(f"{'overhead of the reporter':<50}{'ms a step':>10}{'with':>8}{'ratio':>8}{'its own time':>14}")
        for every in (1.0, 0.1):
            plain, watched, busy, spent = [], [], 0.0, 0.0
            for turn in itertools.islice(itertools.cycle((False, True, True, False)), 4 * (blocks // 2)):
                if not turn:
                    plain.append(block())
                    continue
                reporter = ProcessReporter(Path(folder), every, MeterFigures(gpu.meter, "virtual")).start()
                watched.append(block())
                spent += watched[-1] * 20
                busy += reporter.busy
                reporter.stop()
            before, after = statistics.median(plain), statistics.median(watched)
            print(
                f"{f'a look each {every} s':<50}{1e3 * before:>10.2f}{1e3 * after:>8.2f}{after / before:>8.3f}"
                f"{busy / spent:>14.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
