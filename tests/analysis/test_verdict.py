from dataclasses import replace

import pytest

from analysis.synthetic import (
    TORCH_LINEAR,
    TRAIN,
    Recorder,
    fitting_run,
    no_room_run,
    oom_run,
    outcome,
    virtual_run,
)
from vramfit.analysis import Outcome, verdict
from vramfit.gpus import GpuKind, GpuSpec, find_gpu
from vramfit.report import render, to_json
from vramfit.trace import Category, Frame, OomReport, Run, SecondRun, Source
from vramfit.units import GIB, MIB

OPTIMIZER = Frame("/venv/lib/python3.11/site-packages/torch/optim/adamw.py", 120, "_init_group")


def card(name: str, size: int, kind: GpuKind = GpuKind.DESKTOP) -> GpuSpec:
    return GpuSpec(
        name=name,
        vendor_name=name,
        kind=kind,
        architecture="Ada Lovelace",
        compute_capability=(8, 9),
        total_bytes=size,
        sm_count=1,
        l2_bytes=1,
        bandwidth=1.0,
        memory_bus_bits=1,
        boost_clock=1.0,
        peak_flops={},
        context_bytes=0,
        link="",
        host_link=1.0,
        source="",
    )


CARDS = (card("large", 80 * GIB), card("small", 12 * GIB), card("tiny", 4 * GIB))


def ran_out(
    holding: dict[Category, int],
    request: int,
    *,
    total: int = 8 * GIB,
    phase: str = "step 0/forward",
    stack: tuple[Frame, ...] = (),
    alloc_conf: str = "",
) -> Run:
    """A run that held so much of each category when a request failed."""
    recorder = Recorder(total_bytes=total, context_bytes=0)
    recorder.builder.meta["alloc_conf"] = alloc_conf
    recorder.phase(phase)
    for category, size in holding.items():
        recorder.alloc("", size, category)
    recorder.oom(request)
    trace = recorder.finish()
    found = outcome(trace, total=total, context=0)
    report = OomReport(
        device=0,
        requested_bytes=request,
        stack=stack,
        user_line=Frame(TRAIN, 1, "main"),
        op="aten.mm.default",
        message="CUDA out of memory.",
        allocated_bytes=found.peak_allocated_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        free_bytes=total - found.peak_reserved_bytes,
        total_bytes=total,
        handled=False,
    )
    return virtual_run(trace, devices=(found,), oom=report, exit_code=1)


def whole(holding: dict[Category, int], request: int) -> Run:
    """A run that ran out, and a second one in which the request was served."""
    recorder = Recorder(total_bytes=80 * GIB, context_bytes=0)
    for category, size in (*holding.items(), (Category.OTHER, request)):
        recorder.alloc("", size, category)
    trace = recorder.finish()
    second = virtual_run(trace, devices=(outcome(trace, total=8 * GIB, context=0),))
    return replace(ran_out(holding, request), again=SecondRun(run=second))


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("handled", [True, False])
def test_a_card_smaller_than_the_context_holds_nothing(asked: bool, handled: bool) -> None:
    found = verdict(no_room_run(asked=asked, handled=handled), cards=CARDS)
    assert found.fits is False
    assert not found.device.has_room
    assert found.why == ("the CUDA context (400.00 MiB) alone is more than 100.00 MiB",)
    assert found.advice == ()
    assert found.needed == 400 * MIB + (MIB if asked and not handled else 0)
    assert found.smallest_gpu is (None if asked and not handled else CARDS[2])
    failed = replace(no_room_run(asked=False), exit_code=1)
    assert verdict(failed).outcome is Outcome.FAILED


def test_a_run_that_fits_says_with_how_much_to_spare() -> None:
    run = fitting_run()
    found = verdict(run, cards=CARDS)
    assert found.fits is True
    assert found.outcome is Outcome.FITS
    device = found.device
    assert device.used == device.peak_reserved + device.context
    assert device.headroom == device.total - device.used
    assert device.breakdown.allocated == device.peak_allocated
    assert found.smallest_gpu is not None
    assert found.smallest_gpu.name == "small"
    assert found.why == found.advice == ()


def test_laptops_and_boards_are_not_offered() -> None:
    cards = (*CARDS, card("board", 10 * GIB, GpuKind.EMBEDDED), card("laptop", 10 * GIB, GpuKind.LAPTOP))
    found = verdict(fitting_run(), cards=cards)
    assert found.smallest_gpu is not None
    assert found.smallest_gpu.name == "small"
    assert verdict(fitting_run(), cards=()).smallest_gpu is None


def test_a_run_that_ran_out_is_described_at_that_moment() -> None:
    run = oom_run()
    found = verdict(run, cards=CARDS)
    assert found.fits is False
    assert found.line == Frame(TRAIN, 35, "main")
    assert found.moment is not None
    assert found.moment.row == len(run.trace) - 1
    assert found.device.breakdown.moment == found.moment
    assert found.device.breakdown.categories[Category.GRADIENTS] == 0


