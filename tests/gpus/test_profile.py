"""Profiles: the file, its mistakes, and how the one of a card is found."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vramfit.errors import UsageError, WriteError
from vramfit.gpus import find_gpu
from vramfit.gpus.measured_profile import (
    MeasuredCall,
    MeasuredOp,
    MeasuredProfile,
    Rates,
    chosen_profile,
    find_profile,
    load_profile,
    profile_doubt,
    profile_file,
    profile_folder,
    save_profile,
)

PROFILE = MeasuredProfile(
    gpu_name="NVIDIA H200",
    total_bytes=140 << 30,
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


H200 = find_gpu("H200")


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of profiles."""
    monkeypatch.setenv("VRAMFIT_PROFILE_DIR", str(tmp_path))
    return tmp_path


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
        ("[" * 100_000 + "]" * 100_000, "not JSON"),
        ('{"schema": "vramfit.profile/9"}', "vramfit.profile/9"),
        ('{"schema": "vramfit.profile/1"}', "ops"),
        ('{"schema": "vramfit.profile/1", "ops": {}}', "gpu_name"),
        ('{"schema": "vramfit.profile/1", "ops": {"a": {"b": {"before": ["x"]}}}}', "whole number"),
        ('{"schema": "vramfit.profile/1", "ops": [1]}', "items"),
    ],
)
def test_other_files_are_refused_in_a_line(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=reason) as caught:
        load_profile(path)
    assert "calibrate" in caught.value.hint


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"total_bytes": -1}, "total_bytes is -1"),
        ({"total_bytes": "80GiB"}, "total_bytes is '80GiB'"),
        ({"gpu_name": 7}, "gpu_name is 7, not text"),
        ({"torch_version": None}, "torch_version is None"),
        ({"context_bytes": 1.5}, "context_bytes is 1.5"),
        ({"library_bytes": {"cudnn": float("nan")}}, "library_bytes.cudnn is nan"),
        ({"workspace_bytes": {"cublas": -8}}, "workspace_bytes.cublas is -8"),
        ({"rates": {"bandwidth": float("nan")}}, "bandwidth is nan"),
        ({"rates": {"flops": {"float32": 0}}}, "flops.float32 is 0"),
        ({"rates": {"to_card": {"pinned": float("inf")}}}, "to_card.pinned is inf"),
        ({"rates": {"launch_seconds": "2us"}}, "launch_seconds is '2us'"),
        ({"ops": {"a": {"b": {"reserve": -2}}}}, "reserve is -2"),
        ({"ops": {"a": {"b": {"before": [5, -2]}}}}, "-2 gives back a block that is not held"),
        ({"ops": {"a": {"b": {"after": [5, -1, -1]}}}}, "-1 gives back"),
        ({"ops": {"a": {"b": {"between": [[0.5]]}}}}, "size is 0.5"),
        ({"ops": {"a": {"b": 3}}}, "is not a profile"),
        ({"rates": [1]}, "is not a profile"),
    ],
)
def test_figures_that_cannot_be_are_refused(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    path = tmp_path / "p.json"
    save_profile(PROFILE, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(UsageError, match=re.escape(reason)):
        load_profile(path)


def test_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the profile .*no such file"):
        load_profile(tmp_path / "p.json")


def test_own_profile_is_found_by_card_and_torch(profiles: Path) -> None:
    assert find_profile(H200, "2.11.0") is None
    save_profile(PROFILE, profile_file("NVIDIA H200", 140 << 30, "2.11.0+cu130"))
    for version in ("2.11.0", "2.11.0+cpu", "2.11.1"):
        found = find_profile(H200, version)
        assert found is not None
        assert found.torch_version == "2.11.0+cu130"
    assert find_profile(H200, "2.13.0") is None
    assert find_profile(find_gpu("H200 NVL"), "2.11.0") is None


@pytest.mark.parametrize(
    "other",
    [
        {"gpu_name": "NVIDIA H100 80GB HBM3"},
        {"total_bytes": 94 << 30},
        {"torch_version": "2.13.0+cu130"},
    ],
)
def test_own_profile_is_what_the_file_says_not_what_it_is_called(
    profiles: Path, other: dict[str, Any]
) -> None:
    save_profile(replace(PROFILE, **other), profile_file("NVIDIA H200", 140 << 30, "2.11.0"))
    assert find_profile(H200, "2.11.0") is None
    kept = replace(PROFILE, torch_version="2.11.1")
    save_profile(kept, profile_file("NVIDIA H200", 140 << 30, "2.11.1"))
    found = find_profile(H200, "2.11.0")
    assert found is not None
    assert found.torch_version == "2.11.1"


def test_cards_of_one_name_keep_a_profile_each(profiles: Path) -> None:
    cards = [find_gpu(f"RTX 3080 {size}GB") for size in (10, 12)]
    for card in cards:
        kept = replace(PROFILE, gpu_name=card.vendor_name, total_bytes=card.total_bytes - (200 << 20))
        save_profile(kept, profile_file(kept.gpu_name, kept.total_bytes, "2.11.0"))
    for card in cards:
        found = find_profile(card, "2.11.0")
        assert found is not None
        assert found.total_bytes == card.total_bytes - (200 << 20)


def test_this_release_is_preferred_and_files_of_other_cards_are_not_opened(profiles: Path) -> None:
    for release in (
        "2.11.0",
        "2.11.1",
        "2.11.2",
    ):  # measured on a card that reports 1 GiB less than the data sheet
        kept = replace(PROFILE, total_bytes=139 << 30, torch_version=release)
        save_profile(kept, profile_file("NVIDIA H200", 139 << 30, release))
    (profiles / "nvidia-h200-nvl-140gib-torch-2.11.1.json").write_text("{")
    (profiles / "nvidia-h200-140gib-torch-2.13.0.json").write_text("{")
    for asked, taken in (("2.11.1+cu130", "2.11.1"), ("2.11.7", "2.11.2")):
        found = find_profile(H200, asked)
        assert found is not None
        assert found.torch_version == taken


def test_what_was_asked_for_is_taken(profiles: Path) -> None:
    save_profile(PROFILE, profile_file("NVIDIA H200", 140 << 30, "2.11.0"))
    assert chosen_profile("none", H200, "2.11.0") is None
    assert chosen_profile(PROFILE, H200, "2.13.0") is PROFILE
    auto = chosen_profile("auto", H200, "2.11.0")
    assert auto is not None
    assert chosen_profile(profile_file("NVIDIA H200", 140 << 30, "2.11.0"), H200, "2.13.0") == auto


@pytest.mark.parametrize("card", ["RTX 4090", "H100 SXM", "H200 NVL", "140GiB"])
def test_a_profile_of_another_card_is_refused(tmp_path: Path, card: str) -> None:
    path = tmp_path / "h200.json"
    save_profile(PROFILE, path)
    for profile in (path, PROFILE):
        with pytest.raises(
            UsageError, match=r"measured on another card, NVIDIA H200 \(140.00 GiB\)"
        ) as caught:
            chosen_profile(profile, find_gpu(card), "2.11.0")
        assert "--profile none" in caught.value.hint
    with pytest.raises(UsageError, match=re.escape(f"the profile {path} was")):
        chosen_profile(path, find_gpu(card), "2.11.0")


@pytest.mark.parametrize(
    ("measured", "card", "same_chip"),
    [
        ("RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB", True),
        ("RTX 3080 10GB", "RTX 3080 12GB", False),
        ("RTX 3050 8GB", "RTX 3050 6GB", False),
        ("A100 SXM 40GB", "A100 SXM 80GB", False),
    ],
)
def test_other_memory_beside_the_same_chip_is_a_doubt_beside_another_an_error(
    measured: str, card: str, same_chip: bool
) -> None:
    source, target = find_gpu(measured), find_gpu(card)
    profile = replace(PROFILE, gpu_name=source.vendor_name, total_bytes=source.total_bytes)
    if same_chip:
        assert chosen_profile(profile, target, "2.11.0") is profile
        doubt = profile_doubt(profile, target, "2.11.0")
        assert doubt is not None
        assert "on a card with" in doubt
    else:
        with pytest.raises(UsageError, match="another card"):
            chosen_profile(profile, target, "2.11.0")


def test_another_torch_is_a_doubt() -> None:
    assert profile_doubt(PROFILE, H200, "2.11.3+cpu") is None
    doubt = profile_doubt(PROFILE, H200, "2.13.0+cpu")
    assert doubt is not None
    assert "with torch 2.11.0 (this is 2.13.0)" in doubt


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot make the folder"):
        save_profile(PROFILE, tmp_path / "file" / "more" / "p.json")


def test_folder_is_the_platforms_unless_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VRAMFIT_PROFILE_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert profile_folder() == tmp_path / "vramfit/profiles"
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert profile_folder() == Path.home() / "Library/Application Support/vramfit/profiles"
