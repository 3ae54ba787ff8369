"""How near the virtual GPU comes to recordings of a real one: peaks, and where the remaining difference lies.

    python benchmarks/recordings.py [NAME ...] [--json FILE]

The recordings (tests/data/traces, see its README) are memory snapshots that an author's program wrote on a card. The
programs in recordings_models are our own, of the same architecture; each runs here as `vramfit run` would run it, does
the same in the same order in one process, and writes snapshots with the same functions of torch. Both snapshots are
then read by the same code. The first table compares their peaks over the recorded window, the second everything else:
the state in which recording began, every request for a block and every return in order, segments, blocks of a cuBLAS
workspace's size held at the end (activations of 32 MiB among them at context 256), and slack and inactive split bytes
at the peak. The last two also show where blocks lie: of equal free blocks the allocator takes the lowest, so they
depend on the addresses that the driver gives to segments.

The recordings themselves show which card it was. gpt-2.7b: workspaces of 32 MiB exist on Hopper alone in torch
2.6, and the buffers of two reductions (164,626,432 and 41,156,608 bytes) fit 132 multiprocessors: an H100 SXM. eor-nn:
the buffers of its means (576 bytes) are those of 144 blocks, two on each of the 72 multiprocessors of a Quadro RTX
6000. Its torch 2.2 takes 1 MiB from the allocator for each linear layer (cuBLASLt); newer releases keep that memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from comparing.rows import Bar, bars_of
from recordings_models.streams import Recording, differences

from vramfit.analysis import Measure
from vramfit.gpus import find_gpu
from vramfit.options.run_options import RunOptions
from vramfit.virtual.virtual_run import run_in_child

ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "tests" / "data" / "traces"
MODELS = Path(__file__).parent / "recordings_models"
MIB = 1 << 20
KEPT_WORKSPACES = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
"""Workspaces of cuBLAS stay, as in the releases that were recorded: from torch 2.15 on they last for one operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One process of the author's, and which of its snapshots are among the recordings.

    Attributes:
        script: our program.
        arguments: its command line.
        snapshots: name of a recording to the name of the snapshot that the script writes.
        card: the card it ran on.
        torch: version that was recorded.
    """

    script: str
    arguments: tuple[str, ...]
    snapshots: dict[str, str]
    card: str = "H100 SXM"
    torch: str = "2.6"


SESSIONS = (
    Session(
        script="gpt_2_7b.py",
        arguments=("train:128",),
        snapshots={"gpt-2.7b-ctx128-train": "train-128"},
    ),
    Session(
        script="gpt_2_7b.py",
        arguments=("--empty-cache", "--autocast", "forward:128"),
        snapshots={"gpt-2.7b-ctx128-forward-bf16": "forward-128"},
    ),
    Session(
        script="gpt_2_7b.py",
        arguments=("--empty-cache", "forward:128", "forward:256", "forward:512", "train:128", "train:256"),
        snapshots={
            "gpt-2.7b-ctx128-forward": "forward-128",
            "gpt-2.7b-ctx256-forward": "forward-256",
            "gpt-2.7b-ctx128-train-after-forward": "train-128",
            "gpt-2.7b-ctx256-train": "train-256",
        },
    ),
    Session(
        script="eor_nn.py",
        arguments=(),
        snapshots={"eor-nn": "images"},
        card="Quadro RTX 6000",
        torch="2.2",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One recording beside the prediction, (recorded, predicted) each; sizes in bytes.

    Attributes:
        bars: how far the whole run says that its peaks may be off, ``allocated`` and ``reserved``.
    """

    name: str
    peak_allocated: tuple[int, int]
    peak_reserved: tuple[int, int]
    start_allocated: tuple[int, int]
    start_reserved: tuple[int, int]
    workspaces: tuple[int, int]
    requests: tuple[int, int]
    segments_taken: tuple[int, int]
    segments_released: tuple[int, int]
    slack: tuple[int, int]
    inactive_split: tuple[int, int]
    requests_differing: int
    differences: tuple[str, ...]
    bars: dict[str, Bar]

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs."""
        return not any(self.unequal()) and not self.requests_differing

    def unequal(self) -> Iterator[str]:
        """The figures that differ."""
        for name, value in asdict(self).items():
            if (
                isinstance(value, tuple)
                and len(value) == 2
                and name != "differences"
                and value[0] != value[1]
            ):
                yield f"{name.replace('_', ' ')} {value[0]:,} recorded, {value[1]:,} predicted"


def compare(name: str, recorded: Recording, predicted: Recording, bars: dict[str, Bar]) -> Comparison:
    """Compare a recording with the snapshot of our own program."""
    found = differences(recorded, predicted)
    both = (recorded, predicted)

    def pair(values: list[int]) -> tuple[int, int]:
        first, second = values
        return first, second

    return Comparison(
        name=name,
        peak_allocated=pair([r.peaks[Measure.ALLOCATED] for r in both]),
        peak_reserved=pair([r.peaks[Measure.RESERVED] for r in both]),
        start_allocated=pair([r.start[Measure.ALLOCATED] for r in both]),
        start_reserved=pair([r.start[Measure.RESERVED] for r in both]),
        workspaces=pair([r.workspaces for r in both]),
        requests=pair([len(r.requests) for r in both]),
        segments_taken=pair([r.segments.taken for r in both]),
        segments_released=pair([r.segments.released for r in both]),
        slack=pair([r.at_peak.slack for r in both]),
        inactive_split=pair([r.at_peak.inactive_split for r in both]),
        requests_differing=sum(difference.count for difference in found),
        differences=tuple(str(difference) for difference in found[:10]),
        bars=bars,
    )


def run(session: Session, wanted: Sequence[str]) -> Iterator[Comparison]:
    """Run a session on the virtual GPU and compare its snapshots with the wanted recordings."""
    with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
        command = [str(MODELS / session.script), "--out", folder, *session.arguments]
        options = RunOptions(
            gpu=find_gpu(session.card), alloc_conf="", writes_through=(folder,), environ=KEPT_WORKSPACES
        )
        outcome = run_in_child(command, options)
        if outcome.exit_code:
            raise SystemExit(f"{session.script} failed: {outcome.error}")
        bars = bars_of(outcome)
        for name, snapshot in session.snapshots.items():
            if name in wanted:
                recorded = Recording(RECORDINGS / f"{name}.json.gz")
                yield compare(name, recorded, Recording(Path(folder) / f"{snapshot}.pickle"), bars)


def error(pair: tuple[int, int]) -> float:
    """Relative error of a prediction, in percent."""
    recorded, predicted = pair
    return 100 * (predicted - recorded) / recorded


def print_peaks(comparisons: Sequence[Comparison]) -> None:
    """The first table."""
    width = max(len(c.name) for c in comparisons)
    print(f"{'peak, MiB':{width}}  {'allocated':>32}  {'reserved':>32}")
    print(f"{'':{width}}  " + f"{'recorded':>11}{'predicted':>12}{'error':>9}  " * 2)
    for c in comparisons:
        cells = (
            f"{pair[0] / MIB:11,.2f}{pair[1] / MIB:12,.2f}{error(pair):8.3f}%"
            for pair in (c.peak_allocated, c.peak_reserved)
        )
        print(f"{c.name:{width}}  " + "  ".join(cells))


def print_differences(comparisons: Sequence[Comparison]) -> None:
    """The second table."""
    width = max(len(c.name) for c in comparisons)
    print(
        f"{'':{width}}  {'start, MiB':>10} {'requests':>9} {'differ':>7} {'segments':>9} {'released':>9} "
        f"{'workspaces':>10} {'slack, MiB':>11} {'split, MiB':>11}"
    )
    for c in comparisons:
        print(
            f"{c.name:{width}}  {c.start_reserved[0] / MIB:10,.0f} {c.requests[0]:9,} {c.requests_differing:7,} "
            f"{c.segments_taken[0]:9,} {c.segments_released[0]:9,} {c.workspaces[0]:10} "
            f"{c.slack[0] / MIB:11,.2f} {c.inactive_split[0] / MIB:11,.2f}"
        )
        for line in (*c.unequal(), *c.differences):
            print(f"{'':{width}}    {line}")
    if all(c.equal for c in comparisons):
        print("Recorded figures; the predicted ones are the same in every column, request by request.")


def main() -> None:
    """Run the sessions that the wanted recordings need, and print both tables."""
    known = [name for session in SESSIONS for name in session.snapshots]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"recordings, all by default: {', '.join(known)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    wanted = options.names or known
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"no such recording: {', '.join(unknown)}")
    began = time.perf_counter()
    comparisons = [
        comparison
        for session in SESSIONS
        if set(wanted) & set(session.snapshots)
        for comparison in run(session, wanted)
    ]
    print_peaks(comparisons)
    print()
    print_differences(comparisons)
    print(f"\n{time.perf_counter() - began:.0f} s")
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(c) for c in comparisons], indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
