from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from vramfit.cli import main

RECORDINGS = Path(__file__).parents[1] / "data" / "traces"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["replay", *arguments])
    return int(caught.value.code or 0)


def test_json_has_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert run(str(RECORDINGS / "eor-nn.json.gz"), "--json", str(path)) == 0
    found = json.loads(path.read_text())
    assert (found["schema"], found["exact"]) == ("vramfit.replay/1", True)
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    told = text.partition("## `vramfit replay --json`")[2].partition("\n## ")[0]
    keys = {*found, *found["devices"][0], *found["devices"][0]["recorded"]}
    assert {key for key in keys if f"`{key}`" not in told and f"`{key}[]`" not in told} == set()
    (device,) = found["devices"]
    assert device["allocations"] == device["addresses_matched"] == 1935
    assert device["segments"] == device["segments_matched"] == 7
    peaks = {"peak_allocated_bytes": 110110720, "peak_reserved_bytes": 134217728}
    assert device["recorded"] == device["replayed"] == peaks


def test_json_to_standard_output_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(RECORDINGS / "select-n-a.json.gz"), "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["allocations"] == 1497


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(RECORDINGS / "expandable-3gpu-oom.json.gz")) == 0
    text = capsys.readouterr().out
    assert "GPU 2" in text
    assert "requests out of memory" in text
    assert "78.42 GiB" in text


def test_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(RECORDINGS / "gpt-2.7b-ctx256-train.json.gz")
    assert run(file, "--alloc-conf", "expandable_segments:True") == 0
    text = capsys.readouterr().out
    assert "what if" in text
    assert "peak reserved would be 4.12 GiB less" in text


def test_a_number_that_torch_reads_otherwise_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(RECORDINGS / "eor-nn.json.gz"), "--alloc-conf", "max_split_size_mb:-5") == 0
    assert "note: torch reads max_split_size_mb:-5 as 18446744073709551611" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing.pickle"], "no such file"),
        ([str(RECORDINGS)], "is a folder"),
        ([str(RECORDINGS / "README.md")], "no known kind of recording"),
        ([str(RECORDINGS / "eor-nn.json.gz"), "--alloc-conf", "nonsense:1"], "nonsense"),
        ([str(RECORDINGS / "eor-nn.json.gz"), "--json", "/no/such/folder/out.json"], "cannot write"),
    ],
)
def test_bad_input(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "next:" in error


@pytest.mark.parametrize("action", ["free_requested", "free_completed"])
def test_frees_of_unknown_blocks_are_told(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"action": action, "addr": 1 << 30, "size": 1024, "stream": 0, "time_us": 1, "frames": []}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[event]]}))
    assert run(str(path)) == 0
    text = capsys.readouterr().out
    assert "GPU 0: 1 free of unknown blocks" in text
    assert "recorded " not in text, "no table without a row"
