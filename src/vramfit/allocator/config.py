"""Settings of the caching allocator: what they say, and PYTORCH_ALLOC_CONF strings read and written."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from vramfit.allocator.versions import REFERENCE_VERSION, TorchVersion, rules_for
from vramfit.errors import ConfigError
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

        Raises:
            ConfigError: a setting is unknown or its value is not accepted; the message has torch's reason.
        """
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
        found = parse_settings(text, torch_version, large_segment_size=self.large_segment_size)
        reset = {
            "max_split_size": None,
            "roundup_power2_divisions": NO_ROUNDUP,
            "garbage_collection_threshold": 0.0,
        }
        return replace(self, **(reset | found))

    def to_string(self) -> str:
        """The shortest ``PYTORCH_ALLOC_CONF`` string that gives these settings."""
        return write_settings(self)


# -- Reading and writing PYTORCH_ALLOC_CONF strings, with torch's own reasons for refusing one ---------------


_MAX_PINNED_THREADS = 128
_SIZE_MAX = 2**64 - 1
_SIZES = (
    "large_segment_size",
    "max_split_size",
    "max_non_split_rounding",
    "pinned_reserve_segment_size",
    "pinned_max_round_threshold",
    "pinned_max_cached_size",
)  # settings in MiB, whose names end in _mb; torch checks the second and third against the first
_HINT = "Write settings as name:value,name:value, for instance max_split_size_mb:128,expandable_segments:True"


def _tokens(text: str) -> list[str]:
    """Split at ``,:[]`` and drop blanks, as ``ConfigTokenizer`` (c10/core/AllocatorConfig.h) does."""
    tokens: list[str] = []
    word = ""
    for character in text:
        if character in ",:[]":
            if word:
                tokens.append(word)
                word = ""
            tokens.append(character)
        elif not character.isspace():
            word += character
    return [*tokens, word] if word else tokens


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


