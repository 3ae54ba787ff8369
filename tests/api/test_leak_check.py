"""``check_leaks``: its arguments, its verdicts, and its error; the planted programs are in tests/leaks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import vramfit
from vramfit.analysis import LeakVerdict, Release
from vramfit.api.leak_check import LEAST_ROUNDS, LeakFoundError, assert_no_leaks, check_leaks
from vramfit.errors import UsageError

MIB = 1 << 20
kept: list[Tensor] = []


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    gc.freeze()  # looking for owners passes over the whole heap
    yield
    kept.clear()
    gc.unfreeze()


def leak() -> None:
    kept.append(torch.ones(MIB // 4))


def clean() -> Tensor:
    return torch.ones(MIB // 4) * 2


def test_a_leak_is_told_with_its_rate_line_and_owner() -> None:
    gc.unfreeze()
    found = check_leaks(leak)
    assert found.leaks
    assert found.bytes_per_step == MIB
    (growing,) = found.growing
    assert growing.requested_per_step == MIB
    assert growing.place.tensor == f"float32[{MIB // 4}]"
    assert growing.place.line is not None
    assert growing.place.line.name == "leak"
    assert growing.release is Release.HELD
    assert growing.owners[0].text == f"{__name__}.kept[2]"
    assert growing.p_value == pytest.approx(1 / 720)


def test_a_clean_function_is_steady() -> None:
    found = check_leaks(clean, device="auto")
    assert (found.verdict, found.bytes_per_step, found.growing) == (LeakVerdict.STEADY, 0.0, ())


def test_fewer_rounds_prove_nothing_and_tell_what_grew() -> None:
    found = check_leaks(leak, rounds=LEAST_ROUNDS - 1, owners=0)
    assert found.verdict is LeakVerdict.TOO_FEW_STEPS
    assert not found.leaks
    assert [one.bytes_per_step for one in found.growing] == [MIB]


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_warmup_is_left_out(warmup: int) -> None:
    calls: list[Tensor] = []

    def fills() -> None:
        if len(calls) < warmup:
            calls.append(torch.ones(1000))

    assert check_leaks(fills, warmup=warmup).verdict is LeakVerdict.STEADY
    assert len(check_leaks(leak, warmup=warmup, owners=0).levels) == warmup + 6


def test_no_owners_are_looked_for_where_none_are_wanted() -> None:
    (growing,) = check_leaks(leak, owners=0).growing
    assert growing.owners == ()


def test_the_error_is_the_report() -> None:
    assert assert_no_leaks(clean).verdict is LeakVerdict.STEADY
    gc.unfreeze()
    with pytest.raises(LeakFoundError) as caught:
        assert_no_leaks(leak)
    text = str(caught.value)
    assert text.startswith("! memory grows by 1.00 MiB per round")
    assert "test_leak_check.py:" in text
    assert f"held by {__name__}.kept[2]" in text
    assert caught.value.exit_code == 3
    assert caught.value.report.leaks


def test_what_the_function_raises_goes_on_its_way() -> None:
    def fails() -> None:
        raise KeyError("the program's own")

    with pytest.raises(KeyError, match="the program's own"):
        check_leaks(fails)
    assert check_leaks(clean).verdict is LeakVerdict.STEADY  # nothing stays behind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": 0}, "rounds=0 is no whole number from 1 on"),
        ({"rounds": 2.5}, r"rounds=2\.5 is no whole number"),
        ({"rounds": True}, "rounds=True is no whole number"),
        ({"warmup": -1}, "warmup=-1 is no whole number from 0 on"),
        ({"owners": -1}, "owners=-1 is no whole number"),
        ({"device": "tpu"}, "is no device|cannot be recorded"),
        ({"device": "cuda"}, "finds no CUDA card"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_unusable_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_leaks(clean, **arguments)


@pytest.mark.parametrize("value", [None, 3, torch.ones(1)])
def test_what_cannot_be_called_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        check_leaks(value)


def test_the_public_names_lead_here() -> None:
    function: Callable[..., Any] = vramfit.check_leaks
    assert function is check_leaks
    assert vramfit.assert_no_leaks is assert_no_leaks
