"""Plans as TOML: what is written is read back, and what is not a plan is refused in one line."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from vramfit.errors import UsageError
from vramfit.planner.plan_file import (
    CUMULATIVE_SCHEMA,
    SCHEMA,
    OtherWay,
    PlanFigures,
    PlanStep,
    PlanTarget,
    SolverStats,
    plan_from_toml,
    plan_to_toml,
)
from vramfit.planner.planner_run import verify_in_child
from vramfit.planner.plans import Plan
from vramfit.techniques import Choice, Numerics, find_technique, setting_from_plain

GIB = 1 << 30


def made() -> Plan:
    """A plan with two techniques."""
    checkpointing, precision = find_technique("activation-checkpointing"), find_technique("mixed-precision")
    return Plan(
        entries=(
            PlanStep(
                choice=Choice(
                    technique=precision, setting=setting_from_plain(precision, {"dtype": "bfloat16"})
                ),
                saves_bytes=3 * GIB,
                costs_seconds=-0.25,
            ),
            PlanStep(
                choice=Choice(
                    technique=checkpointing,
                    setting=setting_from_plain(
                        checkpointing,
                        {
                            "mode": "selective",
                            "modules": [f"layers.{n}" for n in range(6)],
                            "save": {f"layers.{n}": ["addmm#0", "addmm#2"] for n in range(6)},
                        },
                    ),
                ),
                saves_bytes=6 * GIB,
                costs_seconds=0.125,
            ),
        ),
        aim=PlanTarget(
            device="RTX 4090",
            budget_bytes=16 * GIB,
            margin_bytes=GIB,
            numerics=Numerics.PRECISION,
            sizes={"batch_size": 8},
            target="work.py:gpt2",
            torch="2.13.0",
        ),
        before=PlanFigures(
            peak_allocated_bytes=20 * GIB,
            peak_reserved_bytes=21 * GIB,
            total_bytes=22 * GIB,
            step_seconds=1.5,
        ),
        after=PlanFigures(
            peak_allocated_bytes=11 * GIB,
            peak_reserved_bytes=12 * GIB,
            total_bytes=13 * GIB,
            step_seconds=1.375,
        ),
        solved=SolverStats(status="optimal", gap=0.0, seconds=0.5, runs=9, search_seconds=12.5),
        notes=("the pins of a window are counted",),
        rejected=(
            OtherWay(
                name="full checkpointing",
                why="slower by 9.1 %",
                numerics=Numerics.BITWISE,
                total_bytes=12 * GIB,
                step_seconds=1.5,
                fits=True,
            ),
        ),
        freedom=(OtherWay(name="autocast", why="precision, and rounding is allowed", predicted=True),),
    )


def test_what_is_written_is_read_back() -> None:
    plan = made()
    text = plan_to_toml(plan)
    tomllib.loads(text)
    assert plan_from_toml(text, Plan) == plan
    assert plan_to_toml(plan_from_toml(text, Plan)) == text


def test_sizes_are_told_in_words_beside_the_bytes() -> None:
    assert "budget_bytes = 17179869184 # 16.00 GiB" in plan_to_toml(made())


def test_a_file_goes_through(tmp_path: Path) -> None:
    made().save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == made()


def test_a_plan_by_hand_needs_no_figures() -> None:
    plan = plan_from_toml(f'schema = "{SCHEMA}"\n[[technique]]\nname = "tf32"\n', Plan)
    assert [choice.name for choice in plan.choices] == ["tf32"]
    assert plan.numerics is Numerics.PRECISION


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "the plan is not valid TOML"),
        ("a = 1", "its schema is None"),
        (f'schema = "{SCHEMA}"\ntechnique = 3', "technique is not a list of tables"),
        (
            f'schema = "{SCHEMA}"\n[[technique]]\nname = "tf-32"',
            "there is no technique 'tf-32'. Did you mean tf32?",
        ),
        (f'schema = "{SCHEMA}"\n[[technique]]\nsaves_bytes = 3', "a technique has no name"),
        (
            f'schema = "{SCHEMA}"\n[[technique]]\nname = "tf32"\nstrength = 3',
            "tf32 has an unknown key 'strength'",
        ),
        (
            f'schema = "{SCHEMA}"\n[[technique]]\nname = "tf32"\nsaves_bytes = "3"',
            "saves_bytes of tf32 is '3'",
        ),
        (
            f'schema = "{SCHEMA}"\n[[technique]]\nname = "mixed-precision"\n[technique.setting]\ndtype = "int4"',
            "dtype of mixed-precision is 'int4'",
        ),
        (f'schema = "{SCHEMA}"\n[aim]\nbudget_bytes = "16GiB"', "budget_bytes of aim is '16GiB'"),
        (
            f'schema = "{SCHEMA}"\n[aim]\nbudget_bytes = -5',
            "budget_bytes of aim is -5. It cannot be negative",
        ),
        (f'schema = "{SCHEMA}"\n[aim]\nsizes = {{ batch_size = 0 }}', "batch_size in sizes of aim is 0"),
        (f'schema = "{SCHEMA}"\n[techniques]\nname = "tf32"', "it has an unknown key 'techniques'"),
        (
            f'schema = "{SCHEMA}"\n[[technique]]\nname = "tf32"\npromise = "bitwise"',
            "the promise of tf32 is 'bitwise', and with this setting it is 'precision'",
        ),
        (
            f'schema = "{SCHEMA}"\n[[technique]]\nname = "tf32"\n[[technique]]\nname = "tf32"',
            "tf32 appears twice",
        ),
        (
            f'schema = "{SCHEMA}"\n[[technique]]\nname = "lean-optimizer"\n[technique.setting]\nlr = nan',
            "lr of lean-optimizer is nan",
        ),
        (f'schema = "{SCHEMA}"\n[aim]\nnumerics = "exact"', "'exact' is not a level of numerics"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan_from_toml(text, Plan)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value).replace(". ", "")


@pytest.mark.parametrize("name", ["bert_large", "gpt2_xl", "llama_7b", "unet_3d"])
def test_a_plan_that_was_cut_off_between_techniques_is_refused(name: str) -> None:
    text = (Path(__file__).parents[2] / "examples" / "plans" / f"{name}.toml").read_text(encoding="utf-8")
    plan = plan_from_toml(text, Plan)
    _, *heads = (place.start() for place in re.finditer(r"^\[\[technique\]\]", text, re.MULTILINE))
    assert len(heads) == len(plan.entries) - 1 > 0
    for end in heads:
        with pytest.raises(UsageError, match="techniques are not all there"):
            plan_from_toml(text[:end], Plan)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_plan_with_a_count_that_was_cut_off_is_refused(kept: int) -> None:
    text = plan_to_toml(made())
    heads = [place.start() for place in re.finditer(r"^\[\[technique\]\]", text, re.MULTILINE)]
    with pytest.raises(
        UsageError, match=f"techniques are not all there: technique_count is 2, and it lists {kept}"
    ):
        plan_from_toml(text[: heads[kept]], Plan)


def test_a_person_may_take_a_technique_out() -> None:
    plan = made()
    text = plan_to_toml(plan).replace("technique_count = 2\n", "")
    second, rest = text.rindex("[[technique]]"), text.index("[[rejected]]")
    found = plan_from_toml(text[:second] + text[rest:], Plan)
    assert found == dataclasses.replace(plan, entries=plan.entries[:1])


def test_figures_of_files_in_which_they_add_up_are_left_out() -> None:
    plan = made()
    old = plan_to_toml(plan).replace(SCHEMA, CUMULATIVE_SCHEMA)
    found = plan_from_toml(old, Plan)
    assert found.choices == plan.choices
    assert [(entry.saves_bytes, entry.costs_seconds) for entry in found.entries] == [(None, None)] * 2


def test_a_technique_that_was_not_run_alone_has_no_figures() -> None:
    plan = made()
    plain = dataclasses.replace(plan, entries=tuple(PlanStep(choice=choice) for choice in plan.choices))
    text = plan_to_toml(plain)
    assert "saves_bytes" not in text
    assert plan_from_toml(text, Plan) == plain


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no plan"):
        Plan.load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        Plan.load(tmp_path)


def test_a_plan_finds_its_workload_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "work").mkdir(parents=True)
    there.mkdir()
    (here / "work" / "load.py").write_text("")
    monkeypatch.chdir(here)
    plan = made()
    plan = dataclasses.replace(plan, aim=dataclasses.replace(plan.aim, target="work/load.py:gpt2"))
    plan.save("plans.toml")
    plan.save("work/plan.toml")
    assert 'target = "load.py:gpt2"' in (here / "work" / "plan.toml").read_text()
    assert Plan.load("work/plan.toml") == plan
    monkeypatch.chdir(there)
    found = Plan.load("../here/work/plan.toml").aim.target
    assert Path(found.removesuffix(":gpt2")).samefile(here / "work" / "load.py")
    (here / "work").rename(there / "moved")
    assert Plan.load("moved/plan.toml").aim.target == "moved/load.py:gpt2"
    # One that is neither beside the plan nor here is named as the plan has it.
    assert Plan.load(here / "plans.toml").aim.target == "work/load.py:gpt2"
    with pytest.raises(UsageError, match="no such file beside it or here"):
        verify_in_child(here / "plans.toml")
