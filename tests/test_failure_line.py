"""Why a program failed, in a line: through the processes, groups and chains that wrap the cause."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from vramfit.failure_line import failure_line

_FORK = multiprocessing.get_context("fork")


def raised(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


class Broken(Dataset[int]):
    """Each sample raises what a function makes."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise self._make()


def _loaded(make: Callable[[], BaseException]) -> BaseException:
    return raised(lambda: list(DataLoader(Broken(make), num_workers=1, multiprocessing_context=_FORK)))


class TwoArguments(Exception):
    """Cannot be made again from its message alone: torch raises a RuntimeError in its place."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file} is broken in line {line}")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: ValueError("label file 17 is empty"), "ValueError: label file 17 is empty"),
        (lambda: KeyError("label"), "KeyError: 'label'"),
        (lambda: TwoArguments("a.csv", 3), "TwoArguments: a.csv is broken in line 3"),
        (lambda: AssertionError(), "AssertionError"),
        (lambda: OSError(2, "No such file", "a.png"), "FileNotFoundError: [Errno 2] No such file: 'a.png'"),
        (lambda: ValueError("two\n  lines"), "ValueError: two lines"),
    ],
    ids=["text", "key", "two arguments", "no message", "system", "two lines"],
)
def test_an_error_of_a_dataloader_worker_is_its_cause(make: Callable[[], BaseException], line: str) -> None:
    told = failure_line(_loaded(make)).replace(f"{TwoArguments.__module__}.", "")
    assert told == f"{line} (in DataLoader worker process 0)"


def _chained_in_worker(_: int) -> None:
    try:
        raise FileNotFoundError("labels.csv")
    except OSError as error:
        raise RuntimeError("cannot read the labels") from error


def _plain_in_worker(_: int) -> None:
    raise ValueError("row 3 has no label")


def test_errors_of_pools_are_their_cause() -> None:
    with _FORK.Pool(1) as pool:
        plain = raised(lambda: pool.map(_plain_in_worker, [0]))
        chained = raised(lambda: pool.map(_chained_in_worker, [0]))
    assert failure_line(plain) == "ValueError: row 3 has no label"
    assert (
        failure_line(chained)
        == "RuntimeError: cannot read the labels, caused by FileNotFoundError: labels.csv"
    )


def test_errors_of_futures_are_their_cause() -> None:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=_FORK) as pool:
        plain = raised(pool.submit(_plain_in_worker, 0).result)
        chained = raised(pool.submit(_chained_in_worker, 0).result)
    assert failure_line(plain) == "ValueError: row 3 has no label"
    assert failure_line(chained).endswith("labels, caused by FileNotFoundError: labels.csv")


def test_what_could_not_be_sent_back_is_told_by_its_traceback() -> None:
    # As loky does: it raises an error of its own, with the other process's traceback as its cause.
    remote = type("_RemoteTraceback", (Exception,), {"__str__": lambda self: self.args[0]})
    broken = RuntimeError("A task has failed to un-serialize.")
    text = "".join(traceback.format_exception(raised(lambda: _plain_in_worker(0))))
    broken.__cause__ = remote(f'\n"""\n{text}"""')
    assert (
        failure_line(broken)
        == "RuntimeError: A task has failed to un-serialize., caused by ValueError: row 3 has no label"
    )


def test_an_error_of_a_spawned_process_is_its_cause() -> None:
    text = "".join(traceback.format_exception(raised(lambda: _chained_in_worker(0))))
    error = torch.multiprocessing.ProcessRaisedException(
        f"\n\n-- Process 2 terminated with the following error:\n{text}", 2, 4711
    )
    assert failure_line(error) == "RuntimeError: cannot read the labels (in process 2)"


@pytest.mark.parametrize(
    ("traced", "line"),
    [
        (True, "ValueError: row 3 has no label (in rank 1)"),
        (False, "ChildFailedError: train.py FAILED: rank 1 ended with exit code 1"),
    ],
)
def test_an_error_of_torchrun_is_that_of_the_first_rank_that_failed(traced: bool, line: str) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failure = ProcessFailure(local_rank=1, pid=4711, exitcode=1, error_file="")
    if traced:
        text = "".join(traceback.format_exception(raised(lambda: _plain_in_worker(0))))
        failure.message, failure.error_file_data = text, {"message": text}
    assert failure_line(ChildFailedError("train.py", {1: failure})) == line


def test_a_group_is_told_by_its_errors() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(ValueError("a")))
            group.create_task(fail(KeyError("b")))

    assert (
        failure_line(raised(lambda: asyncio.run(both())))
        == "ValueError: a; KeyError: 'b' (ExceptionGroup: unhandled errors in a TaskGroup)"
    )
    many = ExceptionGroup("shards", [ValueError(str(index)) for index in range(5)])
    nested = ExceptionGroup("outer", [many])
    assert failure_line(nested) == (
        "ValueError: 0; ValueError: 1; ValueError: 2; and 2 more (ExceptionGroup: shards) (ExceptionGroup: outer)"
    )


def test_a_group_in_a_spawned_process_is_told_with_its_errors() -> None:
    def fail() -> None:
        raise ExceptionGroup("shards", [ValueError("a"), KeyError("b")])

    text = "".join(traceback.format_exception(raised(fail)))
    error = torch.multiprocessing.ProcessRaisedException(
        f"\n\n-- Process 0 terminated with the following error:\n{text}", 0, 4711
    )
    assert failure_line(error) == (
        "ExceptionGroup: shards (2 sub-exceptions) ValueError: a KeyError: 'b' (in process 0)"
    )


def test_a_chain_ends_at_its_first_error() -> None:
    def fail() -> None:
        try:
            _chained_in_worker(0)
        except RuntimeError as error:
            raise SystemError("no data") from error

    assert failure_line(raised(fail)) == (
        "SystemError: no data, caused by RuntimeError: cannot read the labels, "
        "caused by FileNotFoundError: labels.csv"
    )


def test_what_an_error_says_of_its_cause_is_not_told_twice() -> None:
    def fail() -> None:
        try:
            raise ImportError("no module x")
        except ImportError as error:
            raise RuntimeError(f"cannot import the model: {error}") from error

    assert failure_line(raised(fail)) == "RuntimeError: cannot import the model: no module x"


def test_what_was_being_handled_is_no_cause_unless_the_error_says_nothing() -> None:
    def fail(error: Exception) -> None:
        try:
            raise KeyError("width")
        except KeyError:
            raise error  # noqa: B904  # as programs do

    assert failure_line(raised(lambda: fail(ValueError("bad file")))) == "ValueError: bad file"
    line = failure_line(raised(lambda: fail(ValueError())))
    assert line.startswith("ValueError at test_failure_line.py:")
    assert line.endswith(", caused by KeyError: 'width'")


def test_an_error_without_a_message_names_its_line() -> None:
    def fail() -> None:
        assert not torch.__version__

    error = raised(functools.partial(fail))
    error.args = ()
    assert failure_line(error) == (
        f"AssertionError at test_failure_line.py:{fail.__code__.co_firstlineno + 1}: "
        "assert not torch.__version__"
    )
    assert failure_line(ValueError()) == "ValueError"


def test_odd_errors_are_told_all_the_same() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert failure_line(Silent()) == "Silent: <str() of this Silent failed>"
    assert failure_line(KeyError(("a", 1))) == "KeyError: ('a', 1)"
    assert failure_line(KeyError("not in\nthe table")) == "KeyError: not in the table"
    assert failure_line(SystemExit("no data")) == "no data"
    noted = ValueError("bad row")
    noted.add_note("in shard 3")
    assert failure_line(noted) == "ValueError: bad row (in shard 3)"
    ring = ValueError("round")
    ring.__cause__ = ring
    assert failure_line(ring) == "ValueError: round"


def test_a_traceback_in_a_message_gives_way_to_its_last_line() -> None:
    text = "".join(traceback.format_exception(raised(lambda: _plain_in_worker(0))))
    assert failure_line(RuntimeError(f"shard 3 failed:\n{text}")) == (
        "RuntimeError: shard 3 failed: ValueError: row 3 has no label"
    )
    # As Ray writes it: frames without a heading.
    frames = (
        'ray::work() (pid=1)\n  File "work.py", line 3, in work\n    go()\nValueError: row 3 has no label'
    )
    assert (
        failure_line(RuntimeError(frames))
        == "RuntimeError: ray::work() (pid=1) ValueError: row 3 has no label"
    )
    quoted = 'File "settings.toml", line 3: no such key'
    assert failure_line(RuntimeError(quoted)) == f"RuntimeError: {quoted}"