class _SettingsReader:
    """Walks over the tokens of one settings string."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.at = 0
        self.misread: dict[str, None] = {}

    def fail(self, reason: str) -> ConfigError:
        return ConfigError(f"allocator settings {self.text!r}: {reason}", _HINT)

    @property
    def done(self) -> bool:
        return self.at >= len(self.tokens)

    def peek(self) -> str:
        return "" if self.done else self.tokens[self.at]

    def take(self, wanted: str) -> str:
        if self.done:
            raise self.fail(f"expected {wanted} at the end")
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, mark: str, after: str) -> None:
        found = self.peek()
        if found != mark:
            where = f"but found {found!r}" if found else "but the settings end"
            raise self.fail(f"expected {mark!r} after {after!r} {where}")
        self.at += 1

    def value(self, key: str) -> str:
        self.expect(":", key)
        return self.take(f"a value for {key!r}")

    def boolean(self, key: str) -> bool:
        word = self.value(key)
        if word not in ("True", "False"):
            raise self.fail(f"expected 'True' or 'False' for {key} but got {word!r}")
        return word == "True"

    def number(self, key: str) -> int:
        return self.as_number(key, self.value(key))

    def as_number(self, key: str, word: str) -> int:
        # std::stoull: leading digits count, what follows is dropped, and a minus sign wraps around.
        match = re.match(r"[+-]?[0-9]+", word)
        if match is None or abs(int(match.group())) > _SIZE_MAX:
            raise self.fail(f"{word!r} is not a number that {key} takes")
        found = int(match.group()) % (_SIZE_MAX + 1)
        if match.group() != word:
            self._note(key, word, match.group(), "what follows the number is dropped")
        if int(match.group()) < 0:
            self._note(key, match.group(), str(found), "a minus sign wraps around")
        return found

    def fraction(self, key: str) -> float:
        word = self.value(key)
        match = re.match(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", word, re.IGNORECASE)
        if match is None:
            raise self.fail(f"{word!r} is not a number that {key} takes")
        if match.group() != word:
            self._note(key, word, match.group(), "what follows the number is dropped")
        return float(match.group())

    def _note(self, key: str, word: str, found: str, why: str) -> None:
        self.misread[f"torch reads {key}:{word} as {found}: {why}"] = None

    def megabytes(self, key: str) -> int:
        return min(self.number(key), _SIZE_MAX // MIB) * MIB


def parse_settings(
    text: str, torch_version: TorchVersion, *, large_segment_size: int = 20 * MIB
) -> dict[str, Any]:
    """The fields of `AllocatorConfig` that a settings string sets.

    Args:
        torch_version: whose settings are known.
        large_segment_size: in force so far; limits of other settings depend on it.

    Raises:
        ConfigError: torch would refuse the string; the reason is torch's.
    """
    return _parse(_SettingsReader(text), torch_version, large_segment_size)


def misread_numbers(text: str, torch_version: TorchVersion = REFERENCE_VERSION) -> tuple[str, ...]:
    """The numbers of a settings string that torch takes otherwise than they are written, each in a sentence.

    Raises:
        ConfigError: torch would refuse the string.
    """
    reader = _SettingsReader(text)
    _parse(reader, torch_version, 20 * MIB)
    return tuple(reader.misread)


def _parse(reader: _SettingsReader, torch_version: TorchVersion, large_segment_size: int) -> dict[str, Any]:
    large = _segment_size_first(reader, torch_version) or large_segment_size
    found: dict[str, Any] = {"max_non_split_rounding": large}  # follows the segment size unless it is named
    while not reader.done:
        key = reader.take("a setting")
        _read_setting(reader, key, found, torch_version, large)
        if not reader.done:
            reader.expect(",", key)
    return found


def _segment_size_first(reader: _SettingsReader, version: TorchVersion) -> int:
    """The segment size that a string sets, which torch reads before all others; 0 if it sets none."""
    size = 0
    for index, key in enumerate(reader.tokens, start=1):
        reader.at = index
        if key == "large_segment_size_mb" and rules_for(version).large_segment_size_option:
            size = _read_segment_size(reader, key)
    reader.at = 0
    return size


def _read_segment_size(reader: _SettingsReader, key: str) -> int:
    size = reader.megabytes(key)
    if size <= 10 * MIB:
        raise reader.fail("CachingAllocator option large_segment_size_mb must be > 10 MB")
    return size


def _read_setting(
    reader: _SettingsReader, key: str, found: dict[str, Any], version: TorchVersion, large_segment_size: int
) -> None:
    rules = rules_for(version)
    # ROCm builds spell two settings with "hip"; both spellings are accepted by either build.
    name = {
        "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
        "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
    }.get(key, key)
    if name in _BOOLEANS or (name == "throw_on_cudamalloc_oom" and rules.throw_on_oom_option):
        found[name] = reader.boolean(key)
    elif name in ("max_split_size_mb", "max_non_split_rounding_mb"):
        size = reader.megabytes(key)
        if size < large_segment_size:
            least = large_segment_size // MIB
            raise reader.fail(f"CachingAllocator option {key} too small, must be >= {least}")
        found["max_split_size" if name == "max_split_size_mb" else "max_non_split_rounding"] = size
    elif name == "large_segment_size_mb" and rules.large_segment_size_option:
        found["large_segment_size"] = _read_segment_size(reader, key)
    elif name == "garbage_collection_threshold":
        share = reader.fraction(key)
        if not 0.0 < share < 1.0:
            raise reader.fail("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
        found[name] = share
    elif name == "per_process_memory_fraction":
        share = reader.fraction(key)
        if not 0.0 <= share <= 1.0:
            raise reader.fail("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
        found[name] = share
    elif name == "roundup_power2_divisions":
        found[name] = _read_divisions(reader, key, found.get(name, (0,) * ROUNDUP_INTERVALS))
    elif name == "backend":
        found[name] = _read_backend(reader, key)
    elif name == "pinned_num_register_threads":
        found[name] = _read_threads(reader, key)
    elif name == "pinned_reserve_segment_size_mb":
        size = reader.megabytes(key)
        if size == 0:
            raise reader.fail("Pinned reserve segment size has to be greater than 0")
        found["pinned_reserve_segment_size"] = size
    elif (
        name in ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb") and rules.pinned_round_options
    ):
        found[name.removesuffix("_mb")] = reader.megabytes(key)
    else:
        raise reader.fail(f"Unrecognized key '{key}' in CUDA allocator config")


_BOOLEANS = frozenset(
    {
        "expandable_segments",
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_background_threads",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
    }
)


def _read_backend(reader: _SettingsReader, key: str) -> str:
    name = reader.value(key)
    if name not in ("native", "cudaMallocAsync", "hipMallocAsync"):
        raise reader.fail(
            f"Unknown allocator backend {name!r}, options are native, cudaMallocAsync, and hipMallocAsync"
        )
    return "native" if name == "native" else "cudaMallocAsync"


def _read_threads(reader: _SettingsReader, key: str) -> int:
    threads = reader.number(key)
    if not _is_power_of_two(threads):
        raise reader.fail(f"Number of register threads has to be power of 2, got {threads}")
    if threads > _MAX_PINNED_THREADS:
        raise reader.fail(
            f"Number of register threads should be less than or equal to {_MAX_PINNED_THREADS}, got {threads}"
        )
    return threads


def _read_divisions(reader: _SettingsReader, key: str, before: tuple[int, ...]) -> tuple[int, ...]:
    """One division for all sizes, or a list of ``size:divisions`` with sizes in MiB, ``>`` for the rest."""
    word = reader.value(key)
    if word != "[":
        divisions = reader.as_number(key, word)
        if not _is_power_of_two(divisions):
            raise reader.fail("For roundups, the divisions has to be power of 2")
        return (divisions,) * ROUNDUP_INTERVALS
    table = [*before]
    first, last = True, 0
    while (boundary := reader.take("']'")) != "]":
        divisions = reader.number(f"{key}:[{boundary}")
        if divisions and not _is_power_of_two(divisions):
            raise reader.fail("For roundups, the divisions has to be power of 2 or 0 to disable roundup")
        if boundary == ">":
            table[last + 1 :] = [divisions] * (
                ROUNDUP_INTERVALS - last - 1
            )  # a lone ">" leaves the first as it is
        else:
            size = reader.as_number(key, boundary)
            if not _is_power_of_two(size):
                raise reader.fail("For roundups, the intervals have to be power of 2")
            index = min(size.bit_length() - 1, ROUNDUP_INTERVALS - 1)
            if first:  # what lies below the first size named rounds as that size does
                table[:index] = [divisions] * index
            table[index] = divisions
            first, last = False, index
        if reader.peek() != "]":
            reader.expect(",", boundary)
    return tuple(table)


def write_settings(config: AllocatorConfig) -> str:
    """The shortest settings string that gives ``config``."""
    plain = type(config)()
    parts: list[str] = []
    others = (field.name for field in fields(config) if field.name not in _SIZES)
    for name in (*_SIZES, *others):
        value = getattr(config, name)
        usual = config.large_segment_size if name == "max_non_split_rounding" else getattr(plain, name)
        if value == usual:
            continue
        if name in _SIZES:
            parts.append(f"{name}_mb:{value // MIB}")
        elif name == "roundup_power2_divisions":
            parts.append(f"{name}:{_write_divisions(value)}")
        else:
            parts.append(f"{name}:{value}")
    return ",".join(parts)


def _write_divisions(table: tuple[int, ...]) -> str:
    if len(set(table)) == 1:
        return str(table[0]) if table[0] else "[1:0]"
    # The first size named stands for all below it, ">" for all above the last; what no size names is 0.
    begin = next(index for index, value in enumerate(table) if value != table[0]) - 1
    end = next(index for index in reversed(range(len(table))) if table[index] != table[-1])
    named = [(index, table[index]) for index in range(begin, end + 1) if index == begin or table[index]]
    parts = [f"{1 << index}:{value}" for index, value in named]
    if table[-1]:
        if named[-1][0] != end:
            parts.append(f"{1 << end}:{table[end]}")
        parts.append(f">:{table[-1]}")
    return "[" + ",".join(parts) + "]"
