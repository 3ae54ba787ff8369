"""The pytest plugin as its users have it: test files of their own, run by pytest in a process of its own."""

import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests import warm


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run of pytest: its exit code, what it printed, and what became of each test."""

    code: int
    output: str
    tests: dict[str, str]
    texts: dict[str, str]
    properties: dict[str, dict[str, str]]


_ALONE = ("-p", "no:zarr")
"""zarr comes with a plugin of its own, which imports NumPy."""


def run_pytest(
    folder: Path,
    files: dict[str, str],
    *arguments: str,
    launcher: Sequence[str] = ("-m", "pytest"),
    start: Callable[..., Any] = warm.run,
) -> Outcome:
    """Write the files and run pytest on them; the real card, if there is one, is hidden.

    What asks for the modules that were imported is started by ``subprocess.run``.
    """
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))
    environ = dict(os.environ)
    if "--vram-gpu" not in arguments and "--gpu" not in launcher:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    done = start(
        [sys.executable, *launcher, "--junitxml=junit.xml", "-p", "no:cacheprovider", *_ALONE, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    tests, texts, properties = {}, {}, {}
    junit = folder / "junit.xml"
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        name = case.attrib["name"]
        found = [child for child in case if child.tag in ("failure", "error", "skipped")]
        tests[name] = found[0].tag if found else "passed"
        texts[name] = "\n".join((child.text or "") for child in case if child.text)
        properties[name] = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
    return Outcome(
        code=done.returncode,
        output=done.stdout + done.stderr,
        tests=tests,
        texts=texts,
        properties=properties,
    )


VIRTUAL = """
    import functools
    import unittest

    import pytest
    import torch

    MIB = 1 << 20
    kept = []


    def use(mib):
        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


    @pytest.mark.limit_vram("40 MiB")
    def test_within():
        use(30)


    @pytest.mark.limit_vram("40 MiB")
    def test_over():
        layer = torch.nn.Linear(4096, 4096, device="cuda")
        layer(torch.ones(1, 4096, device="cuda"))


    @pytest.mark.limit_vram("40 MiB", of="allocated")
    def test_allocated_within():
        use(30)
        use(39)


    @pytest.mark.limit_vram("20 MiB")
    class TestClass:
        def test_of_the_class(self):
            use(30)

        @pytest.mark.limit_vram("60 MiB")
        def test_of_its_own(self):
            use(30)


    @pytest.mark.limit_vram("40 MiB")
    @pytest.mark.parametrize("mib", [30, 50])
    def test_parameters(mib):
        use(mib)


    @pytest.fixture
    def resident():
        kept_by_fixture = use(50)
        yield kept_by_fixture
        assert torch.cuda.is_available()  # the card lasts until the fixtures are torn down


    @pytest.mark.limit_vram("40 MiB")
    def test_fixture(resident):
        pass


    class TestUnit(unittest.TestCase):
        @pytest.mark.limit_vram("20 MiB")
        def test_unit(self):
            use(30)


    setups = []


    @pytest.fixture(scope="session", autouse=True)
    def for_the_session():
        setups.append("session")  # gives no value: it stays


    @pytest.fixture(scope="module")
    def layer():
        setups.append("layer")
        return torch.nn.Linear(2048, 2048)


    @pytest.fixture(scope="module")
    def on_card(layer):
        yield layer.cuda()
        assert torch.cuda.is_available()
        setups.append("down")


    @pytest.mark.limit_vram("60 MiB")
    @pytest.mark.parametrize("rows", [1, 2, 4096])
    def test_module_fixture(on_card, rows):
        on_card(torch.ones(rows, 2048, device="cuda"))


    def test_module_fixture_with_values_after_all(layer):
        assert type(layer.weight.data) is torch.Tensor
        assert layer(torch.ones(1, 2048)).isfinite().all()
        assert setups == ["session", *(["layer", "down"] * 3), "layer"]


    @pytest.mark.skip(reason="not today")
    @pytest.mark.limit_vram("20 MiB")
    def test_skipped():
        use(30)


    @pytest.mark.xfail(strict=True, reason="known")
    @pytest.mark.limit_vram("20 MiB")
    def test_known():
        use(30)


    @pytest.mark.limit_vram("1 GiB")
    def test_out_of_memory():
        resident = use(600)
        use(30000)


    @pytest.mark.no_vram_leak
    def test_leak():
        kept.append(use(3))


    @pytest.mark.no_vram_leak(rounds=6)
    @pytest.mark.limit_vram("20 MiB")
    def test_leak_over_a_limit():
        kept.append(use(3))


    @functools.lru_cache
    def table():
        return use(8)


    @pytest.mark.no_vram_leak
    def test_cache_that_fills():
        table() + 1


    @pytest.mark.no_vram_leak
    def test_cycle_that_waits():
        cycle = [use(3)]
        cycle.append(cycle)


    @pytest.mark.no_vram_leak
    def test_fails_later(counts=[]):
        counts.append(1)
        assert len(counts) < 3


    def test_figures(vram):
        use(50)
        assert vram.peak_reserved_bytes == 50 * MIB
        assert vram.run.devices[0].gpu == "RTX 4090"


    def test_not_metered():
        weight = torch.ones(3, requires_grad=True)
        weight.sum().backward()
        assert not torch.cuda.is_available()


    @pytest.mark.limit_vram("1 GiB")
    def test_after_a_backward_pass_on_the_cpu():
        torch.nn.Linear(10, 10, device="cuda")(torch.ones(1, 10, device="cuda")).sum().backward()
