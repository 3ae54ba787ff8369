"""The stand-in for the driver's library: made of what is wanted, and honest."""

import ctypes
import subprocess

import pytest

from vramfit.cudnn import stand_in
from vramfit.errors import UsageError

from .libraries import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture
def library(tmp_path):
    """A part of a cuDNN that calls two functions of the driver."""
    source = tmp_path / "part.c"
    source.write_text(
        "extern int cuInit(unsigned); extern int cuDeviceGetCount(int *); extern int cudnnOther(void);"
        "int both(void) { int n; return cuInit(0) + cuDeviceGetCount(&n) + cudnnOther(); }"
    )
    made = tmp_path / "lib" / "libcudnn_part.so.9"
    made.parent.mkdir()
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return made.with_name("libcudnn.so.9")


def test_it_has_what_is_wanted_and_says_that_there_is_no_device(library, tmp_path, monkeypatch):
    monkeypatch.setattr(stand_in, "has_driver", lambda: False)
    assert stand_in.driver_functions(library.with_name("libcudnn_part.so.9")) == {
        "cuInit",
        "cuDeviceGetCount",
    }
    folder = stand_in.stand_in(library, tmp_path / "cache")
    made = ctypes.CDLL(f"{folder}/libcuda.so.1")
    assert (made.cuInit(0), made.cuDeviceGetCount(None)) == (100, 100)
    assert not hasattr(made, "cuMemAlloc")
    before = (tmp_path / "cache").stat().st_mtime_ns
    assert stand_in.stand_in(library, tmp_path / "cache") == folder  # made once
    assert (tmp_path / "cache").stat().st_mtime_ns == before


def test_there_is_none_beside_a_driver_or_where_nothing_wants_it(library, tmp_path, monkeypatch):
    monkeypatch.setattr(stand_in, "has_driver", lambda: True)
    assert stand_in.stand_in(library, tmp_path / "cache") is None
    monkeypatch.setattr(stand_in, "has_driver", lambda: False)
    library.with_name("libcudnn_part.so.9").unlink()
    assert stand_in.stand_in(library, tmp_path / "cache") is None


def test_without_a_compiler_that_is_said(library, tmp_path, monkeypatch):
    monkeypatch.setattr(stand_in, "has_driver", lambda: False)
    monkeypatch.setattr(stand_in.shutil, "which", lambda name: None)
    monkeypatch.setattr(stand_in, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="there is no C compiler to make a stand-in"):
        stand_in.stand_in(library, tmp_path / "cache")


def test_a_compiler_that_fails_leaves_nothing(library, tmp_path, monkeypatch):
    monkeypatch.setattr(stand_in, "has_driver", lambda: False)
    monkeypatch.setattr(stand_in, "_compiler", lambda: ["false"])
    with pytest.raises(UsageError, match="false could not make a stand-in for the driver: no output"):
        stand_in.stand_in(library, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
