"""The pytest plugin: ``limit_vram`` and ``no_vram_leak`` on tests, on a virtual GPU, a card or metered CPU.

Loaded by the entry point ``pytest11``. Where no test uses it, it imports neither torch nor numpy and prints nothing.

NOTE [Where a test on the virtual GPU runs]
In the test run's own process where that can carry it: autograd's threads must not have been started before the shim is
in place, which is therefore installed once the tests are collected. Where the virtual GPU refuses this process all the
same (a backward pass or a card was used while collecting), it runs in a child of its own (`pytest_child`).

NOTE [Fixtures that outlive their test]
What a fixture of a module or session puts on the virtual GPU holds no values once the test is over, and parameters made
meanwhile are no ordinary ones. So the fixtures of wider scope that a metered test is the first to set up are torn down
with it, unless they gave no value and used no card: the next test that wants them sets them up anew.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vramfit.gpus import GpuSpec
    from vramfit.integrations.pytest_gates import Gates, Metered

_PEAKS = "vram_peaks"


@dataclass(slots=True)
class _Plan:
    """What is done for the tests of this run.

    Attributes:
        gpu: the virtual card, None without ``--vram-gpu``.
        gates: of each test that is metered, by node id.
        is_child: this interpreter was started for one test.
    """

    gpu: GpuSpec | None
    gates: dict[str, Gates]
    is_child: bool
    running: _Running | None = None


@dataclass(slots=True)
class _Running:
    """A test that is being metered.

    Attributes:
        wide: fixtures of wider scope that end with it, with the requests that set them up.
    """

    context: AbstractContextManager[Metered]
    meter: Metered
    wide: list[tuple[pytest.FixtureDef[Any], Any]] = field(default_factory=list)


_plan_key = pytest.StashKey[_Plan]()
_running_key = pytest.StashKey[_Running]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--vram-gpu`` and ``--vram-peaks``."""
    group = parser.getgroup("vramfit", "GPU memory")
    group.addoption(
        "--vram-gpu",
        metavar="NAME",
        default=None,
        help='run the tests marked limit_vram or no_vram_leak on a virtual GPU: "RTX 4090", 24GiB, or a TOML file '
        "(default: the card if there is one, else metered CPU)",
    )
    group.addoption(
        "--vram-peaks",
        action="store_true",
        default=False,
        help="list the peaks of the metered tests at the end",
    )
    parser.addini("vram_gpu", "default of --vram-gpu", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers; refuse a card that is not known before anything runs."""
    config.addinivalue_line(
        "markers",
        'limit_vram(size, of="reserved", device=None): fail the test if its peak of GPU memory passes the size; '
        'of="allocated" limits what tensors hold, without the allocator\'s cache.',
    )
    config.addinivalue_line(
        "markers",
        "no_vram_leak(rounds=5): run the test again and again, and fail it if GPU memory grows from round to round.",
    )
    name = config.getoption("vram_gpu") or config.getini("vram_gpu")
    gpu = None
    if name:
        from vramfit.errors import UsageError
        from vramfit.gpus import find_gpu

        try:
            gpu = find_gpu(name)
        except UsageError as error:
            raise pytest.UsageError(f"--vram-gpu: {error}") from None
    config.stash[_plan_key] = _Plan(gpu=gpu, gates={}, is_child=getattr(config.option, "vram_child", False))


def pytest_report_header(config: pytest.Config) -> str | None:
    """Which virtual card is used; other devices are named once it is known that a test needs them."""
    gpu = config.stash[_plan_key].gpu
    return None if gpu is None else f"vram: virtual {gpu.name}"


@pytest.hookimpl(tryfirst=True)  # before the terminal asks for the line below
def pytest_collection_finish(session: pytest.Session) -> None:
    """Read the markers of the tests that will run."""
    plan = session.config.stash[_plan_key]
    if not _may_be_used(session.items):
        return
    from vramfit.integrations.pytest_gates import BadMarker, gates_of, prepare_interpreter

    wrong = []
    for item in session.items:
        try:
            gates = gates_of(item)
        except BadMarker as error:
            wrong.append(f"{item.nodeid}: {error}")
            continue
        if gates is not None:
            plan.gates[item.nodeid] = gates
    if wrong and not hasattr(session.config, "workerinput"):
        raise pytest.UsageError(*wrong)
    if plan.gates and plan.gpu is not None and not session.config.option.collectonly:
        prepare_interpreter()


def _may_be_used(items: Iterable[pytest.Item]) -> bool:
    names = ("limit_vram", "no_vram_leak")
    return any(
        "vram" in getattr(item, "fixturenames", ()) or any(item.get_closest_marker(name) for name in names)
        for item in items
    )


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    """Which device meters, if any test is metered."""
    plan = config.stash[_plan_key]
    if not plan.gates:
        return None
    from vramfit.integrations.pytest_gates import describe_device

    count = len(plan.gates)
    return f"vram: {count} {'test is' if count == 1 else 'tests are'} metered on {describe_device(plan.gpu)}"


# -- running -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Hand a test that this process cannot carry to a child."""
    plan = item.config.stash[_plan_key]
    if item.nodeid not in plan.gates or plan.gpu is None or plan.is_child:
        return None
    from vramfit.integrations.pytest_child import run_in_child
    from vramfit.integrations.pytest_gates import carries_virtual_gpu

    if carries_virtual_gpu():  # see NOTE [Where a test on the virtual GPU runs]
        return None

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run_in_child(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin to meter, before the test's fixtures are set up and after it is known not to be skipped."""
    plan = item.config.stash[_plan_key]
    gates = plan.gates.get(item.nodeid)
    if gates is None:
        if hasattr(item.config, "workerinput") and _may_be_used([item]):
            _refuse(item)
        return
    from vramfit.errors import VramfitError
    from vramfit.integrations.pytest_gates import open_meter

    try:
        context = open_meter(plan.gpu)
        meter = context.__enter__()
    except VramfitError as error:
        pytest.fail(f"vramfit cannot meter this test: {error}", pytrace=False)
    item.stash[_running_key] = plan.running = _Running(context=context, meter=meter)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Note the fixtures that must end with the test: see NOTE [Fixtures that outlive their test]."""
    plan = request.config.stash[_plan_key]
    running = plan.running
    if running is None or plan.gpu is None or fixturedef.scope == "function" or _is_pytests_own(fixturedef):
        return (yield)
    before = running.meter.run.ops
    try:
        value = yield
    except BaseException:
        running.wide.append((fixturedef, request))  # an error is kept as a value would be
        raise
    if value is not None or running.meter.run.ops != before:
        running.wide.append((fixturedef, request))
    return value


def _is_pytests_own(fixture: pytest.FixtureDef[Any]) -> bool:
    return (getattr(fixture.func, "__module__", "") or "").startswith("_pytest.")


def _refuse(item: pytest.Item) -> None:
    """In a worker of pytest-xdist a usage error would end the worker: the test reports it instead."""
    from vramfit.integrations.pytest_gates import BadMarker, gates_of

    try:
        gates_of(item)
    except BadMarker as error:
        pytest.fail(f"{item.nodeid}: {error}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the test as often as its gates ask, then judge it."""
    running = item.stash.get(_running_key, None)
    if running is None:
        return (yield)
    from vramfit.integrations import pytest_gates

    gates = item.config.stash[_plan_key].gates[item.nodeid]
    root = item.config.rootpath
    try:
        result = yield
        growth = ""
        if gates.no_leak is not None:
            growth = pytest_gates.repeat(gates.no_leak, item.runtest, root)
    except Exception as error:
        _tell_out_of_memory(item, running.meter, root)
        pytest_gates.hide_our_frames(error)
        raise
    run = running.meter.run
    _note_peaks(item, run)
    failures = list(pytest_gates.over_limits(run, gates.limits, root))
    if gates.must_use and (nothing := pytest_gates.unused(run)):
        failures.append(nothing)
    if growth:
        failures.append(growth)
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)
    return result


def _tell_out_of_memory(item: pytest.Item, meter: Metered, root: Path) -> None:
    from vramfit.report.metered import render_out_of_memory

    if text := render_out_of_memory(meter.run, root=root):
        item.add_report_section("call", "GPU memory", text)


def _note_peaks(item: pytest.Item, run: Any) -> None:
    """Peaks as properties of the test: JUnit files hold them, and --vram-peaks lists them."""
    for device in run.devices:
        suffix = "" if len(run.devices) == 1 else f"_{device.index}"
        item.user_properties.append((f"vram_peak_reserved_bytes{suffix}", device.peak_reserved_bytes))
        item.user_properties.append((f"vram_peak_allocated_bytes{suffix}", device.peak_allocated_bytes))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """End metering once the fixtures are torn down."""
    try:
        return (yield)
    finally:
        running = item.stash.get(_running_key, None)
        if running is not None:
            del item.stash[_running_key]
            item.config.stash[_plan_key].running = None
            try:
                for fixture, request in reversed(running.wide):
                    fixture.finish(request)
            finally:
                running.context.__exit__(None, None, None)


@pytest.fixture
def vram(request: pytest.FixtureRequest) -> Any:
    """What meters this test: its ``run``, ``trace`` and peaks so far."""
    running = request.node.stash.get(_running_key, None)
    if running is None:
        raise pytest.UsageError(f"{request.node.nodeid}: vram meters test functions only")
    return running.meter


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Which tests with gates used no card; with --vram-peaks the peaks of all metered tests, the highest first."""
    from vramfit.units import counted, format_bytes

    found = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                told = dict(report.user_properties)
                if "vram_peak_reserved_bytes" in told:
                    sizes = told["vram_peak_reserved_bytes"], told["vram_peak_allocated_bytes"]
                    found.append((*sizes, report.nodeid))
    unused = sum(not (reserved or allocated) for reserved, allocated, _ in found)
    if unused:
        terminalreporter.line(
            f"vram: {counted(unused, 'metered test')} never used the device: nothing was checked there"
        )
    if found and config.getoption(_PEAKS):
        terminalreporter.section("peaks of GPU memory")
        terminalreporter.line(f"{'reserved':>12}{'allocated':>12}  test")
        for reserved, allocated, nodeid in sorted(found, reverse=True):
            note = "" if reserved or allocated else "  (never used the device)"
            figures = f"{format_bytes(reserved):>12}{format_bytes(allocated):>12}"
            terminalreporter.line(f"{figures}  {nodeid}{note}")