"""


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("virtual")
    return run_pytest(folder, {"test_it.py": VIRTUAL}, "--vram-gpu", "RTX 4090", "--vram-peaks")


def test_outcomes_on_the_virtual_gpu(virtual: Outcome) -> None:
    assert virtual.tests == {
        "test_within": "passed",
        "test_over": "failure",
        "test_allocated_within": "passed",
        "test_of_the_class": "failure",
        "test_of_its_own": "passed",
        "test_parameters[30]": "passed",
        "test_parameters[50]": "failure",
        "test_fixture": "failure",
        "test_unit": "failure",
        "test_module_fixture[1]": "passed",
        "test_module_fixture[2]": "passed",
        "test_module_fixture[4096]": "failure",
        "test_module_fixture_with_values_after_all": "passed",
        "test_skipped": "skipped",
        "test_known": "skipped",
        "test_out_of_memory": "failure",
        "test_leak": "failure",
        "test_leak_over_a_limit": "failure",
        "test_cache_that_fills": "passed",
        "test_cycle_that_waits": "passed",
        "test_fails_later": "failure",
        "test_figures": "passed",
        "test_not_metered": "passed",
        "test_after_a_backward_pass_on_the_cpu": "passed",
    }
    assert virtual.code == 1


def test_the_failure_says_where_the_bytes_are(virtual: Outcome) -> None:
    text = virtual.texts["test_over"]
    assert "peak reserved memory 86.00 MiB is over the limit of 40.00 MiB by 46.00 MiB" in text
    assert "on RTX 4090, device 0" in text
    assert "first passed at setup, empty, test_it.py:23" in text
    assert "86.00 MiB were reserved: 72.17 MiB in use" in text
    for part in ("parameters", "Linear", "float32[4096,4096]", "test_it.py:23"):
        assert part in text
    assert "vramfit/" not in text  # none of our own lines


def test_running_out_of_memory_says_what_was_alive(virtual: Outcome) -> None:
    text = virtual.texts["test_out_of_memory"]
    assert "CUDA out of memory. Tried to allocate 29.30 GiB" in text
    assert "29.30 GiB asked for at test_it.py:13 did not fit: 600.00 MiB allocated" in virtual.output
    assert "virtual/mode.py" not in text


def test_a_leak_names_its_line_and_its_owner(virtual: Outcome) -> None:
    text = virtual.texts["test_leak"]
    assert "memory grows by 3.00 MiB per round" in text
    assert "test_it.py:13" in text
    assert "held by test_it.kept[" in text


def test_both_gates_are_told(virtual: Outcome) -> None:
    text = virtual.texts["test_leak_over_a_limit"]
    assert "is over the limit of 20.00 MiB" in text
    assert "memory grows by 3.00 MiB per round" in text


def test_a_round_that_fails_is_named(virtual: Outcome) -> None:
    assert "in round 2 of those" in virtual.texts["test_fails_later"]


def test_the_device_and_the_peaks_are_told(virtual: Outcome) -> None:
    assert "vram: virtual RTX 4090" in virtual.output
    assert "22 tests are metered on virtual RTX 4090, 23.64 GiB" in virtual.output
    assert virtual.properties["test_within"]["vram_peak_reserved_bytes"] == str(30 << 20)
    peaks = virtual.output.split("peaks of GPU memory")[1]
    assert "   50.00 MiB   50.00 MiB  test_it.py::test_figures" in peaks


def test_metered_cpu_where_there_is_no_card(tmp_path: Path) -> None:
    files = {
        "test_it.py": """
            import pytest
            import torch

            kept = []

            @pytest.mark.limit_vram("5 MiB", of="allocated")
            def test_within(vram):
                torch.ones(1 << 20).sum()
                assert vram.peak_allocated_bytes == (1 << 22) + 512

            @pytest.mark.limit_vram("5 MiB", of="allocated")
            def test_over():
                torch.ones(1 << 20) + torch.ones(1 << 20)

            @pytest.mark.no_vram_leak
            def test_leak():
                kept.append(torch.ones(1 << 20))

            @pytest.mark.no_vram_leak
            def test_clean():
                torch.ones(1 << 20) + 1

            @pytest.mark.limit_vram("5 MiB")
            def test_without_tensors():
                pass

            @pytest.mark.limit_vram("5 MiB")
            class TestClass:
                def test_with(self):
                    torch.ones(1 << 10)

                def test_without(self):
                    pass
        """
    }
    outcome = run_pytest(tmp_path, files)
    assert outcome.tests == {
        "test_within": "passed",
        "test_over": "failure",
        "test_leak": "failure",
        "test_clean": "passed",
        "test_without_tensors": "failure",
        "test_with": "passed",
        "test_without": "passed",
    }
    assert (
        "the test never used the device, so its limit_vram proves nothing"
        in outcome.texts["test_without_tensors"]
    )
    assert "7 tests are metered on tensors on the CPU, metered" in outcome.output
    assert "vram: 2 metered tests never used the device: nothing was checked there" in outcome.output
    assert "on CPU, device 0" in outcome.texts["test_over"]
    assert "held by test_it.kept[" in outcome.texts["test_leak"]


def test_the_cards_path_with_a_virtual_gpu_in_its_place(tmp_path: Path) -> None:
    """pytest itself runs on the virtual GPU: CUDA seems to be there, and torch's memory history records the tests."""
    files = {
        "pytest.ini": "[pytest]\nfilterwarnings = error\n",
        "test_it.py": """
            import pytest
            import torch

            MIB = 1 << 20
            kept = []

            def use(mib):
                return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

            def test_leaves_a_cache_behind():
                use(500)

            @pytest.mark.limit_vram("40 MiB")
            def test_within(vram):
                use(30)
                assert vram.run.source.value == "card"

            @pytest.mark.limit_vram("40 MiB")
            def test_over():
                torch.nn.Linear(4096, 4096, device="cuda")(torch.ones(1, 4096, device="cuda"))

            @pytest.mark.no_vram_leak
            def test_leak():
                kept.append(use(3))

            @pytest.mark.no_vram_leak
            def test_clean():
                use(3)
        """,
    }
    outcome = run_pytest(
        tmp_path,
        files,
        launcher=["-m", "vramfit", "run", "--gpu", "RTX 4090", "--writes", "real", "-m", "pytest"],
    )
    assert "4 tests are metered on the card: NVIDIA GeForce RTX 4090" in outcome.output
    assert outcome.tests == {
        "test_leaves_a_cache_behind": "passed",
        "test_within": "passed",
        "test_over": "failure",
        "test_leak": "failure",
        "test_clean": "passed",
    }
    assert "first passed at setup, test_it.py:21" in outcome.texts["test_over"]
    assert "held by test_it.kept[" in outcome.texts["test_leak"]


