from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.config import misread_numbers
from vramfit.errors import ConfigError
from vramfit.units import MIB

from .programs import configs, many


def test_the_empty_string_gives_torchs_defaults() -> None:
    config = AllocatorConfig.parse("")
    assert config == AllocatorConfig()
    assert config.max_split_size is None
    assert config.max_non_split_rounding == 20 * MIB
    assert config.large_segment_size == 20 * MIB
    assert config.roundup_power2_divisions == (0,) * 16
    assert config.per_process_memory_fraction == 1.0
    assert not config.expandable_segments


def test_every_setting_is_read() -> None:
    config = AllocatorConfig.parse(
        "backend:native, max_split_size_mb:128, max_non_split_rounding_mb:30, large_segment_size_mb:24,"
        "garbage_collection_threshold:0.8, roundup_power2_divisions:8, expandable_segments:True,"
        "per_process_memory_fraction:0.5, throw_on_cudamalloc_oom:True,"
        "graph_capture_record_stream_reuse:True, release_lock_on_cudamalloc:True,"
        "pinned_use_cuda_host_register:True, pinned_num_register_threads:8,"
        "pinned_use_background_threads:True, pinned_reserve_segment_size_mb:64, pinned_free_catch_all:True,"
        "pinned_max_round_threshold_mb:4, pinned_max_cached_size_mb:8"
    )
    assert config == AllocatorConfig(
        max_split_size=128 * MIB,
        max_non_split_rounding=30 * MIB,
        large_segment_size=24 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(8,) * 16,
        expandable_segments=True,
        per_process_memory_fraction=0.5,
        throw_on_cudamalloc_oom=True,
        graph_capture_record_stream_reuse=True,
        release_lock_on_cudamalloc=True,
        pinned_use_cuda_host_register=True,
        pinned_num_register_threads=8,
        pinned_use_background_threads=True,
        pinned_reserve_segment_size=64 * MIB,
        pinned_free_catch_all=True,
        pinned_max_round_threshold=4 * MIB,
        pinned_max_cached_size=8 * MIB,
    )


def test_max_non_split_rounding_follows_the_segment_size() -> None:
    assert AllocatorConfig.parse("large_segment_size_mb:40").max_non_split_rounding == 40 * MIB
    assert AllocatorConfig.parse("large_segment_size_mb:40").to_string() == "large_segment_size_mb:40"


def test_hip_spellings_mean_the_same() -> None:
    config = AllocatorConfig.parse(
        "release_lock_on_hipmalloc:True,pinned_use_hip_host_register:True,backend:hipMallocAsync"
    )
    assert config.release_lock_on_cudamalloc
    assert config.pinned_use_cuda_host_register
    assert config.backend == "cudaMallocAsync"


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("4", (4,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[64:8,256:4]", (8,) * 7 + (0, 4) + (0,) * 7),  # what is not named between and above: no rounding
        ("[>:2]", (0,) + (2,) * 15),  # the first interval is below every "rest"
        ("[1:0,65536:16]", (0,) * 15 + (16,)),  # beyond the last interval: the last one
    ],
)
def test_roundup_divisions_by_interval(text: str, table: tuple[int, ...]) -> None:
    assert AllocatorConfig.parse(f"roundup_power2_divisions:{text}").roundup_power2_divisions == table


