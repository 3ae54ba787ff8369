"""What the doctor shows to people and writes for programs."""

import json

import pytest
from tests.doctor.machines import MACHINES, QUIET_BOX, SHARED_BOX

from vramfit.doctor import Facts, diagnose
from vramfit.report import json_text, render, to_json


def test_a_finding_stands_with_its_reason_and_its_fix() -> None:
    lines = render(diagnose(SHARED_BOX), width=100).splitlines()
    assert lines[0].startswith("warning  cards: GPU 0: other processes hold")
    told = [line[:8] for line in lines[1:] if not line.startswith(" " * 8)]
    assert told[:2] == ["  why   ", "  fix   "]
    assert lines[-1].startswith("0 errors, 1 warning; ")


def test_the_bytes_of_the_card_are_listed() -> None:
    text = render(diagnose(QUIET_BOX), width=100)
    assert "GPU 0, NVIDIA GeForce RTX 4090 (cuda:0)" in text
    assert "CUDA context of one process" in text
    assert "400.00 MiB" in text


@pytest.mark.parametrize("facts", MACHINES.values(), ids=MACHINES.keys())
def test_the_document_holds_facts_findings_and_cards(facts: Facts) -> None:
    diagnosis = diagnose(facts)
    document = json.loads(json_text(diagnosis))
    assert document == to_json(diagnosis)
    assert document["schema"] == "vramfit.doctor/1"
    assert document["worst"] == diagnosis.worst.value
    assert sum(document["counts"].values()) == len(document["findings"])
    assert set(document["facts"]) >= {"host", "container", "environ", "driver", "torch"}
