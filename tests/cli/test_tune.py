import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from analysis import fragmentation_cases as cases
from vramfit.cli import app
from vramfit.errors import ConfigError, TraceFormatError, UsageError
from vramfit.report import TUNE_SCHEMA

RECORDINGS = Path(__file__).parents[1] / "data" / "traces"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["tune", *arguments])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_the_line_for_the_shell_and_its_evidence(tmp_path: Path) -> None:
    trace = tmp_path / "trap.vft"
    cases.growing_trap().save(trace)
    text = run(str(trace))
    assert "    unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF\n" in text
    assert "peak reserved 422.00 MiB instead of 13.73 GiB" in text
    assert "reserved memory grows to 14,060 MiB with at most 402 MiB allocated" in " ".join(text.split())
    assert "peak reserved 13.73 GiB, as recorded" in text


def test_columns_are_counted_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = run(str(RECORDINGS / "gpt-small-forward.json.gz"))
    export = "    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert export in text.splitlines()
    assert [line for line in text.splitlines() if len(line) > 40 and line != export] == []


def test_everything_as_json(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    run(str(RECORDINGS / "gpt-small-forward.json.gz"), "--json", str(file))
    value = json.loads(file.read_text())
    assert value["schema"] == TUNE_SCHEMA
    assert value["export"] == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    (device,) = value["devices"]
    assert device["recorded_peak_reserved_bytes"] == device["predicted_peak_reserved_bytes"] == 1_107_296_256
    assert value["best"] in value["trials"]
    assert value["torch_known"] is False
    printed = json.loads(run(str(RECORDINGS / "eor-nn.json.gz"), "--json", "-", "--settings", ""))
    assert len(printed["trials"]) == 1
    assert printed["keep"] is True


def test_settings_that_are_kept(tmp_path: Path) -> None:
    text = run(str(RECORDINGS / "expandable-3gpu-oom.json.gz"))
    assert "✓ keep expandable_segments:True" in text
    assert "The request that failed fails under every setting" in text
    assert "GPU 1: the allocator can have 78.51 GiB" in text


def test_a_number_that_torch_reads_otherwise_is_a_trap() -> None:
    text = run(str(RECORDINGS / "eor-nn.json.gz"), "--settings", "max_split_size_mb:-5")
    traps = " ".join(text.partition("Traps")[2].split())
    assert "! max_split_size_mb:-5: torch reads max_split_size_mb:-5 as 18446744073709551611" in traps


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["missing.pickle"], TraceFormatError, "cannot read missing.pickle"),
        ([str(RECORDINGS / "eor-nn.json.gz"), "--settings", "nonsense:1"], ConfigError, "nonsense"),
        ([str(RECORDINGS / "eor-nn.json.gz"), "--device", "3"], UsageError, "no requests on device 3"),
    ],
)
def test_bad_input(arguments: list[str], error: type[UsageError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        run(*arguments)
    assert caught.value.exit_code == 2