@pytest.mark.slow
def test_tests_that_their_process_cannot_carry_run_in_children_also_of_xdist(tmp_path: Path) -> None:
    """A backward pass before the shim was there: results are the same."""
    pytest.importorskip("xdist")
    files = {
        "pytest.ini": "[pytest]\nfilterwarnings = error\n",
        "conftest.py": """
            import torch

            weight = torch.ones(3, requires_grad=True)
            weight.sum().backward()

            def pytest_addoption(parser):
                parser.addoption("--size", type=int, default=0)
        """,
        "test_it.py": """
            import pytest
            import torch

            @pytest.fixture(scope="module")
            def layer(request):
                return torch.nn.Linear(request.config.getoption("size"), 4096, device="cuda")

            @pytest.mark.limit_vram("40 MiB")
            @pytest.mark.parametrize("rows", [1])
            def test_over(layer, rows):
                layer(torch.ones(rows, 4096, device="cuda")).sum().backward()

            @pytest.mark.limit_vram("20 pounds")
            def test_bad():
                pass
        """,
    }
    outcome = run_pytest(tmp_path, files, "--vram-gpu", "24GiB", "--vram-peaks", "-n", "1", "--size", "4096")
    expected = {"test_over[1]": "failure", "test_bad": "error"}
    assert outcome.tests == expected, outcome.output
    assert "is over the limit of 40.00 MiB" in outcome.texts["test_over[1]"]
    assert "test_it.py::test_over[1]" in outcome.output.split("peaks of GPU memory")[1]
    assert "'20 pounds' is not a size" in outcome.texts["test_bad"]