# Each reason is the text torch 2.13 gives for the same string.
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_split_size_mb:19", "option max_split_size_mb too small, must be >= 20"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "max_split_size_mb too small, must be >= 40"),
        ("max_non_split_rounding_mb:5", "option max_non_split_rounding_mb too small, must be >= 20"),
        ("large_segment_size_mb:10", "option large_segment_size_mb must be > 10 MB"),
        ("garbage_collection_threshold:1.5", r"garbage_collect_threshold is invalid, set it in \(0.0, 1.0\)"),
        ("garbage_collection_threshold:0", "garbage_collect_threshold is invalid"),
        (
            "per_process_memory_fraction:1.1",
            r"per_process_memory_fraction is invalid, set it in \[0.0, 1.0\]",
        ),
        ("roundup_power2_divisions:3", "the divisions has to be power of 2"),
        ("roundup_power2_divisions:0", "the divisions has to be power of 2"),
        ("roundup_power2_divisions:[256:3]", "the divisions has to be power of 2 or 0 to disable roundup"),
        ("roundup_power2_divisions:[250:2]", "the intervals have to be power of 2"),
        ("expandable_segments:true", "expected 'True' or 'False' for expandable_segments but got 'true'"),
        ("pinned_num_register_threads:3", "Number of register threads has to be power of 2, got 3"),
        ("pinned_num_register_threads:256", "less than or equal to 128, got 256"),
        ("pinned_reserve_segment_size_mb:0", "Pinned reserve segment size has to be greater than 0"),
        ("backend:magic", "Unknown allocator backend 'magic', options are native"),
        ("max_split_sise_mb:128", "Unrecognized key 'max_split_sise_mb' in CUDA allocator config"),
        # Where torch fails with an internal assertion, the token is named.
        ("max_split_size_mb:many", "'many' is not a number that max_split_size_mb takes"),
        (
            "garbage_collection_threshold:much",
            "'much' is not a number that garbage_collection_threshold takes",
        ),
        ("max_split_size_mb", "expected ':' after 'max_split_size_mb' but the settings end"),
        ("max_split_size_mb:", "expected a value for 'max_split_size_mb' at the end"),
        ("max_split_size_mb=128", "Unrecognized key 'max_split_size_mb=128'"),
        ("max_split_size_mb:128 expandable_segments:True", "expected ',' after 'max_split_size_mb'"),
        ("roundup_power2_divisions:[256:1,512:2", r"expected ',' after '512' but the settings end"),
    ],
)
def test_bad_settings_are_refused_with_torchs_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        AllocatorConfig.parse(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_numbers_are_read_as_the_card_reads_them() -> None:
    # std::stoull stops at the first character that is no digit, and lets -1 wrap around.
    assert AllocatorConfig.parse("max_split_size_mb:128MB").max_split_size == 128 * MIB
    assert AllocatorConfig.parse("max_split_size_mb:-1").max_split_size == 2**64 - MIB
    assert AllocatorConfig.parse("garbage_collection_threshold:.5x").garbage_collection_threshold == 0.5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", []),
        ("max_split_size_mb:128,garbage_collection_threshold:0.5,roundup_power2_divisions:[256:4,>:8]", []),
        ("max_split_size_mb:128MiB", ["max_split_size_mb:128MiB as 128: what follows the number is dropped"]),
        ("max_split_size_mb:-5", ["max_split_size_mb:-5 as 18446744073709551611: a minus sign wraps around"]),
        (
            "large_segment_size_mb:40.5",
            ["large_segment_size_mb:40.5 as 40: what follows the number is dropped"],
        ),
        ("garbage_collection_threshold:.5x", ["garbage_collection_threshold:.5x as .5: what follows"]),
        ("pinned_max_cached_size_mb:-1x", ["-1x as -1: what", "-1 as 18446744073709551615: a minus"]),
    ],
)
def test_numbers_that_mean_something_else_are_told(text: str, told: list[str]) -> None:
    found = misread_numbers(text)
    assert len(found) == len(told)
    assert all(part in note for part, note in zip(told, found, strict=True))


def test_settings_of_newer_versions_are_unknown_to_older_ones() -> None:
    for text in ("throw_on_cudamalloc_oom:True",):
        assert AllocatorConfig.parse(text, torch_version=(2, 12)) != AllocatorConfig()
        with pytest.raises(ConfigError, match="Unrecognized key"):
            AllocatorConfig.parse(text, torch_version=(2, 11))


def test_settings_given_at_run_time_reset_four_and_keep_the_others() -> None:
    config = AllocatorConfig.parse(
        "max_split_size_mb:64,garbage_collection_threshold:0.5,roundup_power2_divisions:4,"
        "large_segment_size_mb:32,expandable_segments:True,max_non_split_rounding_mb:40"
    )
    later = config.updated("per_process_memory_fraction:0.5")
    assert later == AllocatorConfig(
        large_segment_size=32 * MIB,
        expandable_segments=True,
        max_non_split_rounding=32 * MIB,
        per_process_memory_fraction=0.5,
    )
    with pytest.raises(ConfigError, match="must be >= 32"):
        config.updated("max_split_size_mb:20")


@many
@given(config=configs)
def test_writing_and_reading_gives_the_same_settings(config: AllocatorConfig) -> None:
    if config.max_split_size is not None and config.max_split_size < config.large_segment_size:
        config = replace(config, max_split_size=config.large_segment_size)
    if config.max_non_split_rounding < config.large_segment_size:
        config = replace(config, max_non_split_rounding=config.large_segment_size)
    assert AllocatorConfig.parse(config.to_string()) == config


def test_the_default_settings_are_written_as_nothing() -> None:
    assert AllocatorConfig().to_string() == ""
    assert AllocatorConfig(max_split_size=64 * MIB).to_string() == "max_split_size_mb:64"