def test_a_caught_error_in_a_program_that_went_on_still_fits() -> None:
    found = verdict(oom_run(handled=True, exit_code=0), cards=CARDS)
    assert found.fits is True
    assert found.oom is not None
    assert found.moment is None
    assert found.device.breakdown.allocated == found.device.peak_allocated


def test_a_caught_error_in_a_program_that_gave_up_does_not_fit() -> None:
    assert verdict(oom_run(handled=True, exit_code=4), cards=CARDS).fits is False


def test_another_failure_leaves_the_question_open() -> None:
    run = replace(fitting_run(), exit_code=1, error="ValueError: bad")
    found = verdict(run, cards=CARDS)
    assert found.fits is None
    assert found.outcome is Outcome.FAILED


def test_the_shortage_counts_what_is_free() -> None:
    found = verdict(ran_out({Category.ACTIVATIONS: 7 * GIB}, 2 * GIB), cards=CARDS)
    assert found.short_by == GIB
    assert found.needed == 9 * GIB
    assert found.smallest_gpu is None, "nobody knows what it needs in all"


def test_only_a_larger_card_than_the_one_that_ran_out_is_offered() -> None:
    cards = (card("same class", 8 * GIB + 300 * MIB), card("larger", 10 * GIB))
    run = whole({Category.ACTIVATIONS: 7 * GIB}, GIB + MIB)
    found = verdict(run, cards=cards)
    assert found.smallest_gpu is not None
    assert found.smallest_gpu.name == "larger"
    assert verdict(run, cards=cards[:1]).smallest_gpu is None


def test_a_trifle_in_gaps_is_no_reason() -> None:
    # The last segment of 20 MiB holds 1 MiB: 19 MiB lie in its gap, and 1 MiB was asked for.
    held = {Category.ACTIVATIONS: 8 * GIB - 20 * MIB, Category.INPUTS: MIB}
    found = verdict(ran_out(held, MIB), cards=CARDS)
    assert found.device.breakdown.fragmentation.inactive_split == 19 * MIB
    assert not any("gaps" in reason for reason in found.why)


def test_model_and_optimizer_that_exceed_the_card_are_named() -> None:
    state = {
        Category.PARAMETERS: 2 * GIB,
        Category.GRADIENTS: 2 * GIB,
        Category.OPTIMIZER_STATE: 7 * GIB // 2,
    }
    run = ran_out(state, GIB, phase="step 0/step", stack=(TORCH_LINEAR, OPTIMIZER))
    found = verdict(run, cards=CARDS)
    assert found.why == (
        "parameters 2.00 GiB + gradients 2.00 GiB + optimizer state 3.50 GiB leave no room for 1.00 GiB more "
        "in the usable 8.00 GiB, whatever the batch size",
        "the optimizer was still at its step",
    )
    assert found.advice == (), "nothing was tried"
    assert not found.any_batch


def test_activations_that_fill_the_card_are_named() -> None:
    held = {Category.PARAMETERS: GIB, Category.GRADIENTS: GIB, Category.ACTIVATIONS: 5 * GIB}
    found = verdict(ran_out(held, 2 * GIB), cards=CARDS)
    assert found.why[0].startswith("held at that moment: activations 5.00 GiB, ")
    assert found.advice == (), "nothing was tried"


