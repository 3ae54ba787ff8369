"""What asking an installed cuDNN costs: questions a second, the process that asks, and a training with and without.

    python benchmarks/asking_cudnn.py [--cudnn PATH|auto ...] [--gpu NAME] [--rounds N] [--json FILE]

For each cuDNN there is a table of the process that is asked, which begins with an empty cache, and one of
examples/resnet_train.py (ResNet-50): without cuDNN, with one asked for the first time, and with its answers kept. The
three take turns, so that other load on the machine affects all of them; ratios are those of one turn. Seconds are of
processors, of the process that asks too; those on the clock are ratios only.

Questions are the convolutions of ResNets, forward and both gradients, at four batch sizes and in two types. Without a
cuDNN there is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from vramfit.cudnn.asker import CudnnAsker
from vramfit.cudnn.found_library import CudnnInstallation, dotted, find_cudnn
from vramfit.cudnn.questions import ConvPass, ConvQuestion, TensorShape
from vramfit.errors import UsageError, VramfitError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.units import MIB
from vramfit.writing import write_text

SCHEMA = "vramfit.asking-cudnn/1"
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "resnet_train.py"
CACHE = "VRAMFIT_CACHE_DIR"
GOAL = 2.0
"""Ratio that a training with cuDNN asked for the first time shall stay below."""

STAGES = ((64, 256, 56), (128, 512, 28), (256, 1024, 14), (512, 2048, 7))
"""Channels within and between the blocks of a ResNet, and pixels along an edge."""

BATCHES = (8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """What the process that asks costs.

    Attributes:
        version: of the library.
        start_ms: until it takes questions.
        load_ms: the first question, for which the library is loaded.
        questions: others that were asked.
        cold_per_s: questions answered a second by the library.
        kept_per_s: by the next process, from the cache.
        peak_bytes: most resident memory of the process, library loaded.
        kept_peak_bytes: the same of the next process, which does not load it.
    """

    version: str
    start_ms: float
    load_ms: float
    questions: int
    cold_per_s: float
    kept_per_s: float
    peak_bytes: int
    kept_peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Seconds that a run took, its processes together: of processors, and on the clock."""

    processor: float
    clock: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The training without cuDNN, with one asked for the first time, and with its answers kept."""

    without: Spent
    first: Spent
    second: Spent


def questions() -> list[ConvQuestion]:
    """The convolutions of ResNets with bottleneck blocks."""
    found = []
    for batch, dtype, (within, between, pixels) in product(BATCHES, ("float32", "float16"), STAGES):
        for made, read, edge, stride in (
            (within, between, 1, 1),
            (between, within, 1, 1),
            (within, within, 3, 1),
            (within, within, 3, 2),
        ):
            found += [
                _question(kind, dtype, (batch, made, read), (pixels * stride, pixels), edge)
                for kind in ConvPass
            ]
    return found


def _question(
    kind: ConvPass, dtype: str, sizes: tuple[int, int, int], pixels: tuple[int, int], edge: int
) -> ConvQuestion:
    batch, made, read = sizes
    stride = pixels[0] // pixels[1]
    return ConvQuestion(
        kind=kind,
        dtype=dtype,
        x=_dense(batch, read, pixels[0], pixels[0]),
        y=_dense(batch, made, pixels[1], pixels[1]),
        w=_dense(made, read, edge, edge),
        padding=(edge // 2,) * 2,
        stride=(stride,) * 2,
        dilation=(1, 1),
    )


def _dense(*dims: int) -> TensorShape:
    strides = [1] * len(dims)
    for place in range(len(dims) - 1, 0, -1):
        strides[place - 1] = strides[place] * dims[place]
    return TensorShape(dims=dims, strides=tuple(strides))


def measure_asking(installation: CudnnInstallation, spec: GpuSpec) -> Asking:
    """Ask all questions of a process with an empty cache, and again of the next one.

    Raises:
        VramfitError: the library cannot be asked.
    """
    first, *others = questions()
    with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
        before = os.environ.get(CACHE)
        os.environ[CACHE] = folder
        try:
            start, asker = _started(installation, spec)
            load = _seconds(asker, [first])
            cold = _seconds(asker, others)
            peak, version = _peak_bytes(asker), asker.version
            asker.close()
            _, asker = _started(installation, spec)
            kept = _seconds(asker, [first, *others])
            kept_peak = _peak_bytes(asker)
            asker.close()
        finally:
            os.environ.pop(CACHE)
            if before is not None:
                os.environ[CACHE] = before
    return Asking(
        version=dotted(version),
        start_ms=1e3 * start,
        load_ms=1e3 * load,
        questions=len(others),
        cold_per_s=len(others) / cold,
        kept_per_s=(len(others) + 1) / kept,
        peak_bytes=peak,
        kept_peak_bytes=kept_peak,
    )


def _started(installation: CudnnInstallation, spec: GpuSpec) -> tuple[float, CudnnAsker]:
    began = time.perf_counter()
    asker = CudnnAsker(installation, spec)
    return time.perf_counter() - began, asker


def _seconds(asker: CudnnAsker, asked: Sequence[ConvQuestion]) -> float:
    began = time.perf_counter()
    for question in asked:
        asker.plans(question)
        if asker.failure:
            raise VramfitError(asker.failure)
    return time.perf_counter() - began


def _peak_bytes(asker: CudnnAsker) -> int:
    """``VmHWM`` of the process, which Linux gives in KiB."""
    for line in Path(f"/proc/{asker.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise VramfitError("Linux does not say how much memory the process took")


def measure_training(library: str, gpu: str, rounds: int) -> list[Turn]:
    """Run the example in turns: without cuDNN, with an empty cache, and with the answers kept.

    Raises:
        VramfitError: a run failed.
    """
    turns = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
            turns.append(
                Turn(
                    without=_training(gpu, "none", folder),
                    first=_training(gpu, library, folder),
                    second=_training(gpu, library, folder),
                )
            )
    return turns


def _training(gpu: str, cudnn: str, cache: str) -> Spent:
    """``vramfit run`` on the example, the interpreter's start included."""
    command = [sys.executable, "-m", "vramfit", "run", "--gpu", gpu, "--cudnn", cudnn, str(EXAMPLE)]
    began, processor = time.perf_counter(), _processor()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, CACHE: cache}
    )
    spent = Spent(processor=_processor() - processor, clock=time.perf_counter() - began)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise VramfitError(f"the training ended with code {done.returncode}: {reason}")
    return spent


