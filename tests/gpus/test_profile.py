"""Profiles: the file, its mistakes, and how the one of a card is found."""

import json
from pathlib import Path

import pytest

from vramfit.errors import UsageError
from vramfit.gpus.profile import (
    MeasuredCall,
    MeasuredOp,
    MeasuredProfile,
    Rates,
    chosen_profile,
    find_profile,
    load_profile,
    profile_file,
    profile_folder,
    save_profile,
)

PROFILE = MeasuredProfile(
    gpu_name="NVIDIA H200",
    total_bytes=150 << 30,
    torch_version="2.11.0+cu130",
    cuda_version="13.0",
    cudnn_version=91900,
    driver="580.1",
    date="2026-01-02",
    context_bytes=500,
    library_bytes={"cublas": 7},
    workspace_bytes={"cublas": 33_554_432},
    rates=Rates(flops={"float32": 5e13}, bandwidth=4e12, launch_seconds=2e-6, to_card={"pinned": 5e10}),
    ops={
        "aten.convolution.default": {
            "float32[1,2,3,3], f | benchmark": MeasuredCall(
                usual=MeasuredOp(before=(1, 2), after=(3, -1, 4)), first=MeasuredOp(between=((5,), ()))
            ),
            "float32[2]": MeasuredCall(usual=MeasuredOp(reserve=12)),
        },
        "aten.sort.default": {"int64[7]": MeasuredCall(usual=MeasuredOp())},
    },
)


def test_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "p.json"
    save_profile(PROFILE, path)
    read = load_profile(path)
    assert read.file == str(path)
    assert read.ops == PROFILE.ops
    assert read.rates == PROFILE.rates
    assert read.calls == 3
    for name in ("gpu_name", "torch_version", "context_bytes", "library_bytes", "workspace_bytes", "date"):
        assert getattr(read, name) == getattr(PROFILE, name)
    assert json.loads(path.read_text())["schema"] == "vramfit.profile/1"


def test_profile_without_calls_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(MeasuredProfile(gpu_name="x", total_bytes=1, torch_version="2.13.0", date=""), path)
    assert load_profile(path).ops == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "schema is None"),
        ('{"schema": "vramfit.profile/9"}', "vramfit.profile/9"),
        ('{"schema": "vramfit.profile/1"}', "ops"),
        ('{"schema": "vramfit.profile/1", "ops": {}}', "gpu_name"),
        ('{"schema": "vramfit.profile/1", "ops": {"a": {"b": {"before": ["x"]}}}}', "invalid literal"),
        ('{"schema": "vramfit.profile/1", "ops": [1]}', "items"),
    ],
)
def test_other_files_are_refused_in_a_line(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=reason) as caught:
        load_profile(path)
    assert "calibrate" in caught.value.hint


def test_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the profile .*no such file"):
        load_profile(tmp_path / "p.json")


def test_own_profile_is_found_by_card_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAMFIT_PROFILE_DIR", str(tmp_path))
    assert find_profile("NVIDIA H200", "2.11.0") is None
    save_profile(PROFILE, profile_file("NVIDIA H200", "2.11.0+cu130"))
    for version in ("2.11.0", "2.11.0+cpu", "2.11.1"):
        found = find_profile("NVIDIA H200", version)
        assert found is not None
        assert found.torch_version == "2.11.0+cu130"
    assert find_profile("NVIDIA H200", "2.13.0") is None
    assert find_profile("NVIDIA H200 NVL", "2.11.0") is None


def test_what_was_asked_for_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAMFIT_PROFILE_DIR", str(tmp_path))
    save_profile(PROFILE, profile_file("NVIDIA H200", "2.11.0"))
    assert chosen_profile("none", "NVIDIA H200", "2.11.0") is None
    assert chosen_profile(PROFILE, "other", "2.13.0") is PROFILE
    auto = chosen_profile("auto", "NVIDIA H200", "2.11.0")
    assert auto is not None
    assert chosen_profile(profile_file("NVIDIA H200", "2.11.0"), "other", "2.13.0") == auto


def test_folder_is_the_platforms_unless_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VRAMFIT_PROFILE_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert profile_folder() == tmp_path / "vramfit/profiles"
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert profile_folder() == Path.home() / "Library/Application Support/vramfit/profiles"