def test_a_child_that_dies_fails_its_test(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vramfit.integrations.pytest_child import run_in_child

    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho last words\nkill -6 $$\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    [report] = run_in_child(request.node)
    assert (report.outcome, report.when, report.nodeid) == ("failed", "call", request.node.nodeid)
    assert "by signal 6 before it could report" in report.longreprtext
    assert "last words" in report.longreprtext


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ('limit_vram("2 stones")', "'2 stones' is not a size"),
        ("limit_vram", "takes one size"),
        ("limit_vram(1.5)", "takes one size"),
        ("limit_vram(0)", "0 bytes are no limit"),
        ('limit_vram("1 GiB", of="used")', "neither 'reserved' nor 'allocated'"),
        ('limit_vram("1 GiB", above=3)', "knows no above"),
        ('limit_vram("1 GiB", device="cuda:0")', "not the index of a device"),
        ("no_vram_leak(rounds=2)", "2 rounds cannot tell growth from chance"),
        ('no_vram_leak(rounds="many")', "rounds='many' is not a number"),
        ("no_vram_leak(times=5)", "takes rounds and nothing else"),
    ],
)
def test_arguments_that_cannot_be_used(marker: str, said: str) -> None:
    """Read as the plugin reads them, without a run of pytest for each."""
    from vramfit.integrations.pytest_gates import BadMarker, _limit, _no_leak

    mark = eval(f"pytest.mark.{marker}", {"pytest": pytest}).mark
    with pytest.raises(BadMarker, match=r"limit_vram|no_vram_leak") as error:
        (_limit if mark.name == "limit_vram" else _no_leak)(mark)
        pytest.fail("it was taken")
    assert said in str(error.value)


def test_usage_errors_name_the_test_and_import_no_torch(tmp_path: Path) -> None:
    files = {
        "conftest.py": """
            import sys

            def pytest_unconfigure():
                print("torch imported:", "torch" in sys.modules, "numpy" in sys.modules)
        """,
        "test_it.py": """
            import unittest

            import pytest

            @pytest.mark.limit_vram("2 stones")
            def test_one():
                pass

            class TestUnit(unittest.TestCase):
                @pytest.mark.no_vram_leak
                def test_two(self):
                    pass
        """,
    }
    outcome = run_pytest(tmp_path, files, start=subprocess.run)
    assert outcome.code == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_one: limit_vram: '2 stones' is not a size" in outcome.output
    assert "test_it.py::TestUnit::test_two: no_vram_leak repeats plain test functions" in outcome.output
    assert "torch imported: False False" in outcome.output


def test_an_unknown_card(tmp_path: Path) -> None:
    outcome = run_pytest(tmp_path, {"test_it.py": "def test_one(): pass"}, "--vram-gpu", "RTX 4991")
    assert outcome.code == pytest.ExitCode.USAGE_ERROR
    assert "--vram-gpu: " in outcome.output
    assert "RTX 4991" in outcome.output
    assert "Traceback" not in outcome.output


def test_where_nothing_uses_it_it_costs_and_says_nothing(tmp_path: Path) -> None:
    files = {
        "pytest.ini": "[pytest]\naddopts = --strict-markers\n",
        "test_it.py": """
            import sys

            def test_plain():
                assert not {"torch", "numpy", "rich", "typer"} & set(sys.modules)
        """,
    }
    outcome = run_pytest(tmp_path, files, start=subprocess.run)
    assert outcome.code == 0
    assert "vram:" not in outcome.output


def test_the_card_may_be_named_in_the_configuration(tmp_path: Path) -> None:
    files = {"pytest.ini": "[pytest]\nvram_gpu = A100 40GB\n", "test_it.py": "def test_one(): pass"}
    assert "vram: virtual A100" in run_pytest(tmp_path, files).output
