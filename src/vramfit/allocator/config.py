"""Settings of the caching allocator, as PYTORCH_ALLOC_CONF strings spell them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vramfit.allocator.versions import REFERENCE_VERSION, TorchVersion
from vramfit.units import MIB

ROUNDUP_INTERVALS = 16
"""Power-of-two intervals with their own division, from 1 MiB to 64 GiB (c10/core/AllocatorConfig.cpp)."""

NO_ROUNDUP = (0,) * ROUNDUP_INTERVALS


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorConfig:
    """Every setting that ``PYTORCH_ALLOC_CONF`` knows, normalised; sizes in bytes.

    Attributes:
        backend: ``native``, or ``cudaMallocAsync`` (which this replica does not model).
        max_split_size: blocks of at least this size are not split; None for no limit.
        max_non_split_rounding: how much larger than its request an oversized block may be; settings strings
            that do not name it make it the large_segment_size.
        large_segment_size: segment for requests above 1 MiB and below 10 MiB, and page of large expandable
            segments.
        garbage_collection_threshold: fraction of the allowed memory above which old cached blocks are freed;
            0 turns it off.
        roundup_power2_divisions: divisions between powers of two for the 16 intervals from 1 MiB to 64 GiB;
            0 or 1 rounds to 512 bytes.
        expandable_segments: whether segments grow by mapping pages instead of one ``cudaMalloc`` each.
        per_process_memory_fraction: share of the card that may be reserved; 1 sets no limit.
        throw_on_cudamalloc_oom: give up at the limit without retries.
        graph_capture_record_stream_reuse: read, but without effect here: a capture is replayed as if it were off.
        release_lock_on_cudamalloc: without effect on memory.
        pinned_use_cuda_host_register: pinned host memory only, as all below.
    """

    backend: str = "native"
    max_split_size: int | None = None
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = NO_ROUNDUP
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    graph_capture_record_stream_reuse: bool = False
    release_lock_on_cudamalloc: bool = False
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_use_background_threads: bool = False
    pinned_reserve_segment_size: int = 0
    pinned_free_catch_all: bool = False
    pinned_max_round_threshold: int | None = None
    pinned_max_cached_size: int | None = None

    @classmethod
    def parse(cls, text: str, *, torch_version: TorchVersion = REFERENCE_VERSION) -> AllocatorConfig:
        """Read a ``PYTORCH_ALLOC_CONF`` string, for instance ``max_split_size_mb:128``.

        Args:
            text: the settings; empty for the defaults.
            torch_version: major and minor version whose settings are accepted.

        Raises:
            ConfigError: a setting is unknown or its value is not accepted; the message has torch's reason.
        """
        from vramfit.allocator.parsing import parse_settings

        return cls(**parse_settings(text, torch_version))

    def updated(self, text: str, *, torch_version: TorchVersion = REFERENCE_VERSION) -> AllocatorConfig:
        """These settings after torch is given others at run time.

        That is ``torch._C._accelerator_setAllocatorSettings``.
        max_split_size, max_non_split_rounding, roundup_power2_divisions and garbage_collection_threshold
        fall back to their defaults when ``text`` does not name them; all others stay
        (c10/core/AllocatorConfig.cpp, ``parseArgs``).

        Raises:
            ConfigError: as `parse`.
        """
        from vramfit.allocator.parsing import parse_settings

        found = parse_settings(text, torch_version, large_segment_size=self.large_segment_size)
        reset = {
            "max_split_size": None,
            "roundup_power2_divisions": NO_ROUNDUP,
            "garbage_collection_threshold": 0.0,
        }
        return replace(self, **(reset | found))

    def with_(self, **changes: Any) -> AllocatorConfig:
        """A copy with some settings changed."""
        return replace(self, **changes)

    def to_string(self) -> str:
        """The shortest ``PYTORCH_ALLOC_CONF`` string that gives these settings."""
        from vramfit.allocator.parsing import write_settings

        return write_settings(self)
