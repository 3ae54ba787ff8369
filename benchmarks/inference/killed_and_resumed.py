"""A tiled run that is killed again and again: the file that comes of it, and what the process held.

A picture of 8,192 x 8,192 becomes one of 32,768 x 32,768 from file to file, once in one go, and once with 20 kills
(SIGKILL) at random moments, each time resumed by the journal. The two files are compared byte by byte.

    python benchmarks/inference/killed_and_resumed.py [--side 8192] [--kills 20] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import filecmp
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from inference.superresolution import write_picture

WORKER = Path(__file__).with_name("superresolution.py")


def start(source: Path, target: Path) -> subprocess.Popen[str]:
    journal = target.with_suffix(".journal")
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), str(source), str(target), str(journal)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "began\n"
    return worker


def finish(worker: subprocess.Popen[str]) -> tuple[int, float]:
    """Most bytes that the run added to the process, and its seconds."""
    text, _ = worker.communicate()
    if worker.returncode:
        sys.exit(f"the run ended with {worker.returncode}")
    grown, seconds = text.split()
    return int(grown), float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    numbers = random.Random(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        source, plain, killed = (Path(place) / name for name in ("in.npy", "plain.npy", "killed.npy"))
        write_picture(source, options.side)
        most, seconds = finish(start(source, plain))
        print(f"in one go: {seconds:.1f} s, {most / 2**20:.0f} MiB more resident")
        kills = 0
        while kills < options.kills:
            worker = start(source, killed)
            # Most parts come further than the one before, and all of them together not to the end.
            time.sleep(numbers.uniform(0, 1.2 * seconds / options.kills))
            if worker.poll() is None:
                worker.send_signal(signal.SIGKILL)
                worker.wait()
                kills += 1
            elif worker.returncode == 0:
                print(f"done before kill {kills + 1}: begun anew")
                killed.unlink()
        most, seconds = finish(start(source, killed))
        same = filecmp.cmp(plain, killed, shallow=False)
        print(f"after {kills} kills: the last part {seconds:.1f} s, {most / 2**20:.0f} MiB more resident")
        print(f"{plain.stat().st_size:,} bytes, {'the same' if same else 'NOT THE SAME'} byte by byte")
        if not same:
            sys.exit(1)


if __name__ == "__main__":
    main()
