"""What every test needs: nothing of the user or of the shell may change results."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for profiles in a folder that holds none."""
    monkeypatch.setenv("VRAMFIT_PROFILE_DIR", str(tmp_path_factory.getbasetemp() / "no-profiles"))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let child processes notice an interrupt: a shell's background jobs ignore it, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
