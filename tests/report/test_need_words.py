"""What is said of a program's need, and of the error bar of a peak: one bar, with its cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.synthetic import fitting_run, needing, oom_run
from vramfit.analysis import Verdict, verdict
from vramfit.gpus import find_gpu
from vramfit.report.need_words import bar_words, need_words
from vramfit.trace import ReservedBar, Run, Source
from vramfit.units import GIB, MIB

CAUSE = "cuDNN chooses the workspaces of convolutions"


def judged(run: Run, *, above: int = 0, below: int = 0) -> Verdict:
    """The verdict, with an error bar."""
    found = verdict(run)
    bar = ReservedBar(above=above, below=below)
    devices = tuple(replace(device, reserved_bar=bar) for device in found.devices)
    return replace(found, devices=devices, bar_cause=CAUSE)


def test_a_need_has_a_card() -> None:
    run = needing()
    assert need_words(run, verdict(run)) == (
        "It needs 20.39 GiB in all. The smallest card that has it is L4 (21.99 GiB)."
    )


def test_the_upper_end_chooses_the_card() -> None:
    run = needing()
    found = judged(run)
    assert found.need is not None
    wide = replace(found, need=replace(found.need, above=9 * GIB), smallest_gpu=find_gpu("RTX 5090"))
    assert need_words(run, wide).startswith(
        f"It needs 20.39 GiB in all, or up to 29.39 GiB, since {CAUSE}. The smallest card that has it is RTX 5090"
    )


def test_a_card_with_a_smaller_context_may_have_less_memory() -> None:
    run = needing()
    found = verdict(run)
    assert found.need is not None and found.smallest_gpu is not None
    near = replace(found, need=replace(found.need, bytes=found.smallest_gpu.total_bytes + MIB))
    assert "with a smaller CUDA context)" in need_words(run, near)


def test_a_metered_program_is_told_of_a_larger_budget() -> None:
    run = replace(oom_run(), source=Source.CPU)
    assert (
        need_words(run, verdict(run)) == "It needs at least 8.10 GiB. A larger budget shows how much in all."
    )


def test_nothing_is_said_where_nobody_tried() -> None:
    run = oom_run()
    assert need_words(run, verdict(run)) == "It needs at least 8.10 GiB."


@pytest.mark.parametrize(
    ("above", "below", "told"),
    [
        (0, 0, ""),
        (64 * MIB, 0, f"The peak may be up to 64.00 MiB higher: {CAUSE}."),
        (64 * MIB, MIB, f"The peak may be up to 64.00 MiB higher or 1.00 MiB lower: {CAUSE}."),
        (
            30 * GIB,
            0,
            f"The peak may be up to 30.00 GiB higher: {CAUSE}. At the upper end it does not fit.",
        ),
    ],
)
def test_there_is_one_bar_with_its_cause(above: int, below: int, told: str) -> None:
    assert bar_words(judged(fitting_run(), above=above, below=below)) == told


def test_a_request_that_may_be_served_is_said_so() -> None:
    found = judged(oom_run())
    assert bar_words(found) == ""
    served = tuple(replace(device, reserved_bar=ReservedBar(serves=True)) for device in found.devices)
    assert (
        bar_words(replace(found, devices=served)) == f"This request may be served on the card, since {CAUSE}."
    )
