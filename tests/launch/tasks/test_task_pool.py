"""Tasks side by side: each in a process of its own, on any executor, limited, stopped together, and kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vramfit.launch.starting import own_options
from vramfit.launch.tasks import Ending, KeptResults, Task, TaskPlace, TaskResult, in_order, mapped, run_all

pytestmark = pytest.mark.usefixtures("interruptible")


def square(number: int) -> dict[str, int]:
    print("working")
    return {"square": number * number, "process": os.getpid(), "parent": os.getppid()}


def noted(folder: str, number: int) -> int:
    """Leaves a file, so that it is seen how often it ran."""
    Path(folder, str(time.monotonic_ns())).touch()
    return number


class Refusal(Exception):
    """Of a kind that cannot be made from its message alone."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} is not {other}")


def refuse(kind: str) -> Any:
    if kind == "own":
        raise Refusal(1, 2)
    if kind == "unpicklable":
        return threading.Lock()
    raise ValueError(kind)


def die(how: str) -> None:
    print("last words", flush=True)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(5)


def sleep(seconds: float, child: bool = False) -> None:
    if child:
        subprocess.run(["sleep", str(seconds)], check=False)
    time.sleep(seconds)


def tasks(*numbers: int) -> list[Task]:
    return [Task(key=str(number), function=square, arguments=(number,)) for number in numbers]


def by_key(results: Iterator[TaskResult]) -> dict[str, TaskResult]:
    return {result.key: result for result in results}


class Elsewhere(Executor):
    """Another machine: what is submitted arrives there as bytes, in an interpreter that knows nothing of this one."""

    def __init__(self) -> None:
        self.sent = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        self.sent += 1
        code = (
            "import pickle, sys; f, a, o = pickle.load(sys.stdin.buffer);"
            "sys.stdout.buffer.write(pickle.dumps(f(*a, **o)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps((function, args, options)),
            capture_output=True,
            check=True,
            cwd="/",
        )
        future: Future[Any] = Future()
        future.set_result(pickle.loads(done.stdout))
        return future


