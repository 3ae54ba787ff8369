import json
from dataclasses import replace
from xml.etree import ElementTree

from vramfit.report import json_text, render
from vramfit.stress.stability import Limit, LimitReason, Round, RoundOutcome, StressReport, stability
from vramfit.stress.stress_report import STRESS_SCHEMA, render_stress_svg
from vramfit.trace import RunWarning
from vramfit.units import GIB, MIB


def one(size: int, allocated: int, reserved: int, outcome: RoundOutcome = RoundOutcome.FITS) -> Round:
    return Round(
        sizes={"batch_size": size, "length": 128},
        outcome=outcome,
        peak_allocated=allocated * MIB,
        peak_reserved=reserved * MIB,
        allocated=100 * MIB,
        reserved=reserved * MIB,
        message="" if outcome is RoundOutcome.FITS else "OutOfMemoryError: CUDA out of memory.",
    )


def report(reserved: tuple[int, ...] = (1000, 1000, 1000, 1000)) -> StressReport:
    rounds = tuple(found for peak in reserved for found in (one(4, 400, 500), one(16, 900, peak)))
    failed = one(20, 950, 1000, RoundOutcome.OUT_OF_MEMORY)
    limit = Limit(
        name="batch_size",
        usual=8,
        largest=16,
        failing=20,
        reason=LimitReason.OUT_OF_MEMORY,
        rounds=(one(8, 500, 600), one(16, 900, 1000), failed),
    )
    cycle = ({"batch_size": 4, "length": 128}, {"batch_size": 16, "length": 128})
    return StressReport(
        target="loads.py:gpt",
        device="Example <1GB>",
        source="virtual",
        total_bytes=1 * GIB,
        alloc_conf="",
        torch_version="2.13.0",
        sizes={"batch_size": 8, "length": 128},
        baseline=one(8, 500, 600),
        limits=(limit,),
        cycle=cycle,
        rounds=rounds,
        stability=stability(rounds, 2),
        seconds=12.5,
    )


def test_the_terminal_tells_baseline_limit_and_stability() -> None:
    text = render(report(), width=100)
    assert "✓ fits Example <1GB> at batch_size 8, length 128: peak reserved 600.00 MiB of 1.00 GiB" in text
    assert "batch_size      8                 16        20  900.00 MiB  1000.00 MiB" in text
    assert "   2  batch_size 16  ███████████████████████████░░░  900.00 MiB / 1000.00 MiB" in text
    assert "✓ steady over 4 cycles of 2 sizes: 11 % more reserved than allocated at the most" in text
    assert "12 steps on a virtual GPU, torch 2.13.0, in 12.50 s" in text


def test_growth_and_failures_are_told() -> None:
    grown = report((920, 940, 960, 990))
    text = render(grown, width=100)
    assert "! reserved memory grows by 25.00 MiB a cycle for the same sizes: fragmentation" in text
    rounds = (*grown.rounds[:-1], one(16, 900, 1000, RoundOutcome.OUT_OF_MEMORY))
    text = render(replace(grown, rounds=rounds, stability=stability(rounds, 2)), width=120)
    assert "✗ out of memory" in text
    out = "! runs out by fragmentation: 1 of 8 rounds ran out of memory, 1 of them at sizes that fit by themselves"
    assert out in " ".join(text.split())


def test_what_does_not_fit_is_the_headline() -> None:
    failed = replace(
        report(), baseline=one(8, 900, 1000, RoundOutcome.OUT_OF_MEMORY), rounds=(), stability=None
    )
    text = render(failed, width=100)
    assert text.startswith("✗ does not fit Example <1GB> at batch_size 8, length 128\n")
    assert "Rounds" not in text


def test_an_out_of_memory_is_told_whole_without_the_hints_of_torch() -> None:
    message = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 10.00 KiB of "
        "which 10.00 KiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated."
    )
    hints = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    baseline = replace(one(8, 0, 0, RoundOutcome.OUT_OF_MEMORY), message=f"{message}{hints}")
    text = render(replace(report(), baseline=baseline, rounds=(), stability=None), width=80)
    assert f"{message} size usual" in " ".join(text.split())


def test_warnings_of_the_virtual_card_are_told() -> None:
    warnings = tuple(
        RunWarning(code="guess", message=f"value {number} was guessed", location="loads.py:7", count=number)
        for number in range(1, 8)
    )
    text = render(replace(report(), warnings=warnings), width=100)
    assert "! value 1 was guessed (loads.py:7)\n! value 2 was guessed (loads.py:7) ×2\n" in text
    assert "  2 more; --json has them" in text
    value = json.loads(json_text(replace(report(), warnings=warnings)))
    assert value["warnings"][6]["count"] == 7


def test_json_holds_every_step() -> None:
    value = json.loads(json_text(report()))
    assert value["schema"] == STRESS_SCHEMA
    assert value["fits"] is True
    assert [step["outcome"] for step in value["limits"][0]["steps"]] == ["fits", "fits", "out_of_memory"]
    assert value["stability"]["trend"] == "steady"
    assert len(value["rounds"]) == 8
    assert value["rounds"][1]["peak_reserved_bytes"] == 1000 * MIB


def test_the_picture_is_sound_and_has_a_text_alternative() -> None:
    svg = ElementTree.fromstring(render_stress_svg(report()))
    space = {"s": "http://www.w3.org/2000/svg"}
    assert svg.find("s:title", space).text == "loads.py:gpt on Example <1GB>"  # type: ignore[union-attr]
    assert svg.find("s:desc", space).text == "batch_size fits up to 16; over 8 rounds steady"  # type: ignore[union-attr]
    bars = svg.findall("s:g", space)
    assert len(bars) == 8
    reserved, allocated = bars[1].findall("s:rect", space)
    heights = float(reserved.get("height", 0)), float(allocated.get("height", 0))
    assert abs(heights[1] / heights[0] - 0.9) < 0.01
    assert svg.findall("s:line[@class='card']", space)
    assert "round 2: batch_size 16" in "".join(bars[1].itertext())
