"""What every test needs: profiles of the machine's user must not change results."""

import pytest


@pytest.fixture(autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for profiles in a folder that holds none."""
    monkeypatch.setenv("VRAMFIT_PROFILE_DIR", str(tmp_path_factory.getbasetemp() / "no-profiles"))