EXECUTORS: dict[str, Callable[[], Executor | None]] = {
    "default": lambda: None,
    "threads": lambda: ThreadPoolExecutor(2),
    "processes": lambda: ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")),
    "elsewhere": Elsewhere,
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_on_every_executor_each_task_has_a_process_of_its_own(name: str) -> None:
    executor = EXECUTORS[name]()
    late = Task(key="late", function=sleep, arguments=(60,))
    dead = Task(key="dead", function=die, arguments=("signal",))
    try:
        found = by_key(run_all([*tasks(2, 3), dead], executor, at_once=2, seconds=300))
        found |= by_key(run_all([late], executor, seconds=4))
    finally:
        if executor is not None:
            executor.shutdown()
    assert [found[key].value["square"] for key in "23"] == [4, 9]
    assert {found[key].ending for key in "23"} == {Ending.DONE}
    processes = {found[key].value["process"] for key in "23"}
    assert len(processes) == 2 and os.getpid() not in processes
    is_here = {found[key].value["parent"] for key in "23"} == {os.getpid()}
    assert is_here is (name in ("default", "threads"))
    assert (found["dead"].ending, found["dead"].failure) == (
        Ending.DIED,
        "its process was ended by signal 9: last words",
    )
    assert (found["late"].ending, found["late"].failure) == (Ending.LATE, "took more than 4 s")


def test_what_goes_wrong_is_a_result() -> None:
    asked = [Task(key=kind, function=refuse, arguments=(kind,)) for kind in ("plain", "own", "unpicklable")]
    asked += [Task(key="exit", function=die, arguments=("exit",))]
    found = by_key(run_all(asked, at_once=4))
    assert isinstance(found["plain"].error, ValueError)
    assert found["plain"].failure == "ValueError: plain"
    assert (found["own"].failure, found["own"].error) == ("Refusal: 1 is not 2", None)
    assert found["unpicklable"].ending is Ending.FAILED
    assert "pickle" in found["unpicklable"].failure
    assert (found["exit"].ending, found["exit"].failure) == (
        Ending.DIED,
        "its process ended with code 5: last words",
    )
    assert not any(result.has_value for result in found.values())


def test_a_task_that_starts_a_process_itself_runs_on_the_executor() -> None:
    def here(number: int) -> int:
        if number == 3:
            raise LookupError("three")
        return os.getpid()

    asked = [Task(key=str(n), function=here, arguments=(n,), place=TaskPlace.EXECUTOR) for n in (1, 3)]
    found = by_key(run_all(asked))
    assert found["1"].value == os.getpid()
    assert isinstance(found["3"].error, LookupError)


def test_forks_have_imported_what_is_named_and_new_processes_have_not() -> None:
    def imported() -> bool:
        return "wave" in sys.modules

    task = Task(key="", function=imported)
    assert [next(run_all([task])).value, next(run_all([task], imports=["wave"])).value] == [
        False,
        sys.platform == "linux",
    ]


def test_a_limit_ends_what_a_task_has_started_and_one_for_all_starts_no_more() -> None:
    began = time.monotonic()
    asked = [Task(key=str(n), function=sleep, arguments=(50, True)) for n in range(4)]
    found = list(run_all(asked, at_once=2, seconds_in_all=3))
    assert [result.ending for result in found] == [Ending.LATE] * 2
    assert time.monotonic() - began < 30
    assert b"sleep\x0050" not in b"".join(
        file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if _is_ours(file)
    )


def _is_ours(file: Path) -> bool:
    return f"PPid:\t{os.getpid()}\n" in (file.parent / "status").read_text()


def test_progress_order_and_tasks_that_follow_from_results() -> None:
    told: list[tuple[str, bool]] = []
    results: list[int] = []

    def following() -> Iterator[Task]:
        yield from tasks(2)
        yield from tasks(*results)

    for result in run_all(following(), on_progress=lambda key, end: told.append((key, end is not None))):
        results += [result.value["square"]] if result.key == "2" else []
    assert results == [4]
    assert told == [("2", False), ("2", True), ("4", False), ("4", True)]


def test_results_can_be_put_in_the_order_of_their_tasks() -> None:
    asked = [
        Task(key=str(n), function=time.sleep, arguments=(n / 10,), place=TaskPlace.EXECUTOR)
        for n in (5, 1, 3)
    ]
    results = list(run_all(asked, at_once=3))
    assert [result.key for result in results] == ["1", "3", "5"]
    assert [result.key for result in in_order(asked, results)] == ["5", "1", "3"]


def test_kept_results_are_not_worked_out_again(tmp_path: Path) -> None:
    file, ran = tmp_path / "build" / "rows.jsonl", tmp_path / "ran"
    ran.mkdir()
    asked = [Task(key=str(n), function=noted, arguments=(str(ran), n)) for n in (1, 2)]
    dead = Task(key="dead", function=die, arguments=("exit",))
    assert [result.ending for result in run_all([asked[0], dead], keep=file)] == [Ending.DONE, Ending.DIED]
    with file.open("a") as lines:
        lines.write('{"task": "2", "val')
    found = by_key(run_all([*asked, dead], keep=file))
    assert {key: result.ending for key, result in found.items()} == {
        "1": Ending.KEPT,
        "2": Ending.DONE,
        "dead": Ending.DIED,
    }
    assert (found["1"].value, found["2"].value, len(list(ran.iterdir()))) == (1, 2, 2)


def test_lines_may_be_of_any_form(tmp_path: Path) -> None:
    form = KeptResults(
        file=tmp_path / "rows.jsonl",
        line_of=lambda result: {"path": result.key, "found": result.value or {"failed": result.failure}},
        key_of=lambda line: line["path"],
        value_of=lambda line: line["found"],
    )
    dead = Task(key="dead", function=die, arguments=("exit",))
    assert next(run_all([dead], keep=form)).ending is Ending.DIED
    assert json.loads(form.file.read_text())["found"]["failed"].startswith("its process ended")
    assert next(run_all([dead], keep=form)).ending is Ending.KEPT


STOPPED = """
import os, sys, time
from pathlib import Path
from vramfit.launch.tasks import Task, run_all

def work(folder, number):
    if number:
        Path(folder, f"{number}.new").write_text(str(os.getpid()))
        Path(folder, f"{number}.new").rename(Path(folder, str(number)))
        time.sleep(100)
    return number

folder = sys.argv[1]
tasks = [Task(key=str(number), function=work, arguments=(folder, number)) for number in range(5)]
try:
    for result in run_all(tasks, at_once=3, keep=Path(folder, "kept")):
        print(result.key, result.ending.value, flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("whom", ["group", "parent"])
def test_an_interrupt_stops_all_children_and_leaves_what_was_found(tmp_path: Path, whom: str) -> None:
    script = tmp_path / "study.py"
    script.write_text(STOPPED)
    with subprocess.Popen(
        [sys.executable, *own_options(), str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as study:
        until = time.monotonic() + 60
        while not all((tmp_path / n).exists() for n in "123") and time.monotonic() < until:
            time.sleep(0.1)
        children = [int((tmp_path / n).read_text()) for n in "123"]
        if whom == "group":
            os.killpg(study.pid, signal.SIGINT)
        else:
            study.send_signal(signal.SIGINT)
        out, err = study.communicate(timeout=60)
    assert err == ""
    first, *stopped, last = out.splitlines()
    assert (first, last) == ("0 done", "interrupted")
    assert sorted(stopped) == ["1 stopped", "2 stopped", "3 stopped"]
    assert [json.loads(line)["task"] for line in (tmp_path / "kept").read_text().splitlines()] == ["0"]
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_tasks_are_stopped_where_results_are_no_longer_wanted() -> None:
    found = run_all([*tasks(1), Task(key="long", function=sleep, arguments=(100,))], at_once=2)
    assert next(found).key == "1"
    began = time.monotonic()
    found.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 30


def test_what_a_task_prints_is_added_to_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert len(list(run_all(tasks(1, 2), log=log))) == 2
    assert log.read_text() == textwrap.dedent("""\
        working
        working
    """)


def test_a_function_is_mapped_over_items_in_their_order() -> None:
    begun: list[int] = []

    def slower(number: int) -> int:
        begun.append(number)
        time.sleep(0.05 * (3 - number))
        if number == 2:
            raise ValueError("the third")
        return number * number

    values = mapped(slower, range(4), at_once=2)
    assert [next(values), next(values)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(values)
    assert sorted(begun)[:3] == [0, 1, 2]