def _processor() -> float:
    """Seconds of the children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tables(asked: Sequence[tuple[Asking, list[Turn]]], gpu: str) -> Iterator[str]:
    """Both tables in Markdown; ratios are medians of those of single turns."""
    yield (
        "| cuDNN | start | loading, with the first question | questions a second | from the cache "
        "| peak memory | without loading |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for asking, _ in asked:
        yield (
            f"| {asking.version} | {asking.start_ms:,.0f} ms | {asking.load_ms:,.0f} ms | {asking.cold_per_s:,.0f} "
            f"| {asking.kept_per_s:,.0f} | {asking.peak_bytes / MIB:,.0f} MiB "
            f"| {asking.kept_peak_bytes / MIB:,.0f} MiB |"
        )
    yield ""
    yield (
        f"| ResNet-50 on a virtual {gpu} | without | asked first | ratio | on the clock "
        "| asked again | ratio | on the clock | turns |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for asking, turns in asked:
        if turns:
            cells = [f"{statistics.median(turn.without.processor for turn in turns):.1f} s"]
            for name in ("first", "second"):
                spent = [getattr(turn, name) for turn in turns]
                cells.append(f"{statistics.median(one.processor for one in spent):.1f} s")
                for of in ("processor", "clock"):
                    ratios = [
                        getattr(one, of) / getattr(turn.without, of)
                        for one, turn in zip(spent, turns, strict=True)
                    ]
                    cells.append(f"{statistics.median(ratios):.2f}")
            yield f"| {asking.version} | {' | '.join(cells)} | {len(turns)} |"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; returns the exit code, 2 where cuDNN was named and cannot be asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--cudnn", nargs="+", default=["auto"], metavar="PATH", help="installed ones (default: auto)"
    )
    parser.add_argument("--gpu", default="RTX 4090", metavar="NAME", help="the virtual card (RTX 4090)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of the training (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    asked = []
    try:
        spec = find_gpu(options.gpu)
        for wanted in options.cudnn:
            found = find_cudnn(wanted)
            asking = measure_asking(found, spec)
            asked.append((asking, measure_training(found.library, options.gpu, options.rounds)))
    except VramfitError as error:
        print(f"{error.message}. {error.hint or ''}".rstrip())
        return 0 if isinstance(error, UsageError) and options.cudnn == ["auto"] else 2
    print("\n".join(tables(asked, spec.name)))
    if options.json is not None:
        rows = [{**asdict(asking), "turns": [asdict(turn) for turn in turns]} for asking, turns in asked]
        write_text(
            options.json,
            json.dumps({"schema": SCHEMA, "gpu": spec.name, "goal": GOAL, "rows": rows}, indent=1) + "\n",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
