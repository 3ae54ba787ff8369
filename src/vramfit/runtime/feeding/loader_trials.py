"""What workers and pinned memory are worth to a DataLoader, measured by reading from it.

Each choice is measured in several rounds, one after another within a round, so that what else the machine does meets
all of them. A rate counts from when batches that the workers had made ahead are used up.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from vramfit.errors import UsageError, VramfitError
from vramfit.failure_line import failure_line
from vramfit.runtime.feeding.loader_choices import LoaderTrial, LoaderTrials, recommended
from vramfit.workload import load_named, own_failure, to_device
from vramfit.workload.containers import tensors_in

_AHEAD = 2
"""Batches that a worker makes ahead where the loader does not say (prefetch_factor of torch's DataLoader)."""

_LEAST = 3
"""Batches that there have to be for a rate: the first, one that is waited for, and one that is measured."""

_SHARED = "/dev/shm"


@dataclass(slots=True)
class _Round:
    rate: float
    first_seconds: float
    worker_bytes: int | None
    shared_bytes: int | None


def try_loader(
    target: str, *, seconds: float = 2.0, rounds: int = 3, say: Callable[[str], None] = lambda _: None
) -> LoaderTrials:
    """Measure the loader that ``FILE.py:NAME`` names.

    Args:
        seconds: of each round of each choice, once batches come.
        rounds: of each choice.
        say: is told what is measured.

    Raises:
        UsageError: there is no such loader, it has no length, or too few batches.
        VramfitError: the file, or the loader as it is read without workers, fails.
    """
    # mypy takes an abstract class for no class.
    loader: DataLoader[Any] = load_named(target, DataLoader, "torch.utils.data.DataLoader")
    batches = _length(target, loader)
    cores = _cores()
    card = torch.cuda.is_available()
    counts = sorted({*_counts(cores), loader.num_workers})
    choices = [LoaderTrial(workers=count, pinned=False) for count in counts]
    tried = _tried(loader, choices, seconds, rounds, say, target)
    best = recommended(tried)
    if card:
        pinning = [LoaderTrial(workers=best.workers, pinned=pinned) for pinned in (False, True)]
        both = _tried(loader, pinning, seconds, rounds, say, target)
        tried = [one for one in tried if one.workers != best.workers] + both
        best = recommended(both)
    given = LoaderTrial(workers=loader.num_workers, pinned=loader.pin_memory)
    return LoaderTrials(
        target=target,
        cores=cores,
        batches=batches,
        batch_items=_first_items(loader),
        card=card,
        trials=tuple(sorted(tried, key=lambda one: (one.workers, one.pinned))),
        given=given,
        recommended=best,
    )


def _length(target: str, loader: DataLoader[Any]) -> int:
    try:
        found = len(loader)
    except TypeError:
        raise UsageError(
            f"{target} has no length: its data set is a stream",
            "Give it a __len__, or a loader over the first items as a list: each worker would read the whole stream",
        ) from None
    except Exception as error:
        raise own_failure(Path(target.rpartition(":")[0]), error, "the loader's length") from error
    if found < _LEAST:
        raise UsageError(
            f"{target} has {found} batches, too few to measure", f"Give one with at least {_LEAST} batches"
        )
    return found


def _tried(
    loader: DataLoader[Any],
    choices: Sequence[LoaderTrial],
    seconds: float,
    rounds: int,
    say: Callable[[str], None],
    target: str,
) -> list[LoaderTrial]:
    found: dict[int, list[_Round]] = {at: [] for at in range(len(choices))}
    failed: dict[int, str] = {}
    for number in range(rounds):
        for at, choice in enumerate(choices):
            if at in failed:
                continue
            pinned = ", pinned" if choice.pinned else ""
            say(f"round {number + 1} of {rounds}: {choice.workers} workers{pinned}")
            try:
                found[at].append(_round(loader, choice, seconds))
            except VramfitError:
                raise
            except Exception as error:
                if not choice.workers:
                    own = own_failure(Path(target.rpartition(":")[0]), error, "the loader")
                    raise VramfitError(
                        own.message,
                        "Read from it until it fails, for the whole traceback: for _ in loader: pass",
                    ) from error
                failed[at] = failure_line(error)
    return [
        replace(choice, error=failed[at]) if at in failed else _summed_up(choice, found[at])
        for at, choice in enumerate(choices)
    ]


def _summed_up(choice: LoaderTrial, rounds: Sequence[_Round]) -> LoaderTrial:
    workers = [one.worker_bytes for one in rounds if one.worker_bytes is not None]
    shared = [one.shared_bytes for one in rounds if one.shared_bytes is not None]
    return replace(
        choice,
        rates=tuple(one.rate for one in rounds),
        first_seconds=statistics.median(one.first_seconds for one in rounds),
        worker_bytes=int(statistics.median(workers)) if workers else None,
        shared_bytes=max(shared) if shared else None,
    )


def _round(loader: DataLoader[Any], choice: LoaderTrial, seconds: float) -> _Round:
    """Read for some seconds. What was made ahead is read first, and not counted."""
    own = with_choice(loader, choice)
    shared = _shared_used()
    most = shared
    ahead = choice.workers * (own.prefetch_factor or 0)
    skipped = min(ahead, len(loader) // 2)
    use = _copying(choice.pinned) if torch.cuda.is_available() else None
    with _quietly():
        began = time.perf_counter()
        batches = iter(own)
        try:
            use_batch(next(batches), use)
            first = time.perf_counter() - began
            for _ in range(skipped):
                use_batch(next(batches), use)
            items, start = 0, time.perf_counter()
            end = start
            for batch in batches:
                items += items_in(batch)
                use_batch(batch, use)
                end = time.perf_counter()
                used = _shared_used()
                if used is not None and most is not None:
                    most = max(most, used)
                if end - start >= seconds:
                    break
            private = _worker_bytes(batches)
        finally:
            # An error's frames would keep the workers until garbage is collected, maybe in a worker of the next round.
            getattr(batches, "_shutdown_workers", bool)()
    if not items:
        raise UsageError("the loader gave fewer batches than its length says", "Correct the length")
    taken = None if shared is None or most is None else most - shared
    return _Round(items / (end - start), first, private, taken)


def use_batch(batch: Any, use: Callable[[Any], None] | None) -> None:
    """Do with a batch what is part of a measurement."""
    if use is not None:
        use(batch)


def _copying(pinned: bool) -> Callable[[Any], None]:
    device = torch.device("cuda", torch.cuda.current_device())

    def copy_batch(batch: Any) -> None:
        if pinned:
            for tensor in tensors_in(batch):
                tensor.to(device, non_blocking=True)
        else:
            to_device(batch, device)
        torch.cuda.current_stream(device).synchronize()

    return copy_batch


def with_choice(loader: DataLoader[Any], choice: LoaderTrial) -> DataLoader[Any]:
    """The same loader with other workers; the data set and the samplers are the same objects."""
    made: Any = copy.copy(loader)
    # torch refuses to set some of these after a loader is made, as its samplers may depend on them; these do not.
    made.__dict__.update(
        num_workers=choice.workers,
        prefetch_factor=(loader.prefetch_factor or _AHEAD) if choice.workers else None,
        pin_memory=choice.pinned,
        persistent_workers=False,
        timeout=loader.timeout if choice.workers else 0,  # which is refused without workers
        _iterator=None,
    )
    found: DataLoader[Any] = made
    return found


def items_in(batch: Any) -> int:
    """Items of a batch: the first length of its first tensor; of a batch without one, its own."""
    for tensor in tensors_in(batch):
        return int(tensor.shape[0]) if tensor.ndim else 1
    return len(batch) if isinstance(batch, list | tuple) else 1


def _first_items(loader: DataLoader[Any]) -> int:
    with _quietly():
        return items_in(next(iter(with_choice(loader, LoaderTrial(workers=0, pinned=False)))))


def _counts(cores: int) -> Iterator[int]:
    yield from (0, cores)
    count = 1
    while count <= cores:
        yield count
        count *= 2


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _worker_bytes(batches: Any) -> int | None:
    """What the workers have for themselves, the mean over them, by the kernel."""
    found = []
    for worker in getattr(batches, "_workers", ()):
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text("ascii").splitlines()
            fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
            names = ("Private_Clean", "Private_Dirty", "Swap")
            found.append(sum(int(fields[name]) << 10 for name in names if name in fields))
    return int(statistics.fmean(found)) if found else None


def _shared_used() -> int | None:
    try:
        found = os.statvfs(_SHARED)
    except (OSError, AttributeError):
        return None
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's advice on the number of workers, which is what is found out here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*worker processes in total.*")
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        yield
