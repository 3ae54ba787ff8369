"""Which cuDNN is found, and what is said of one that cannot be asked."""

import pytest

from vramfit.cudnn import found_library
from vramfit.cudnn.found_library import dotted, find_cudnn, of_torch
from vramfit.cudnn.stand_in import driver_functions
from vramfit.errors import UsageError
from vramfit.options.cudnn_choice import VARIABLE, wanted_cudnn

from .libraries import installed


def refusal(wanted):
    with pytest.raises(UsageError) as caught:
        find_cudnn(str(wanted))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_packages_their_folders_and_the_library_itself_are_found(tmp_path):
    library = installed(tmp_path)
    for wanted in (tmp_path, tmp_path / "nvidia" / "cudnn", library.parent, library):
        found = find_cudnn(str(wanted))
        assert (found.library, found.version) == (str(library), 92000)
        assert str(tmp_path / "nvidia" / "cu13" / "lib") in found.needs


def test_auto_looks_among_packages(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(found_library, "_SYSTEM", ())
    assert "no libcudnn.so.9 was found in this machine. Install one: pip install" in refusal("auto")
    library = installed(tmp_path)
    assert find_cudnn("auto").library == str(library)


def test_the_version_of_a_package_or_of_a_file_will_do(tmp_path):
    library = installed(tmp_path)
    (tmp_path / "nvidia" / "cudnn" / "include" / "cudnn_version.h").unlink()
    assert find_cudnn(str(tmp_path)).version == 0  # the library itself will say
    full = library.with_name("libcudnn.so.9.24.0")
    library.rename(full)
    library.symlink_to(full)
    assert find_cudnn(str(tmp_path)).version == 92400
    (tmp_path / "nvidia_cudnn_cu13-9.19.0.56.dist-info").mkdir()
    assert find_cudnn(str(tmp_path)).version == 91900


def test_one_that_is_too_old_is_refused(tmp_path):
    installed(tmp_path, version="9.7.1")
    assert "is 9.7.1, and cuDNN answers without a card from 9.8.0 on" in refusal(tmp_path)
    lib = tmp_path / "eight"
    lib.mkdir()
    (lib / "libcudnn.so.8").touch()
    assert "is of cuDNN 8, and cuDNN answers without a card from 9.8.0 on" in refusal(lib)


def test_one_of_another_kind_of_machine_is_refused(tmp_path):
    library = installed(tmp_path, machine=(2).to_bytes(2, "little"))  # SPARC
    assert f"{library} is for machine 2, and this is " in refusal(tmp_path)


def test_one_that_is_not_whole_is_refused(tmp_path):
    library = installed(tmp_path)
    library.with_name("libcudnn_heuristic.so.9").unlink()
    assert "is not whole: libcudnn_heuristic.so.9 is missing" in refusal(tmp_path)


def test_one_without_cublaslt_is_refused(tmp_path, monkeypatch):
    installed(tmp_path)
    (tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13").unlink()
    (tmp_path / "nvidia_cudnn_cu12-9.10.2.21.dist-info").mkdir()
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(found_library, "_SYSTEM", ())
    assert "needs cuBLASLt, which was not found. Install it: pip install nvidia-cublas-cu12" in refusal(
        tmp_path
    )


def test_what_is_no_library_is_refused(tmp_path):
    text = tmp_path / "text"
    text.write_text("hello")
    assert "is no shared library of Linux" in refusal(text)
    assert "there is no cuDNN at /nowhere" in refusal("/nowhere")
    assert f"no libcudnn.so.9 was found in {tmp_path}" in refusal(tmp_path)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert "cuDNN can be asked on Linux only" in refusal("auto")


def test_none_is_asked_unless_wanted(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert wanted_cudnn(None) is None
    assert wanted_cudnn("none") is None
    assert wanted_cudnn(tmp_path) == str(tmp_path)
    monkeypatch.setenv(VARIABLE, "auto")
    assert wanted_cudnn(None) == "auto"
    assert wanted_cudnn("none") is None
    with pytest.raises(UsageError, match="there is no cuDNN at /nowhere"):
        wanted_cudnn("/nowhere")


def test_which_cudnn_belongs_to_which_torch():
    assert [dotted(of_torch((2, minor))) for minor in (9, 11, 13, 14, 15)] == [
        "9.10.2",
        "9.19.0",
        "9.20.0",
        "9.24.0",
        "9.26.0",
    ]
    assert of_torch((2, 99)) == of_torch((2, 15))


def test_a_file_that_is_no_library_wants_nothing_of_the_driver(tmp_path):
    file = tmp_path / "text"
    file.write_text("hello" * 50)
    assert driver_functions(file) == set()
