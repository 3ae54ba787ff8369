"""Tasks side by side, as many at once as is asked for, on any executor; they are stopped together. No torch.

NOTE [Who starts the processes]
The executor decides where a task's process is started and how many there are; by default threads of this process start
them here. Anything that has `concurrent.futures.Executor.submit` serves, as long as it can pass on a callable that can
be pickled: pools of processes, or machines. A limit of time holds everywhere, since whoever starts a process ends it.
An interrupt of this process reaches the children of its own threads. On another executor, tasks that have not begun are
cancelled, and those that have go on to their ends.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from vramfit.launch.interrupts import passed_on_to_all
from vramfit.launch.nursery import nursery_for
from vramfit.launch.tasks.kept_results import KeptResults
from vramfit.launch.tasks.own_process import CHILD, OwnProcess
from vramfit.launch.tasks.task import Ending, Task, TaskPlace, TaskResult, failed

Item = TypeVar("Item")
Value = TypeVar("Value")
Progress = Callable[[str, TaskResult | None], object]
"""Called with the key of a task when it begins, and with its key and result when it has ended."""

_LOOK = 0.2
"""Seconds between two looks for a signal."""


class TaskPool:
    """Tasks that run; a context manager, which stops them when it is left by an exception.

    Args:
        executor: where they run; None starts their processes from threads of this one.
        at_once: threads, without an executor.
        imports: modules that each task's process begins with: it is forked where that is possible.
        environ: variables added to those of this process, for the processes of all.
        log: a file for what they print.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        *,
        at_once: int = 1,
        imports: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._executor = executor
        self._at_once = at_once
        self._imports = imports
        self._environ = dict(environ or {})
        self._log = log
        self._running: dict[Future[Any], tuple[Task, float]] = {}
        self._stack = ExitStack()
        # Where signals go to, and the nursery, are known to the tasks and not to whoever makes the pool.
        self._context = contextvars.copy_context()

    def __enter__(self) -> Self:
        """Take over the signals of this process."""
        self._context.run(self._begin)
        return self

    def __exit__(self, *error: Any) -> None:
        """Wait for the tasks of threads; stop them first where an exception has come up."""
        if error[0] is not None:
            self.stop()
        self._context.run(self._stack.close)

    def _begin(self) -> None:
        with ExitStack() as stack:
            self._signals = stack.enter_context(passed_on_to_all())
            if self._imports and self._executor is None:
                stack.enter_context(nursery_for((CHILD, *self._imports), self._environ, silent=True))
            self._pool = self._executor or stack.enter_context(ThreadPoolExecutor(self._at_once))
            self._stack = stack.pop_all()

    @property
    def running(self) -> tuple[str, ...]:
        """Keys of the tasks that run."""
        return tuple(task.key for task, _ in self._running.values())

    @property
    def interrupted(self) -> bool:
        """Whether this process got a signal that ends it."""
        return self._signals.interrupted

    def start(self, task: Task, *, seconds: float | None = None) -> None:
        """Let a task begin, or wait for a place on the executor.

        Args:
            task: what to do.
            seconds: how long its own process may take; None for no limit.
        """
        call: Callable[[], Any] = functools.partial(task.function, *task.arguments)
        if task.place is TaskPlace.PROCESS:
            call = OwnProcess.of(task, seconds=seconds, environ=self._environ, log=self._log)
        if isinstance(self._pool, ThreadPoolExecutor):
            call = functools.partial(self._context.copy().run, call)
        future = self._pool.submit(call)
        self._running[future] = task, time.monotonic()

    def collect(self, timeout: float | None = None) -> list[TaskResult]:
        """Wait until a task has ended, or for so many seconds; what has ended."""
        done, _ = wait(self._running, timeout=timeout, return_when=FIRST_COMPLETED)
        return [self._result(future) for future in list(self._running) if future in done]

    def stop(self) -> None:
        """Interrupt what runs here, and cancel what has not begun."""
        for future in self._running:
            future.cancel()
        self._signals.interrupt()

    def raise_signal(self) -> None:
        """End as the signal asks that this process got.

        Raises:
            KeyboardInterrupt: it was SIGINT.
            SystemExit: it was SIGTERM.
        """
        if self._signals.terminated is not None:
            raise SystemExit(128 + self._signals.terminated)
        if self._signals.interrupted:
            raise KeyboardInterrupt

    def _result(self, future: Future[Any]) -> TaskResult:
        task, began = self._running.pop(future)
        seconds = time.monotonic() - began
        if future.cancelled():
            return TaskResult(key=task.key, ending=Ending.STOPPED, failure="interrupted")
        error = future.exception()
        if isinstance(error, KeyboardInterrupt):
            return TaskResult(key=task.key, ending=Ending.STOPPED, failure="interrupted", error=error)
        if error is not None:
            return failed(task.key, error, seconds)
        value = future.result()
        if task.place is TaskPlace.PROCESS:
            result: TaskResult = value
            return result
        return TaskResult(key=task.key, ending=Ending.DONE, value=value, seconds=seconds)