def test_gradients_still_to_come_are_foretold() -> None:
    held = {Category.PARAMETERS: 3 * GIB, Category.ACTIVATIONS: 9 * GIB // 2}
    found = verdict(ran_out(held, GIB), cards=CARDS)
    assert "gradients (up to 3.00 GiB more) were still to come, if it trains" in found.why


def test_one_request_larger_than_the_card_is_called_so() -> None:
    found = verdict(ran_out({Category.INPUTS: MIB}, 9 * GIB), cards=CARDS)
    assert found.why[0] == "this one request is larger than the 8.00 GiB that the card offers"


def scattered(*, total: int, requests: int, alloc_conf: str = "", more: int = 0) -> Recorder:
    """Twelve blocks of 5 MiB in three segments; a gap of 10 MiB in each of two, and then requests of 20 MiB."""
    recorder = Recorder(total_bytes=total, context_bytes=0)
    recorder.builder.meta["alloc_conf"] = alloc_conf
    blocks = [recorder.alloc("", 5 * MIB, Category.OTHER) for _ in range(12)]
    for block in blocks[2:6]:
        recorder.free(block)
    for _ in range(requests):
        recorder.alloc("", 20 * MIB, Category.OTHER)
    if more:
        recorder.alloc("", more, Category.OTHER)
    return recorder


def fragmented(*, alloc_conf: str = "", more: int = 0, again: bool = True) -> Run:
    """A run on 60 MiB that runs out for its gaps, and the whole program on a card without a limit."""
    recorder = scattered(total=60 * MIB, requests=0, alloc_conf=alloc_conf)
    recorder.oom(20 * MIB)
    trace = recorder.finish()
    found = outcome(trace, total=60 * MIB, context=0)
    report = OomReport(
        device=0,
        requested_bytes=20 * MIB,
        stack=(),
        user_line=None,
        op="",
        message="",
        allocated_bytes=40 * MIB,
        reserved_bytes=60 * MIB,
        free_bytes=0,
        total_bytes=60 * MIB,
        handled=False,
    )
    run = virtual_run(trace, devices=(found,), oom=report, exit_code=1)
    if not again:
        return run
    served = scattered(total=GIB, requests=1, alloc_conf=alloc_conf, more=more).finish()
    second = virtual_run(served, devices=(outcome(served, total=60 * MIB, context=0),))
    return replace(run, again=SecondRun(run=second))


def test_a_setting_is_named_where_the_whole_program_fits_with_it() -> None:
    judged = verdict(fragmented(), cards=CARDS)
    assert any("20.00 MiB are reserved but lie in gaps" in reason for reason in judged.why)
    assert judged.advice == (
        "--alloc-conf expandable_segments:True: replayed with it, the whole program fits (60.00 MiB of the usable "
        "60.00 MiB reserved)",
    )


@pytest.mark.parametrize(
    "run",
    [
        fragmented(alloc_conf="expandable_segments: True"),
        fragmented(more=40 * MIB),
        fragmented(again=False),
    ],
    ids=["it is set", "the program runs out later", "only the beginning is known"],
)
def test_no_setting_is_named_that_does_not_serve_the_whole_program(run: Run) -> None:
    assert verdict(run, cards=CARDS).advice == ()


def test_the_fullest_card_decides() -> None:
    recorder = Recorder(devices=2)
    recorder.alloc("", GIB, Category.OTHER, device=0)
    recorder.alloc("", 2 * GIB, Category.OTHER, device=1)
    trace = recorder.finish()
    run = virtual_run(trace, devices=(outcome(trace, device=0), outcome(trace, device=1)))
    found = verdict(run, cards=CARDS)
    assert found.device.index == 1
    assert [device.breakdown.allocated for device in found.devices] == [GIB, 2 * GIB]


def test_the_card_that_ran_out_decides() -> None:
    recorder = Recorder(devices=2)
    recorder.alloc("", GIB, Category.OTHER, device=0)
    recorder.alloc("", 2 * GIB, Category.OTHER, device=1)
    recorder.oom(30 * GIB, device=0)
    trace = recorder.finish()
    known = oom_run().oom
    assert known is not None
    run = virtual_run(
        trace,
        devices=(outcome(trace, device=0), outcome(trace, device=1)),
        oom=replace(known, device=0, requested_bytes=30 * GIB),
        exit_code=1,
    )
    assert verdict(run, cards=CARDS).device.index == 0


def used_up(name: str, total: int, left: int) -> Run:
    """A run that left so many bytes of a card."""
    trace = Recorder().finish()
    device = outcome(trace, total=total, context=0, gpu=name)
    taken = replace(device, peak_reserved_bytes=total - left, peak_allocated_bytes=total - left)
    return virtual_run(trace, devices=(taken,))


def test_a_verdict_within_what_drivers_differ_by_is_close() -> None:
    spec = find_gpu("RTX 3060")
    run = used_up(spec.name, spec.total_bytes, 100 * MIB)
    assert verdict(run).close
    assert "This is close" in render(run, verdict(run))
    assert to_json(run, verdict(run))["close"] is True
    assert not verdict(used_up(spec.name, spec.total_bytes, 200 * MIB)).close
    assert not verdict(used_up("8 GiB", 8 * GIB, 100 * MIB)).close, "a size that was chosen is that size"
    assert not verdict(replace(run, source=Source.CARD)).close, "a card that was recorded told its size"


def test_a_request_that_failed_by_little_is_close() -> None:
    spec = find_gpu("RTX 3060")
    for more, close in ((50 * MIB, True), (500 * MIB, False)):
        run = ran_out({Category.PARAMETERS: spec.total_bytes - GIB}, GIB + more, total=spec.total_bytes)
        assert verdict(replace(run, devices=(replace(run.devices[0], gpu=spec.name),))).close is close


def test_growth_is_in_the_verdict_with_the_step_at_which_memory_runs_out() -> None:
    recorder = Recorder(total_bytes=2 * GIB, context_bytes=0)
    for step in range(6):
        recorder.phase(f"step {step}/forward")
        recorder.alloc("", 64 * MIB, Category.OTHER)
    trace = recorder.finish()
    run = virtual_run(trace, devices=(outcome(trace, total=GIB, context=0),))
    judged = verdict(run)
    assert judged.grows_by == 64 * MIB
    assert judged.runs_out_at == 16, "steps 0 to 15 fill the GiB"
    assert "Every step leaves 64.00 MiB more, probably a leak: memory runs out about step 16." in " ".join(
        render(run, judged).split()
    )
    assert to_json(run, judged)["growth"]["runs_out_at_iteration"] == 16
