import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vramfit.cli import app
from vramfit.errors import ConfigError, UsageError, WriteError

EXAMPLE = Path(__file__).parents[2] / "examples" / "workloads" / "small_gpt.py"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["stress", *arguments])


def test_the_example_on_a_virtual_card(tmp_path: Path) -> None:
    out, picture = tmp_path / "stress.json", tmp_path / "stress.svg"
    result = invoke(
        f"{EXAMPLE}:training",
        "--gpu",
        "8GiB",
        "--vary",
        "batch_size=8,12",
        "--rounds",
        "2",
        "--json",
        str(out),
        "--plot",
        str(picture),
    )
    assert result.exit_code == 0, result.output
    assert "✓ fits" in result.output
    value = json.loads(out.read_text())
    (limit,) = value["limits"]
    assert (limit["largest"], limit["reason"]) == (12, "not_reached")
    assert len(value["rounds"]) == 2
    assert picture.read_text().startswith("<svg")


def test_a_workload_that_does_not_fit_ends_with_3() -> None:
    result = invoke(
        f"{EXAMPLE}:inference", "--device", "cpu", "--budget", "24MiB", "--rounds", "0", "--json", "-"
    )
    assert result.exit_code == 3
    value = json.loads(result.stdout)
    assert (value["source"], value["device"], value["total_bytes"]) == ("cpu", "cpu", 24 << 20)
    assert value["fits"] is False
    assert value["baseline"]["outcome"] == "out_of_memory"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["missing.py:x", "--gpu", "8GiB"], UsageError, r"there is no file missing\.py"),
        (["train.py", "--gpu", "8GiB"], UsageError, "names no workload"),
        ([f"{EXAMPLE}:training", "--gpu", "8GiB", "--vary", "batch=x"], UsageError, "cannot be read"),
        ([f"{EXAMPLE}:training", "--device", "cpu"], UsageError, "needs a budget"),
        ([f"{EXAMPLE}:training", "--device", "cpu", "--budget", "much"], UsageError, "--budget"),
        ([f"{EXAMPLE}:training", "--gpu", "8GiB", "--plot", "a.png"], UsageError, r"not an SVG file"),
        ([f"{EXAMPLE}:training", "--gpu", "8GiB", "--alloc-conf", "x:1"], ConfigError, "x"),
        ([f"{EXAMPLE}:training", "--gpu", "8GiB", "--json", "/no/such/folder/a.json"], WriteError, "folder"),
    ],
)
def test_bad_input(arguments: list[str], error: type[Exception], message: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, error)
    assert result.exception.exit_code == 2  # type: ignore[attr-defined]
    with pytest.raises(error, match=message):
        raise result.exception