def run_all(
    tasks: Iterable[Task],
    executor: Executor | None = None,
    *,
    at_once: int = 1,
    seconds: float | None = None,
    seconds_in_all: float | None = None,
    on_progress: Progress | None = None,
    keep: Path | KeptResults | None = None,
    imports: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[TaskResult]:
    """Do tasks side by side; yields each result once it is there, in the order in which they end.

    Tasks are taken one by one as others end, so what they are may follow from results before: with one at a time, the
    next is asked for once the last result was dealt with. Interrupted, no further one begins, those that run are
    stopped, and after their results the interrupt is raised.

    Args:
        tasks: what to do.
        executor: where; None starts their processes from threads of this one. See NOTE [Who starts the processes].
        at_once: how many at a time.
        seconds: how long the process of each may take.
        seconds_in_all: how long all may take: those that run by then are ended, and none begins.
        on_progress: called when a task begins and when it has ended.
        keep: a file to which results are added as they come, and whose results are not worked out again.
        imports: modules with which their processes begin: forks of one that has imported them, where that is possible.
        environ: variables added to those of this process, for the processes of all.
        log: a file for what they print.

    Raises:
        KeyboardInterrupt, SystemExit: this process got a signal.
    """
    kept = KeptResults(file=keep) if isinstance(keep, Path) else keep
    known = {} if kept is None else kept.known()
    tell = on_progress or (lambda _key, _result: None)
    until = None if seconds_in_all is None else time.monotonic() + seconds_in_all
    waiting, is_over = iter(tasks), False
    pool = TaskPool(executor, at_once=at_once, imports=imports, environ=environ, log=log)
    with pool:
        while True:
            while len(pool.running) < at_once and not is_over and not pool.interrupted:
                task = next(waiting, None)
                left = None if until is None else until - time.monotonic()
                if task is None or (left is not None and left <= 0):
                    is_over = True
                elif task.key in known:
                    yield known[task.key]
                else:
                    tell(task.key, None)
                    pool.start(task, seconds=_least(seconds, left))
            if not pool.running:
                break
            for result in pool.collect(_LOOK):
                if kept is not None:
                    kept.add(result)
                tell(result.key, result)
                yield result
    pool.raise_signal()


def in_order(tasks: Iterable[Task], results: Iterable[TaskResult]) -> Iterator[TaskResult]:
    """Results of `run_all` in the order of the tasks, each as soon as those before it are there."""
    found: dict[str, TaskResult] = {}
    keys = iter([task.key for task in tasks])
    key = next(keys, None)
    for result in results:
        found[result.key] = result
        while key is not None and key in found:
            yield found[key]
            key = next(keys, None)


def mapped(function: Callable[[Item], Value], items: Iterable[Item], *, at_once: int) -> Iterator[Value]:
    """What a function gives for each item, in their order, `at_once` at a time in threads of this process.

    For functions that start a process themselves, as that of a rank does.

    Raises:
        BaseException: what the function raised for the first item that it failed for.
    """
    tasks = [
        Task(key=str(number), function=function, arguments=(item,), place=TaskPlace.EXECUTOR)
        for number, item in enumerate(items)
    ]
    for result in in_order(tasks, run_all(tasks, at_once=at_once)):
        if result.error is not None:
            raise result.error
        yield result.value


def _least(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)
