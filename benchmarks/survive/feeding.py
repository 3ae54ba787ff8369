"""Items per second from a data set of 4 GiB: MappedDataset beside np.memmap and TensorDict's memory maps.

    python benchmarks/survive/feeding.py [--size 4GiB] [--item 12KiB] [--rounds 5] [--folder /tmp] [--only reads,cold]

Four parts, each of whose rows are measured in one process, one after another in each of several rounds:

- reads: batches of 256 random samples, and samples one by one, in this process, from files in the page cache;
- loader: the same through a DataLoader with two workers;
- cold: the files are dropped from the page cache before each row; with the hit rate before and after, by cachestat and
  by mincore, which have to agree, and the bytes that the process read from the disk (/proc/self/io);
- prefetch: a loader whose batches take as long as a step, with one in eight that takes four times as long, plain and by
  vramfit.prefetch.

TensorDict's row is there where it is installed (`pip install tensordict`); it is no dependency. Files are removed at
the end. Figures are medians over the rounds, with the slowest and the fastest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import vramfit
from vramfit.runtime.feeding.page_cache import CacheSource
from vramfit.units import format_bytes, parse_bytes

BATCH = 256
PARTS = ("reads", "loader", "cold", "prefetch")


class MemmapDataset(Dataset[dict[str, torch.Tensor]]):
    """What people write by hand over np.load(mmap_mode="r")."""

    def __init__(self, folder: Path) -> None:
        self.x = np.load(folder / "x.npy", mmap_mode="r")
        self.y = np.load(folder / "y.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        if isinstance(index, list):
            return {"x": torch.from_numpy(self.x[index]), "y": torch.from_numpy(self.y[index])}
        return {"x": torch.from_numpy(np.array(self.x[index])), "y": torch.as_tensor(self.y[index])}


class TensorDictDataset(Dataset[dict[str, torch.Tensor]]):
    """TensorDict's memory-mapped tensors."""

    def __init__(self, folder: Path) -> None:
        from tensordict import TensorDict

        self.data = TensorDict.load_memmap(folder)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        found = self.data[index]
        if isinstance(index, list):
            return {"x": found["x"], "y": found["y"]}  # a copy already
        return {"x": found["x"].clone(), "y": found["y"].clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_bytes, default=4 << 30, help="of the data set")
    parser.add_argument("--item", type=parse_bytes, default=12 << 10, help="of a sample: 3 x 64 x 64 bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=200, help="of a row in a round")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", default=",".join(PARTS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = given.only.split(",")
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="vramfit-feeding-") as own:
        if set(chosen) - {"prefetch"}:
            sets = make(Path(own), given.size // given.item, given.item)
            if "reads" in chosen:
                reads(sets, given.rounds, given.batches)
            if "loader" in chosen:
                loaders(sets, given.rounds, given.batches)
            if "cold" in chosen:
                cold(Path(own), sets, given.rounds)
        if "prefetch" in chosen:
            prefetching(given.rounds)


def make(folder: Path, length: int, item: int) -> dict[str, Any]:
    """The same samples in each format."""

    def pieces() -> Iterator[dict[str, Any]]:
        generator = np.random.default_rng(0)
        for start in range(0, length, 1024):
            values = generator.integers(0, 256, (min(1024, length - start), item), dtype=np.uint8)
            for number, one in enumerate(values):
                yield {"x": one, "y": start + number}

    began = time.perf_counter()
    data = vramfit.MappedDataset.write_samples(folder / "mapped", pieces())
    seconds = time.perf_counter() - began
    size = format_bytes(length * (item + 8))
    print(f"{length:,} samples of {format_bytes(item)}, {size}; written one by one in {seconds:.0f} s")
    sets: dict[str, Any] = {"MappedDataset": data, "np.memmap": MemmapDataset(folder / "mapped")}
    if importlib.util.find_spec("tensordict") is not None:
        from tensordict import TensorDict

        fields = {
            name: torch.from_numpy(np.load(folder / "mapped" / f"{name}.npy", mmap_mode="c"))
            for name in ("x", "y")
        }
        TensorDict(fields, batch_size=[length]).memmap(folder / "tensordict")
        sets["TensorDict"] = TensorDictDataset(folder / "tensordict")
    else:
        print("tensordict is not installed: without its rows")
    some = [0, length - 1, length // 2]
    for name, one in sets.items():
        assert torch.equal(one[some]["x"], data[some]["x"]), name
        assert one[some]["y"].tolist() == some, name
    return sets


def reads(sets: dict[str, Any], rounds: int, batches: int) -> None:
    warm(sets)
    numbers = orders(sets, batches)

    def by_batches(data: Any, order: list[list[int]]) -> int:
        return sum(len(data[some]["y"]) for some in order)

    def by_items(data: Any, order: list[list[int]]) -> int:
        return sum(1 for some in order[: batches // 8] for one in some if data[one]["x"].numel())

    report("batches of 256, in this process", sets, numbers, rounds, by_batches)
    report("samples one by one, in this process", sets, numbers, rounds, by_items)


def loaders(sets: dict[str, Any], rounds: int, batches: int) -> None:
    warm(sets)
    numbers = orders(sets, batches)

    def by_batches(data: Any, order: list[list[int]]) -> int:
        loader = DataLoader(data, batch_size=None, sampler=order, num_workers=2)
        return sum(len(batch["y"]) for batch in loader)

    def by_items(data: Any, order: list[list[int]]) -> int:
        loader = DataLoader(data, batch_sampler=order, num_workers=2)
        return sum(len(batch["y"]) for batch in loader)

    report("DataLoader, two workers, batches by lists of numbers", sets, numbers, rounds, by_batches)
    report("DataLoader, two workers, samples collated", sets, numbers, rounds, by_items)


def cold(folder: Path, sets: dict[str, Any], rounds: int) -> None:
    """8 batches of 256, from the disk."""
    numbers = orders(sets, 8)
    data = sets["MappedDataset"]
    flat = [one for some in numbers for one in some]
    rates: dict[str, list[float]] = {name: [] for name in sets}
    bytes_read: dict[str, list[int]] = {name: [] for name in sets}
    for _ in range(rounds):
        for name in sets:
            drop(folder)
            if name == "MappedDataset":
                data = sets[name] = vramfit.MappedDataset(folder / "mapped")
            before = data.cached()
            start, io = time.perf_counter(), disk_bytes()
            count = sum(len(sets[name][some]["y"]) for some in numbers)
            rates[name].append(count / (time.perf_counter() - start))
            bytes_read[name].append(disk_bytes() - io)
            if name == "MappedDataset":
                told = [data.cached(flat, source=source) for source in CacheSource]
                whole = [data.cached(source=source) for source in CacheSource]
    print("\n2,048 random samples from files that are not in the page cache, items per second")
    for name in sets:
        print(f"  {name:<15}{spread(rates[name])}   {format_bytes(statistics.median(bytes_read[name]))} read")
    for one, every in zip(told, whole, strict=True):
        if one is None or every is None or before is None:
            print("  the kernel does not tell what is cached")
            continue
        print(
            f"  {one.source.value}: before {before.hit_rate:.2%} of all pages cached; after, of the samples' pages "
            f"{one.cached:,} of {one.pages:,} ({one.hit_rate:.2%}), of all {every.cached:,} of {every.pages:,}"
        )


def prefetching(rounds: int) -> None:
    """Batches that sleep: what is shown is how waiting overlaps, not what a machine's cores do."""

    def loader() -> Iterator[torch.Tensor]:
        for number in range(64):
            time.sleep(0.02 if number % 8 == 7 else 0.005)
            yield torch.zeros(1)

    found: dict[str, list[float]] = {"plain loader": [], "vramfit.prefetch": []}
    for _ in range(rounds):
        for name in found:
            batches: Any = loader() if name == "plain loader" else vramfit.prefetch(loader(), "cpu")
            start = time.perf_counter()
            for _ in batches:
                time.sleep(0.008)  # a step
            found[name].append(64 / (time.perf_counter() - start))
    print("\nbatches per second; a batch takes 5 ms, one in eight 20 ms, a step 8 ms: at most 125")
    for name, rates in found.items():
        print(f"  {name:<20}{spread(rates)}")
    print(f"  depth at the end: {batches.report.depth}")


def report(
    title: str,
    sets: dict[str, Any],
    numbers: list[list[int]],
    rounds: int,
    run: Callable[[Any, list[list[int]]], int],
) -> None:
    found: dict[str, list[float]] = {name: [] for name in sets}
    for number in range(rounds):
        names = list(sets)[number % len(sets) :] + list(sets)[: number % len(sets)]
        for name in names:
            start = time.perf_counter()
            count = run(sets[name], numbers)
            found[name].append(count / (time.perf_counter() - start))
    print(f"\n{title}, items per second")
    for name, rates in found.items():
        print(f"  {name:<15}{spread(rates)}")


def spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):>10,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def orders(sets: dict[str, Any], batches: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    sampler = RandomSampler(sets["MappedDataset"], generator=generator)
    found: list[list[int]] = []
    for some in BatchSampler(sampler, BATCH, drop_last=True):
        found.append(some)
        if len(found) == batches:
            break
    return found


def warm(sets: dict[str, Any]) -> None:
    """Bring all files into the page cache, and into this process' tables, as a first epoch does."""
    for data in sets.values():
        for start in range(0, len(data), 4096):
            data[list(range(start, min(len(data), start + 4096)))]
    told = sets["MappedDataset"].cached()
    if told is not None:
        print(f"hit rate {told.hit_rate:.2%} by {told.source.value}")


def drop(folder: Path) -> None:
    """Take the files' pages out of the cache: what is mapped stays, so that maps give theirs back first."""
    import gc
    import mmap

    gc.collect()
    for one in gc.get_objects():
        if isinstance(one, mmap.mmap) and not one.closed:
            one.madvise(mmap.MADV_DONTNEED)
    unmap_tensordict(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def unmap_tensordict(folder: Path) -> None:
    """torch maps files itself there: by their addresses."""
    import ctypes

    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, end = (int(one, 16) for one in line.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 4)  # MADV_DONTNEED


def disk_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
