"""What every test needs: nothing of the user or of the shell may change results."""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Generator, Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from tests import warm

_searches = itertools.count()

# A property holds however busy the machine is.
settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: importing leaves hardly any, and looking takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make pytest's own folder before any test: made inside of a `VirtualGPU`, it would be dropped with the block."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for profiles in a folder that holds none."""
    monkeypatch.setenv("VRAMFIT_PROFILE_DIR", str(tmp_path_factory.getbasetemp() / "no-profiles"))


@pytest.fixture(autouse=True)
def no_searches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what searches for plans saw from the user's cache and from other tests; few make that folder."""
    name = f"searches-{next(_searches)}"
    monkeypatch.setenv("VRAMFIT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "searches" / name))


@pytest.fixture(autouse=True, scope="module")
def warm_children() -> Iterator[None]:
    """Let the children that vramfit starts for this process begin with everything imported (see `tests.warm`).

    Of modules, so that it comes before the fixtures whose children several tests share.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vramfit.launch.interrupts.start", warm.start)
        yield


@pytest.fixture(autouse=True)
def seeds_without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch note no stack with a seed: it asks after each file of one, for each kind of device, there or not."""
    for name in ("torch.cuda", "torch.mtia", "torch.xpu"):
        module = sys.modules.get(name)
        if hasattr(module, "traceback"):  # that of torch.mtia is new in torch 2.11
            monkeypatch.setattr(module, "traceback", SimpleNamespace(format_stack=list))


@pytest.fixture(autouse=True)
def no_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try no remedies on the many programs that run out here, unless a test asks for them."""
    monkeypatch.setenv("VRAMFIT_REMEDIES", "none")


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Put back the variables that a test or a library changed: MONAI sets CUBLAS_WORKSPACE_CONFIG when imported."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Keep what libraries made out of later collections: runs collect often, and a third of the suite went there."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_garbage() -> None:
    """Tensors that earlier tests left in cycles must not be freed while bytes are compared."""
    gc.collect()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let child processes notice an interrupt: a shell's background jobs ignore it, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def kept_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces of cuBLAS stay, as until torch 2.14 by themselves: NOTE [Workspaces] in virtual/kernels/matmul.py."""
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
