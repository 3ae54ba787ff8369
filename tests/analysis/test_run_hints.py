"""What a run shows that is worth a line: attention that fell back, and a cache that fits no request."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from analysis.synthetic import Recorder, fitting_run, virtual_run
from vramfit.analysis import Hint, hints, run_from_trace, tune, verdict
from vramfit.analysis.run_hints import ATTENTION_MATH, TRY_TUNE, cached_at_growth
from vramfit.console import SafeConsole
from vramfit.report import json_text, print_report
from vramfit.trace import Run, Source
from vramfit.trace.outcome import AttentionFallback, KernelRefusal
from vramfit.units import GIB, MIB
from vramfit.virtual.gpu import VirtualGPU


def of(run: Run, code: str) -> list[Hint]:
    return [hint for hint in hints(run, verdict(run)) if hint.code == code]


# -- attention


def attend(
    gpu: str = "RTX 4090",
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 16,
    size: int = 64,
    mask: Callable[[], torch.Tensor] | None = None,
    gqa: bool = False,
    causal: bool = False,
) -> Run:
    """Attention of 2 x 16 heads over 2,048 positions: scores of 512 MiB in float32."""
    with VirtualGPU(gpu, context_bytes=0) as card:
        query = torch.empty(2, 16, 2048, size, device="cuda", dtype=dtype)
        key = torch.empty(2, heads, 2048, size, device="cuda", dtype=dtype)
        given = None if mask is None else mask()
        functional.scaled_dot_product_attention(
            query, key, key, attn_mask=given, enable_gqa=gqa, is_causal=causal
        )
    return card.run


def boolean() -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device="cuda")


@pytest.mark.parametrize(
    ("run", "dtype", "why"),
    [
        (
            lambda: attend(heads=8, gqa=True, mask=boolean),
            "bfloat16",
            "flash takes no mask; memory-efficient takes no enable_gqa before torch 2.14; "
            "cuDNN comes after the math kernel on this card",
        ),
        (
            lambda: attend(heads=8, gqa=True, dtype=torch.float32),
            "float32",
            "flash takes no float32; memory-efficient takes no enable_gqa before torch 2.14; "
            "cuDNN comes after the math kernel on this card",
        ),
        (
            lambda: attend(size=30, dtype=torch.float32),
            "float32",
            "flash takes no float32; memory-efficient wants head sizes in multiples of 4; "
            "cuDNN comes after the math kernel on this card",
        ),
        (
            lambda: attend("H100", heads=8, gqa=True, dtype=torch.float32),
            "float32",
            "flash takes no float32; memory-efficient takes no enable_gqa before torch 2.14; cuDNN takes no float32",
        ),
    ],
)
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="memory-efficient attention shares heads since 2.14")
def test_attention_that_falls_back_is_named(run: Callable[[], Run], dtype: str, why: str) -> None:
    (hint,) = of(run(), ATTENTION_MATH)
    # The scores and their softmax.
    assert hint.bytes == 2 * 512 * MIB
    assert hint.message == (
        f"scaled_dot_product_attention ran the math kernel for {dtype} ({why}): its scores of "
        "float32[2, 16, 2048, 2048] take 1.00 GiB"
    )
    assert hint.location is not None
    assert hint.location.partition(":")[0] == __file__


@pytest.mark.parametrize(
    "run",
    [
        lambda: attend(),
        lambda: attend(dtype=torch.float32),
        lambda: attend(mask=boolean),
        lambda: attend(heads=8, gqa=True, causal=True),
    ],
    ids=["flash", "float32", "mask", "gqa"],
)
def test_fused_attention_is_not(run: Callable[[], Run]) -> None:
    found = run()
    assert found.attention_fallbacks == ()
    assert hints(found, verdict(found)) == ()


def test_scores_that_ran_out_count() -> None:
    with pytest.raises(torch.OutOfMemoryError), VirtualGPU("900MiB", context_bytes=0) as card:
        query = torch.empty(2, 16, 2048, 30, device="cuda")
        functional.scaled_dot_product_attention(query, query, query)
    (hint,) = of(card.run, ATTENTION_MATH)
    assert hint.bytes == 2 * 512 * MIB
    assert hint.message.endswith("take 1.00 GiB, of which 512.00 MiB could not be had")


def test_small_scores_are_not_worth_a_line() -> None:
    with VirtualGPU("RTX 4090", context_bytes=0) as card:
        held = torch.empty(12 * GIB, dtype=torch.uint8, device="cuda")
        query = torch.empty(2, 16, 2048, 30, device="cuda")
        functional.scaled_dot_product_attention(query, query, query)
        del held
    assert len(card.run.attention_fallbacks) == 1
    assert of(card.run, ATTENTION_MATH) == []


def test_a_run_keeps_its_fallbacks_through_json() -> None:
    fallback = AttentionFallback(
        location="model.py:3",
        dtype="float32",
        scores=(1, 2, 8, 8),
        scores_dtype="float32",
        refused=(KernelRefusal(kernel="flash", why="takes no mask"),),
    )
    from vramfit.plain import from_plain, to_plain

    assert from_plain(json.loads(json.dumps(to_plain(fallback))), AttentionFallback) == fallback


# -- the cache


def growing(steps: int, conf: str | None = None, gpu: str = "24GiB") -> Run:
    """Each step asks for 24 MiB more than the one before, and keeps 2 MiB."""
    with VirtualGPU(gpu, context_bytes=0, alloc_conf=conf) as card:
        kept = []
        for step in range(1, steps + 1):
            batch = torch.empty(step * 24 * MIB, dtype=torch.uint8, device="cuda")
            kept.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
            del batch
    return card.run


def test_a_cache_that_fits_no_request_points_to_tune() -> None:
    run = growing(20)
    (hint,) = of(run, TRY_TUNE)
    reserved, cached = cached_at_growth(run.trace, 0)
    assert (reserved, cached) == (run.devices[0].peak_reserved_bytes, hint.bytes)
    assert cached == reserved - (20 * 24 + 19 * 2) * MIB
    assert hint.message.endswith("add --trace run.vft to this command, then vramfit tune run.vft")
    found = tune(run.trace)
    assert (reserved, found.best.peak_reserved) == (5060 * MIB, 860 * MIB)
    replayed = growing(20, found.best.alloc_conf)
    assert replayed.devices[0].peak_reserved_bytes == found.best.peak_reserved
    assert of(replayed, TRY_TUNE) == []


def test_varying_sizes_too() -> None:
    with VirtualGPU("24GiB", context_bytes=0) as card:
        for size in (300, 200, 400, 100, 500):
            torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
    (hint,) = of(card.run, TRY_TUNE)
    assert hint.bytes == 700 * MIB


@pytest.mark.parametrize("steps", [2, 4])
def test_little_cache_is_not_worth_a_line(steps: int) -> None:
    assert of(growing(steps), TRY_TUNE) == []


def test_a_cache_that_is_idle_is_not_either() -> None:
    """What was free did not stand in the way of any request: it came free later."""
    with VirtualGPU("24GiB", context_bytes=0) as card:
        large = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
        del large
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert of(card.run, TRY_TUNE) == []


def test_metered_cpu_memory_has_no_allocator_settings() -> None:
    run = replace(growing(20), source=Source.CPU)
    assert of(run, TRY_TUNE) == []


def test_hints_stand_in_every_report(capsys: pytest.CaptureFixture[str]) -> None:
    from vramfit.report.html.page import render_html

    run = growing(20)
    judged = verdict(run)
    (hint,) = hints(run, judged)
    print_report(run, judged, console=SafeConsole(width=120), root=Path.cwd())
    assert hint.message in " ".join(capsys.readouterr().out.split())
    (written,) = json.loads(json_text(run, judged))["hints"]
    assert written == {"code": TRY_TUNE, "message": hint.message, "location": None, "bytes": hint.bytes}
    assert "vramfit tune run.vft" in render_html(run, judged)


def test_a_state_and_an_unused_card_have_no_hints() -> None:
    recorder = Recorder()
    unused = virtual_run(recorder.finish())
    assert hints(unused, verdict(unused)) == ()
    assert hints(fitting_run(), verdict(fitting_run())) == ()


# -- tune of recordings that end at a failure


def failing(conf: str | None = None) -> Run:
    """Runs out in the middle; with pages it goes on, and runs out later."""
    with (
        pytest.raises(torch.OutOfMemoryError),
        VirtualGPU("1100MiB", context_bytes=0, alloc_conf=conf) as card,
    ):
        kept = []
        for step in range(1, 60):
            batch = torch.empty(step * 24 * MIB, dtype=torch.uint8, device="cuda")
            kept.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
            kept.append(batch[:1].clone())
            del batch
    return card.run


def test_settings_for_a_failure_hold_up_to_there(capsys: pytest.CaptureFixture[str]) -> None:
    run = failing()
    found = tune(run.trace)
    assert found.serves_failure
    assert found.devices[0].ends_at_failure
    print_report(found, console=SafeConsole(width=120))
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "~ the request that ran out of memory would be served; what comes after the failure is not known"
        in out
    )
    assert "these settings serve the requests up to there, and may fail at a later one" in out
    conf = shlex.quote(found.best.alloc_conf)
    assert f"vramfit run --gpu {shlex.quote(run.devices[0].gpu)} --alloc-conf {conf} SCRIPT" in out
    assert "✓" not in out
    # It is true: followed, the program gets further, and fails.
    later = failing(found.best.alloc_conf)
    assert later.oom is not None
    assert run.oom is not None
    assert later.oom.requested_bytes > run.oom.requested_bytes


def test_a_recording_that_goes_on_is_a_cure(capsys: pytest.CaptureFixture[str]) -> None:
    found = tune(growing(20).trace)
    assert not found.serves_failure
    print_report(found, console=SafeConsole(width=120))
    out = capsys.readouterr().out
    assert out.startswith("✓ peak reserved ")
    assert "begins with memory in use" not in out


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_variable_that_was_set_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "roundup_power2_divisions:2")
    with VirtualGPU("24GiB", context_bytes=0) as card:
        torch.empty(66 * MIB, dtype=torch.uint8, device="cuda")
    found = tune(card.run.trace, settings=[""])
    assert found.recorded_from == name
    assert found.export_line == f"unset {name}"
    assert tune(growing(20).trace).export_line.startswith(f"export {name}=")


def test_settings_of_the_option_are_left_out() -> None:
    with VirtualGPU("24GiB", context_bytes=0, alloc_conf="roundup_power2_divisions:2") as card:
        torch.empty(66 * MIB, dtype=torch.uint8, device="cuda")
    assert tune(card.run.trace, settings=[""]).export_line == "# leave --alloc-conf out"


def test_a_trace_from_a_file_has_the_same_hints_about_its_cache() -> None:
    run = growing(20)
    read = run_from_trace(run.trace)
    assert [hint.bytes for hint in of(read, TRY_TUNE)] == [hint.bytes for hint in of(run, TRY_TUNE)]
