"""Children that are forks of a nursery are what new interpreters are, and go cold where they would not be."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vramfit.launch.interrupts import SignalGroup, Signals
from vramfit.launch.nursery import Nursery, WarmPopen, nursery_for, start
from vramfit.launch.starting import own_options

pytestmark = [
    pytest.mark.usefixtures("interruptible"),
    pytest.mark.skipif(
        sys.platform != "linux", reason="forks are for Linux; elsewhere all children start cold"
    ),
]

SEEN = """
import json, os, signal, sys, threading
blocked = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
json.dump({
    "argv": sys.argv, "words": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "cwd": os.getcwd(),
    "environ": dict(os.environ), "main": sorted(vars(sys.modules["__main__"])), "umask": os.umask(0),
    "handlers": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()}, "blocked": blocked,
    "parent": os.getppid(), "threads": threading.active_count(), "leads": os.getsid(0) == os.getpid(),
    "files": [os.path.exists(f"/proc/self/fd/{n}") for n in range(3, 20)], "read": sys.stdin.read(),
    "streams": [
        [s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines, s.buffer.raw.name]
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
}, sys.stdout)
print("done", file=sys.stderr)
"""


def command(*words: str) -> list[str]:
    return [sys.executable, *own_options(), "-P", *words]


def ended(words: list[str], nursery: Nursery | None, **options: Any) -> tuple[int, bytes, bytes]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with WarmPopen(words, nursery=nursery, **(pipes | options)) as child:
        out, err = child.communicate(b"a line\n", timeout=60)
    return child.returncode, out, err


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery(["numpy.random"], {"PATH": os.defpath, "LANG": "C.UTF-8", "SOME": "thing"}) as found:
        yield found


@pytest.mark.parametrize(
    "options",
    [{}, {"cwd": "/"}, {"start_new_session": True}, {"stdin": subprocess.DEVNULL}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_fork_sees_what_a_new_interpreter_sees(nursery: Nursery, options: dict[str, Any]) -> None:
    before, words = nursery.forked, command("-c", SEEN, "some", "words")
    warm, cold = (ended(words, one, env=nursery.environ, **options) for one in (nursery, None))
    assert nursery.forked == before + 1
    assert warm[::2] == cold[::2] == (0, b"done\n")
    assert json.loads(warm[1]) == json.loads(cold[1])
    assert json.loads(warm[1])["parent"] == os.getpid()


def test_signals_that_the_parent_ignores_and_blocks_are_inherited(nursery: Nursery) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        found = [
            json.loads(ended(command("-c", SEEN), one, env=nursery.environ)[1]) for one in (nursery, None)
        ]
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert found[0] == found[1]
    assert found[0]["blocked"] == [signal.SIGUSR1]
    assert found[0]["handlers"][str(int(signal.SIGHUP))] == str(signal.SIG_IGN)


@pytest.mark.parametrize(
    "code",
    ["raise SystemExit(7)", "raise SystemExit('why')", "1/0", "import os, signal; os.kill(os.getpid(), 9)"],
)
def test_a_fork_ends_as_an_interpreter_does(nursery: Nursery, code: str) -> None:
    before = nursery.forked
    warm, cold = (ended(command("-c", code), one, env=nursery.environ) for one in (nursery, None))
    assert nursery.forked == before + 1
    assert warm[:2] == cold[:2]
    assert warm[2].splitlines()[-1:] == cold[2].splitlines()[-1:]


def test_scripts_and_modules_run_as_the_main_program(nursery: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys; print(__name__, __file__, sys.argv, sys.path[0])")
    for words in (
        command(str(script), "x"),
        command("-m", "json.tool", "--compact", "-"),
    ):
        warm, cold = (ended(words, one, env=nursery.environ, cwd=tmp_path) for one in (nursery, None))
        assert warm[:2] == cold[:2]


def test_each_fork_has_random_numbers_of_its_own(nursery: Nursery) -> None:
    code = "import random, numpy, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    first, second = (ended(command("-c", code), nursery, env=nursery.environ)[1].split() for _ in range(2))
    assert not set(first) & set(second)


def _limited() -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else min(hard, 1 << 20) % (1 << 40), hard))
    return lambda: resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def _masked() -> Any:
    before = os.umask(0o027)
    return lambda: os.umask(before)


@pytest.mark.parametrize("change", [_limited, _masked])
def test_where_limits_or_umask_have_changed_a_child_starts_cold(nursery: Nursery, change: Any) -> None:
    assert ended(command("-c", "pass"), nursery, env=nursery.environ)[0] == 0
    before, undo = nursery.forked, change()
    try:
        found = [
            json.loads(ended(command("-c", SEEN), one, env=nursery.environ)[1]) for one in (nursery, None)
        ]
    finally:
        undo()
    assert found[0] == found[1]
    assert nursery.forked == before


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-P", "-c", "pass"], {"env": {"PATH": os.defpath, "LANG": "C", "SOME": "thing"}}),
        (["-P", "-c", "pass"], {"env": {"PATH": os.defpath}}),
        (["-X", "utf8=1", "-P", "-c", "pass"], {}),
        (["-c", "pass"], {}),
        (["-P", "-c", "pass"], {"preexec_fn": lambda: None}),
        (["-P", "-c", "pass"], {"umask": 0o077}),
        (["-P", "-c", "pass"], {"process_group": 0}),
    ],
    ids=[
        "a variable differs",
        "a variable is missing",
        "an option",
        "no option",
        "preexec_fn",
        "umask",
        "process_group",
    ],
)
def test_what_no_fork_can_be_starts_cold(nursery: Nursery, words: list[str], options: dict[str, Any]) -> None:
    before = nursery.forked
    line = [sys.executable, *own_options(), *words]
    assert ended(line, nursery, **{"env": nursery.environ, **options}) == (0, b"", b"")
    assert nursery.forked == before


@pytest.mark.parametrize(
    "source",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "print('hello')",
        "import warnings; warnings.warn('beware')",
        "import nonesuch",
        "raise ValueError",
        "import os; os._exit(1)",
    ],
)
def test_modules_that_cannot_be_shared_let_children_start_cold(tmp_path: Path, source: str) -> None:
    (tmp_path / "unfit.py").write_text(source)
    environ = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path)}
    with Nursery(["unfit"], environ) as nursery:
        assert ended(command("-c", "print(1)"), nursery, env=environ)[:2] == (0, b"1\n")
        assert nursery.forked == 0


def test_what_the_imports_print_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('hello')")
    environ = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path)}
    with Nursery(["loud"], environ, silent=True) as nursery:
        assert ended(command("-c", "import loud; print(1)"), nursery, env=environ)[:2] == (0, b"1\n")
        assert nursery.forked == 1


def _children() -> set[str]:
    """Processes that this one has started."""
    lists = Path("/proc/self/task").glob("*/children")
    return {number for file in lists for number in file.read_text().split()}


def test_nothing_is_left_after_the_block_and_children_go_on() -> None:
    files, before = len(list(Path("/proc/self/fd").iterdir())), _children()
    with nursery_for(["json"]) as nursery:
        assert _children() == before  # it begins with the first child
        child = start(command("-c", "import time; time.sleep(1); print('on')"), stdout=subprocess.PIPE)
        assert nursery.forked == 1
        assert nursery._process is not None
        assert _children() - before == {str(child.pid), str(nursery._process.pid)}
    assert _children() - before == {str(child.pid)}
    with child:
        assert child.communicate()[0] == b"on\n"
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert start(command("-c", "pass")).wait() == 0
    assert nursery.forked == 1


def test_it_ends_with_a_parent_that_is_killed() -> None:
    code = textwrap.dedent("""
        import time, sys
        from vramfit.launch.nursery import nursery_for, start
        from vramfit.launch.starting import own_options
        with nursery_for(["json"]) as nursery:
            start([sys.executable, *own_options(), "-P", "-c", "pass"]).wait()
            print(nursery.forked, nursery._process.pid, flush=True)
            time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, *own_options(), "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        forked, number = map(int, parent.stdout.readline().split())
        parent.kill()
    assert forked == 1
    until = time.monotonic() + 20
    while Path(f"/proc/{number}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{number}").exists()


