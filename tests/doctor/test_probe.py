"""The children that ask driver and torch, as they really run, with stand-ins for what this machine lacks."""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
from tests import warm
from tests.doctor.test_drivers import APPS, GPUS

from vramfit.doctor.facts import Tool
from vramfit.doctor.gathering import _driver

LIBRARY = """
    class NVMLError(Exception):
        pass

    def nvmlInit():
        {init}

    def nvmlShutdown():
        pass

    def nvmlSystemGetDriverVersion():
        print("a library that talks")
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion():
        raise NVMLError("Not Supported")

    def nvmlDeviceGetCount():
        return 0
"""


def stand_in_library(folder: Path, monkeypatch: pytest.MonkeyPatch, init: str = "pass") -> None:
    (folder / "pynvml.py").write_text(textwrap.dedent(LIBRARY).replace("{init}", init))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def stand_in_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "gpus.txt").write_text(GPUS.replace("Enabled, Enabled, Enabled", "Disabled, Enabled, Enabled"))
    (folder / "apps.txt").write_text(APPS)
    command = folder / "nvidia-smi"
    command.write_text(
        f'#!/bin/sh\ncase "$1" in\n--query-gpu*) cat {folder}/gpus.txt;;\n--query-compute*) cat {folder}/apps.txt;;\n'
        '*) echo "CUDA Version: 13.0";;\nesac\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_nvml_in_a_child_whatever_else_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_library(tmp_path, monkeypatch)
    driver, error = _driver(30.0)
    assert error == ""
    assert driver is not None
    assert (driver.tool, driver.version, driver.cuda_version) == (Tool.NVML, "580.95.05", None)


def test_the_command_where_the_library_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_library(tmp_path, monkeypatch, init='raise NVMLError("no library")')
    stand_in_command(tmp_path, monkeypatch)
    driver, error = _driver(30.0)
    assert error == ""
    assert driver is not None
    assert driver.tool is Tool.NVIDIA_SMI
    assert driver.cuda_version == (13, 0)
    assert [process.pid for process in driver.cards[0].processes] == [4242, 77]


def test_neither_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_library(tmp_path, monkeypatch, init='raise NVMLError("Driver/library version mismatch")')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _driver(30.0) == (None, "NVML: Driver/library version mismatch")


def test_torch_on_a_card() -> None:
    """A virtual GPU stands in for the card, in a process of its own."""
    code = """
        import json, vramfit
        from vramfit.doctor import probe
        from vramfit.plain import to_plain
        import torch
        with vramfit.VirtualGPU("RTX 4090"):
            found = [to_plain(probe._device(torch, index)) for index in (0, 1)]
        print(json.dumps(found))
    """
    done = warm.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env={key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"},
    )
    there, missing = json.loads(done.stdout)
    assert there["error"] == ""
    assert there["capability"] == [8, 9]
    assert there["reserved_bytes"] == 2 << 20
    assert there["total_bytes"] > there["free_bytes"] > 0
    assert there["uuid"]
    assert there["pci_bus_id"].endswith(".0")
    assert "invalid device ordinal" in missing["error"]
