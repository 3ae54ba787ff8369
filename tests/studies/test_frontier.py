"""The frontier of a small GPT-2: three budgets, all ways measured alike, results kept and judged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import frontier
import pytest
import torch
from frontier_parts import measuring, plans
from frontier_parts.peers import Peer
from frontier_parts.rows import Found, Kept, Row, budgeted, settings
from frontier_parts.subjects import MIB, Subject, subjects
from frontier_parts.table import Verdict, judge, page
from tests.virtual.conftest import fit_interpreter
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["fit_interpreter"]


@pytest.fixture
def sample(fit_interpreter: None) -> Subject:
    found = subjects()["sample"]
    found.workload.model()  # what it is copied from is there before anything is counted
    return found


def test_arithmetic_on_fake_tensors_is_that_of_a_run(sample: Subject) -> None:
    chunks = next(iter(sample.chunked))
    for peer in (
        Peer(kind="eager"),
        Peer(kind="uniform", every=1),
        Peer(kind="selective", every=1, policy="every second matmul and attention"),
        Peer(kind="uniform", every=2, chunks=chunks),
    ):
        workload = peer.applied(sample)
        fake, real = measuring.arithmetic(workload), measuring.arithmetic(workload, fake=False)
        assert (fake.flops, fake.attention_flops) == (real.flops, real.attention_flops)
        # Without values nobody knows that nothing is masked: transformers makes masks then.
        assert real.seconds < fake.seconds < 1.1 * real.seconds


def test_a_model_without_values_is_made_of_any_kind_of_weights() -> None:
    with measuring.fake_tensors():
        weight = torch.nn.init.trunc_normal_(torch.empty(3, 4), std=0.02)
        assert type(weight) is FakeTensor
        assert weight.shape == (3, 4)


def test_a_step_computes_what_its_layers_say(sample: Subject) -> None:
    tokens, width, words, blocks = 2 * 128, 128, 2048, 2
    forward = 2 * tokens * width * (blocks * 12 * width + words)
    found = measuring.arithmetic(sample.workload)
    assert found.flops == 3 * forward
    scores = 2 * 2 * tokens * 128 * width  # two products, of queries with keys and of weights with values
    assert found.attention_flops == blocks * (scores + scores * 5 // 2)
    for chunked in ("torch's chunks", "recomputed chunks"):
        other = measuring.arithmetic(Peer(kind="eager", chunks=chunked).applied(sample))
        again = 0 if chunked == "torch's chunks" else 2 * tokens * width * words // 8 * 8
        assert found.flops <= other.flops <= found.flops + again


def test_the_peak_is_what_lies_above_parameters_and_gradients(sample: Subject) -> None:
    plain = measuring.measure(sample.workload)
    logits = 4 * 2 * 128 * 2048
    assert 3 * logits < plain.peak_bytes < plans.fixed_bytes(sample) + 12 * logits
    whole = measuring.measure(Peer(kind="uniform", every=1).applied(sample))
    assert whole.peak_bytes < plain.peak_bytes
    assert whole.arithmetic.flops > plain.arithmetic.flops


def worked_out(folder: Path, *rows: Row) -> list[dict[str, Any]]:
    """What is found of rows of the sample, each in a process of its own."""
    found = frontier.worked_out(subjects()["sample"], rows, 500.0, folder / "log")
    return [value for _, value in found]


@pytest.mark.slow
def test_the_compiler_is_counted_while_it_stays_compiled(sample: Subject, tmp_path: Path) -> None:
    eager = measuring.arithmetic(sample.workload)
    loose, tight = worked_out(tmp_path, *(Row(peer=Peer(kind="compiler", ratio=r)) for r in (1.0, 0.0)))
    assert (loose["flops"], loose["attention_flops"]) == (eager.flops, eager.attention_flops)
    assert tight["flops"] > eager.flops


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*PuLP 4.0:DeprecationWarning"
)  # torch calls what pulp is about to give up
def test_auto_sac_is_asked_where_it_is_installed(sample: Subject) -> None:
    pytest.importorskip("pulp")
    pytest.importorskip("pwlf")
    from frontier_parts import auto_sac

    with pytest.raises(auto_sac.Infeasible):
        auto_sac.solve(sample.workload, 1 * MIB)
    solved = auto_sac.solve(sample.workload, 12 * MIB)
    assert solved.policies
    plain, found = (measuring.measure(w) for w in (sample.workload, solved.applied(sample.workload)))
    assert found.peak_bytes < plain.peak_bytes
    assert found.arithmetic.flops >= plain.arithmetic.flops


# -- rows and verdicts -----------------------------------------------------------------------------------------------


def found(row: Row, **value: Any) -> Found:
    value = {"attention_flops": 0, "solve_seconds": 1.0, "seconds": 9.0, "pointwise_seconds": 0.0, **value}
    return Found(subject="sample", row=row, value=value)


PLAIN = found(Row(peer=Peer(kind="eager")), peak_bytes=100 * MIB, flops=1000, seconds=8.0)
WHOLE = found(Row(peer=Peer(kind="uniform", every=1)), peak_bytes=40 * MIB, flops=1200)
HALF = found(Row(peer=Peer(kind="uniform", every=2)), peak_bytes=70 * MIB, flops=1100, seconds=10.0)


def planned(budget: int, **value: Any) -> Found:
    value = {"search_seconds": 2.0, "runs": 3, "words": ["activation-checkpointing"], **value}
    return found(Row(budget=budget * MIB), **value)


def test_a_plan_is_judged_by_the_best_peer_within_its_budget() -> None:
    rows = [
        PLAIN,
        WHOLE,
        HALF,
        planned(80, peak_bytes=75 * MIB, flops=1050, seconds=8.5),
        planned(90, peak_bytes=75 * MIB, flops=1100, seconds=9.005),
        planned(60, peak_bytes=60 * MIB, flops=1100, seconds=9.5),
        planned(45, peak_bytes=46 * MIB, flops=1000),
        planned(30, peak_bytes=30 * MIB, flops=1300),
        planned(50, peak_bytes=55 * MIB, flops=1300, fits=False),
        planned(20, peak_bytes=55 * MIB, flops=1300, fits=False),
        planned(70, failed="its process ended"),
    ]
    judged = judge(subjects()["sample"], rows)
    verdicts = {
        one.plan.row.budget // MIB: one.verdict
        for one in judged.comparisons
        if one.plan.row.budget is not None
    }
    assert verdicts == {
        20: Verdict.NOBODY,
        30: Verdict.ALONE,
        45: Verdict.ABOVE,
        50: Verdict.NONE,
        60: Verdict.SLOWER,
        70: Verdict.NONE,
        80: Verdict.QUICKER,
        90: Verdict.SAME,
    }
    assert judged.falls_short
    text = page(Path("frontier.md"), [judged])
    told = (
        "| 80.0 | 75.0 | +6.2 % | +5.0 % | all blocks | 40.0 | +12.5 % | +20.0 % | quicker |  | 1.0 | 2 | 3 |"
    )
    assert told in text
    assert "8 budgets: 1 quicker, 1 as quick, 1 SLOWER" in text
    assert not judge(subjects()["sample"], rows[:5]).falls_short


@pytest.mark.parametrize(("pointwise", "could"), [(0.0, False), (0.4, False), (0.6, True)])
def test_a_compiler_is_told_beside_the_verdict(pointwise: float, could: bool) -> None:
    """As little as a compiler could take, were all pointwise operations done along with others."""
    compiler = found(
        Row(peer=Peer(kind="compiler", ratio=0.5)),
        peak_bytes=60 * MIB,
        flops=1010,
        pointwise_seconds=pointwise,
    )
    rows = [PLAIN, HALF, compiler, planned(75, peak_bytes=75 * MIB, flops=1020, seconds=8.5)]
    judged = judge(subjects()["sample"], rows)
    (compared,) = judged.comparisons
    assert (compared.peer, compared.compiler, compared.verdict) == (HALF, compiler, Verdict.QUICKER)
    assert compared.compiler_could_be_quicker is could
    assert ("would be quicker at 1." in page(Path("frontier.md"), [judged])) is could


def test_rows_are_kept_and_told_apart(tmp_path: Path) -> None:
    subject = subjects()["sample"]
    rows = [*settings(subject), *budgeted(subject, 100 * MIB)]
    assert len({row.key for row in rows}) == len(rows)
    assert [Row.of(row.key) for row in rows] == rows
    assert rows[0] == Row(peer=Peer(kind="eager"))
    kept = Kept(tmp_path / "some" / "rows.jsonl")
    for number, row in enumerate(rows):
        kept.add("sample", row, {"peak_bytes": number, "flops": 1})
    with kept.path.open("a", encoding="utf-8") as file:
        file.write('{"subject": "sample", "row')
    again = Kept(kept.path)
    assert [again.get("sample", row) for row in rows] == [kept.get("sample", row) for row in rows]
    assert again.get("gpt2", rows[0]) is None


def test_budgets_wait_for_the_plain_program(tmp_path: Path) -> None:
    subject = subjects()["gpt2"]
    kept = Kept(tmp_path / "rows.jsonl")
    assert len(list(frontier.rows_of(subject, kept, []))) == 1
    kept.add("gpt2", PLAIN.row, {"failed": "no memory"})
    assert len(list(frontier.rows_of(subject, kept, []))) == 1
    kept.add("gpt2", PLAIN.row, {"peak_bytes": 1600 * MIB, "flops": 1})
    rows = list(frontier.rows_of(subject, kept, ["plan"]))
    assert [row.budget for row in rows[2:]] == [size * MIB for size in range(480, 1601, 160)]


def test_a_row_that_fails_is_told_and_the_next_is_worked_out(tmp_path: Path) -> None:
    wrong = replace(Row(), budget=-1, peer=Peer(kind="uniform", every=1, policy="nonesuch"))
    first, second = worked_out(tmp_path, wrong, PLAIN.row)
    assert first == {"failed": "KeyError: 'nonesuch'"}
    assert json.dumps(second["flops"]).isdigit()


def test_rows_are_worked_out_once_judged_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Row] = []

    def pretended(_subject: Subject, rows: Iterable[Row], *_: object) -> Iterator[tuple[Row, dict[str, Any]]]:
        for row in rows:
            asked.append(row)
            if row.budget is not None:
                yield row, planned(1, peak_bytes=row.budget - 1, flops=1000).value
            else:
                yield row, (PLAIN if row.peer == PLAIN.row.peer else WHOLE).value

    monkeypatch.setattr(frontier, "worked_out", pretended)
    results, written = tmp_path / "rows.jsonl", tmp_path / "frontier.md"
    command = ["--only", "sample", "--kinds", "eager", "uniform", "selective", "plan"]
    command += ["--results", str(results), "--write", str(written)]
    assert frontier.main(command) == 0
    judged = judge(subjects()["sample"], Kept(results).of("sample"))
    assert [one.verdict for one in judged.comparisons] == [Verdict.SAME] * 3
    assert not judged.failed
    assert "| all blocks |" in written.read_text(encoding="utf-8")
    assert "all blocks: " in written.with_suffix(".svg").read_text(encoding="utf-8")
    kept, count = results.read_text(encoding="utf-8"), len(asked)
    assert len(set(asked)) == count
    assert frontier.main(command) == 0
    assert (results.read_text(encoding="utf-8"), len(asked)) == (kept, count)