def test_one_that_was_killed_is_not_asked_again(nursery: Nursery) -> None:
    with Nursery(["json"], nursery.environ) as other:
        assert ended(command("-c", "pass"), other, env=nursery.environ)[0] == 0
        assert other._process is not None
        other._process.kill()
        assert ended(command("-c", "print(1)"), other, env=nursery.environ)[:2] == (0, b"1\n")
        assert other.forked == 1


def test_an_interrupt_while_a_child_is_about_to_be_there_reaches_it(tmp_path: Path) -> None:
    """As a new interpreter gets it, which is there from the first moment on."""
    got: list[int] = []

    class Child:
        def send_signal(self, number: int) -> None:
            got.append(number)

    group, signals = SignalGroup(), Signals(tmp_path)
    with group.has(signals):
        signals.starting = True
        group.interrupt()
        assert got == []
        signals.started(Child())  # type: ignore[arg-type]
    assert got == [signal.SIGINT]


def test_one_file_may_stand_for_all_three_streams() -> None:
    """As the null device does, where a program runs with nothing of it to be seen."""
    code = """
import dataclasses, os, sys
from vramfit.launch.nursery.becoming import settle
from vramfit.launch.nursery.child_request import request_for
request = dataclasses.replace(request_for([sys.executable, "-P", "-c", "pass"]), cwd="/")
settle(request, [os.open(os.devnull, os.O_RDWR)] * 3)
print("nobody sees it")
os._exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
