"""`vramfit gpus`: the table, one card, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vramfit.cli.gpus import gpus_command
from vramfit.errors import UnknownGpuError
from vramfit.gpus import catalogue

app = typer.Typer()
app.command()(gpus_command)


def output(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": None})
    assert result.exit_code == 0
    return result.stdout


def test_the_table_has_every_card_within_100_columns() -> None:
    lines = output().splitlines()
    assert max(len(line) for line in lines) <= 100
    for card in catalogue():
        assert any(line.startswith(card.name) for line in lines), card.name
    row = next(line for line in lines if line.startswith("RTX 4090 "))
    assert row.split() == [
        "RTX", "4090", "Ada", "8.9", "23.64", "GiB", "128", "72", "MiB", "1008", "82.6", "165", "$1,599",
    ]  # fmt: skip
    assert "…" not in "".join(lines)


def test_a_narrow_terminal_gets_every_figure() -> None:
    result = CliRunner().invoke(app, [], catch_exceptions=False, env={"COLUMNS": "40"})
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= 40
    told = " ".join(" ".join(lines[lines.index("RTX 4090") :]).split())
    assert told.startswith(
        "RTX 4090 Architecture Ada, CC 8.9, Memory 23.64 GiB, SMs 128, L2 72 MiB, GB/s 1008,"
    )


def test_an_estimated_memory_is_marked() -> None:
    row = next(line for line in output().splitlines() if line.startswith("RTX 4500 Ada"))
    assert "~23.56 GiB" in row


def test_one_card_shows_its_sources() -> None:
    text = output("RTX 4090")
    assert "25,386,024,960 B" in text
    assert "llama.cpp" in text
    assert "Ada GPU architecture whitepaper" in text
    assert "2022-10-12" in text
    assert "also fits" not in text


def test_a_family_name_says_what_else_it_fits() -> None:
    assert "The name also fits: A100 PCIe 40GB, A100 PCIe 80GB, A100 SXM 80GB." in output("a100")


def test_json_of_all() -> None:
    document = json.loads(output("--json"))
    assert document["schema"] == "vramfit.gpus/1"
    assert [gpu["name"] for gpu in document["gpus"]] == [card.name for card in catalogue()]


def test_json_of_one() -> None:
    document = json.loads(output("h100", "--json"))
    gpu = document["gpu"]
    assert gpu["name"] == "H100 SXM"
    assert gpu["compute_capability"] == "9.0"
    assert gpu["total_bytes"] == 85_017_755_648
    assert gpu["peak_flops"]["bfloat16"] == 989.4e12
    assert gpu["price"]["unit"] == "USD/h"
    assert "H100 NVL" in document["alternatives"]


def test_a_size_works_too() -> None:
    gpu = json.loads(output("24GiB", "--json"))["gpu"]
    assert gpu["total_bytes"] == 24 << 30
    assert gpu["price"] is None


def test_an_unknown_name_is_the_callers_to_report() -> None:
    with pytest.raises(UnknownGpuError, match="Did you mean RTX 4090"):
        CliRunner().invoke(app, ["RTX 4091"], catch_exceptions=False)


def test_the_keys_of_a_card_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    told = text.partition("## `vramfit gpus --json`")[2].partition("\n## ")[0]
    (one, every) = (json.loads(output(*arguments, "--json")) for arguments in (["RTX 4090"], []))
    keys = {*one, *every, *one["gpu"], *one["gpu"]["price"]}
    assert {key for key in keys if f"`{key}`" not in told and f"`{key}[]`" not in told} == set()
