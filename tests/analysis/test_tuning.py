from dataclasses import replace
from pathlib import Path

import pytest

from analysis import fragmentation_cases as cases
from vramfit.allocator import AllocatorConfig
from vramfit.analysis import TrapKind, Tuning, tune
from vramfit.analysis.trials import Sizes, first_candidates
from vramfit.errors import ConfigError, UsageError
from vramfit.trace import MemoryTrace, Rehearsal, TraceBuilder, read_any, replay
from vramfit.units import MIB

RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "traces").glob("*.json.gz"))


def recording(name: str) -> MemoryTrace:
    return read_any(next(path for path in RECORDINGS if path.name.startswith(name + ".")))


def trap(tuning: Tuning, kind: TrapKind) -> str:
    return next(found.text for found in tuning.traps if found.kind is kind)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".json")[0])
def test_the_recorded_settings_give_the_recorded_peak(path: Path) -> None:
    trace = read_any(path)
    tuning = tune(trace, settings=["expandable_segments:True"])
    assert tuning.devices
    for device in tuning.devices:
        assert device.exact
        assert device.predicted == device.recorded
    assert {trial.alloc_conf for trial in tuning.trials} == {
        tuning.recorded_alloc_conf,
        "expandable_segments:True",
    }


def test_the_trap_of_a_growing_program() -> None:
    """As reported with torch 2.12 in pytorch/pytorch#193400: after cycle 100, 266 MiB allocated, 14,060 reserved."""
    program = cases.growing_trap()
    tuning = tune(program)
    (device,) = tuning.devices
    assert device.predicted.peak_reserved == device.recorded.peak_reserved == 14_060 * MIB
    assert (
        tuning.export_line == "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF"
    )  # the simplest of the nearly best
    assert (tuning.best.peak_reserved // MIB, tuning.best.ooms) == (422, 0)
    peaks = {trial.alloc_conf: trial.peak_reserved // MIB for trial in tuning.trials}
    assert peaks["expandable_segments:True"] == 420
    assert peaks["max_split_size_mb:128"] == 422
    text = trap(tuning, TrapKind.MAX_SPLIT_EXPANDABLE)
    assert "grows to 14,060 MiB" in text
    assert "alone it is 420 MiB, with max_split_size_mb alone 422 MiB" in text


def test_allocated_and_reserved_of_the_trap_cycle_by_cycle() -> None:
    allocator = cases.Program("max_split_size_mb:128,expandable_segments:True", total=16 << 30).allocator
    allocator.malloc(64 * MIB)
    found = []
    for cycle in range(101):
        large = allocator.malloc(91 * MIB), allocator.malloc(91 * MIB // 2)
        allocator.malloc(2 * MIB)
        for address in large:
            allocator.free(address)
        if cycle % 20 == 0:
            found.append((allocator.allocated_bytes // MIB, allocator.reserved_bytes // MIB))
    assert found == [(66, 220), (106, 2980), (146, 5760), (186, 8520), (226, 11300), (266, 14060)]


def test_the_trap_is_told_when_the_recording_has_other_settings() -> None:
    plain = cases.Program()
    plain.keep(64 * MIB)
    for _ in range(30):
        large = (plain.take(91 * MIB), plain.take(45.5 * MIB))
        plain.keep(2 * MIB)
        plain.free(*large)
    tuning = tune(plain.finish())
    assert "max_split_size_mb:128,expandable_segments:True" in {
        found.alloc_conf for found in tuning.traps if found.kind is TrapKind.MAX_SPLIT_EXPANDABLE
    }
    assert tuning.best.family != "trap"
    assert tuning.keep


def test_a_recording_is_tuned_and_the_best_is_what_a_replay_says() -> None:
    trace = recording("gpt-small-forward")
    shares: list[float] = []
    tuning = tune(trace, progress=lambda share, conf: shares.append(share))
    (again,) = replay(trace, tuning.best.config).devices
    assert again.replayed.peak_reserved == tuning.best.peak_reserved == 1_004 * MIB
    assert tuning.saved == tuning.baseline.peak_reserved - tuning.best.peak_reserved == 52 * MIB
    assert tuning.best.alloc_conf == "expandable_segments:True"
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(trial.complete for trial in tuning.trials)
    ranks = [(trial.ooms, trial.peak_reserved) for trial in tuning.trials]
    assert ranks == sorted(ranks)
    # The recording does not name its torch, so what only new ones know is not offered.
    assert not any("large_segment_size" in trial.alloc_conf for trial in tuning.trials)


def test_settings_that_only_newer_versions_have_are_offered_to_them() -> None:
    trace = cases.growing_sequences()
    assert any("large_segment_size" in trial.alloc_conf for trial in tune(trace).trials)
    old = replace(trace, meta={**trace.meta, "torch_version": "2.10.0"})
    assert not any("large_segment_size" in trial.alloc_conf for trial in tune(old).trials)


def test_an_out_of_memory_that_no_setting_cures_keeps_the_settings() -> None:
    tuning = tune(recording("expandable-3gpu-oom"))
    assert tuning.keep
    assert tuning.best.ooms == tuning.baseline.ooms == 1
    assert len(tuning.devices) == 3
    assert tuning.baseline.peak_reserved == 84_202_749_952
    only = tune(recording("expandable-3gpu-oom"), device=2, settings=[""])
    assert [device.index for device in only.devices] == [2]


def test_an_out_of_memory_that_a_setting_cures() -> None:
    tuning = tune(cases.oom_of_holes())
    assert (tuning.baseline.ooms, tuning.best.ooms) == (1, 0)
    assert tuning.best.config.expandable_segments


def test_a_card_that_is_full_is_judged_by_retries() -> None:
    tuning = tune(recording("select-n-b"))
    baseline = tuning.baseline
    assert (baseline.device_allocs, baseline.device_frees, baseline.retries) == (584, 579, 39)  # as recorded
    assert (tuning.best.alloc_conf, tuning.best.retries) == ("expandable_segments:True", 13)
    assert TrapKind.OUT_OF_MEMORY in {found.kind for found in tuning.traps}


def test_collection_without_a_fraction_does_nothing() -> None:
    tuning = tune(cases.growing_sequences(), settings=["garbage_collection_threshold:0.5"])
    assert "does nothing" in trap(tuning, TrapKind.COLLECTION_WITHOUT_FRACTION)
    given = next(trial for trial in tuning.trials if trial.family == "given")
    assert given.peak_reserved == tuning.baseline.peak_reserved


def test_rounding_up_powers_of_two_does_nothing_and_rounding_others_costs() -> None:
    program = cases.Program()
    for _ in range(4):
        program.keep(64 * MIB)
    powers = tune(program.finish(), settings=["roundup_power2_divisions:4"])
    assert "100 % of the bytes" in trap(powers, TrapKind.ROUNDUP_NO_USE)
    above = tune(cases.rounded_up(), settings=["roundup_power2_divisions:2"])
    assert trap(above, TrapKind.ROUNDUP_COSTS).startswith("it makes requests 45 % larger")


def test_settings_that_the_version_does_not_know_are_named() -> None:
    trace = cases.interleaved()
    old = replace(
        trace, meta={**trace.meta, "torch_version": "2.10", "alloc_conf": "large_segment_size_mb:32"}
    )
    tuning = tune(old, settings=[""])
    assert "torch 2.10 does not take" in trap(tuning, TrapKind.UNKNOWN_SETTING)
    with pytest.raises(ConfigError, match="Unrecognized key 'large_segment_size_mb'"):
        tune(old, settings=["large_segment_size_mb:32"])


def test_worse_settings_are_broken_off_and_rank_last() -> None:
    program = cases.Program(total=1 << 50)
    for _ in range(2500):
        large = (program.take(91 * MIB), program.take(45.5 * MIB))
        program.keep(2 * MIB)
        program.free(*large)
    tuning = tune(program.finish(), settings=["max_split_size_mb:128,expandable_segments:True"])
    worse = tuning.trials[-1]
    assert not worse.complete
    assert worse.family == "given"
    assert 1.5 * tuning.baseline.peak_reserved < worse.peak_reserved < 2500 * 138 * MIB
    assert "grows to more than" in trap(tuning, TrapKind.MAX_SPLIT_EXPANDABLE)


def test_candidates_are_settings_that_torch_takes_each_once() -> None:
    rehearsal = Rehearsal(recording("finetune-course"), 0)
    found = [config for _, config in first_candidates(Sizes([rehearsal]), segments=True, limited=True)]
    texts = [config.to_string() for config in found]
    assert len(set(texts)) == len(texts) > 15
    assert [AllocatorConfig.parse(text) for text in texts] == found


def test_a_trace_without_requests_or_device() -> None:
    with pytest.raises(UsageError, match="holds no requests"):
        tune(TraceBuilder().finish())
    with pytest.raises(UsageError, match="no requests on device 4"):
        tune(recording("select-n-a"), device=4)
