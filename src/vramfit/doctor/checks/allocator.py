"""Settings of the caching allocator and of CUDA in the environment. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.config import misread_numbers
from vramfit.allocator.versions import (
    ALLOC_CONF_VARIABLES,
    REFERENCE_VERSION,
    TorchVersion,
    alloc_conf_from_env,
)
from vramfit.doctor.facts import Check, Facts, Finding, FindingArea, Severity
from vramfit.errors import ConfigError
from vramfit.units import KIB, MIB, format_bytes

_NATIVE_ONLY = (
    "max_split_size",
    "expandable_segments",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "large_segment_size",
)


def check_settings(facts: Facts) -> Iterator[Finding]:
    """The settings can be read, and say one thing."""
    version = _version(facts)
    names = [name for name in ALLOC_CONF_VARIABLES if name in facts.environ]
    if not names:
        yield FindingArea.ALLOCATOR.ok("alloc-conf", "no settings: the allocator's defaults")
        return
    text = alloc_conf_from_env(facts.environ)
    yield from _several(facts, names)
    try:
        config = AllocatorConfig.parse(text, torch_version=version)
    except ConfigError as error:
        yield FindingArea.ALLOCATOR.error(
            "alloc-conf",
            f"{names[0]}: {error.message.removeprefix('allocator settings ')}",
            why=f"torch {version[0]}.{version[1]} refuses the whole string when CUDA starts, and the program fails",
            fix=error.hint or f"Correct it or unset {names[0]}",
        )
        return
    if facts.torch is not None and facts.torch.settings_error:
        yield FindingArea.ALLOCATOR.error(
            "alloc-conf",
            f"torch refuses {names[0]}={text!r}: {facts.torch.settings_error}",
            why="the program fails when CUDA starts",
            fix=f"Correct it or unset {names[0]}",
        )
        return
    for note in misread_numbers(text, version):
        yield FindingArea.ALLOCATOR.warning(
            "alloc-conf-sense",
            note,
            why="torch does not complain: the setting is another than the one that is written",
            fix=f"Correct {names[0]}",
        )
    yield from _contradictions(config, facts)
    yield FindingArea.ALLOCATOR.ok(
        "alloc-conf", f"{names[0]}={text}" if text else f"{names[0]} is empty: the allocator's defaults"
    )


def _several(facts: Facts, names: list[str]) -> Iterator[Finding]:
    others = [name for name in names[1:] if facts.environ[name] != facts.environ[names[0]]]
    if others:
        ignored = " and ".join(f"{name}={facts.environ[name]}" for name in others)
        yield FindingArea.ALLOCATOR.warning(
            "alloc-conf-variables",
            f"{names[0]} wins; {ignored} is ignored",
            why="the first variable that is set decides alone, even when it is empty: settings are not merged",
            fix=f"Keep one: put all settings into {names[0]} and unset the others",
        )


def _contradictions(config: AllocatorConfig, facts: Facts) -> Iterator[Finding]:
    def finding(text: str, why: str, fix: str, severity: Severity = Severity.WARNING) -> Finding:
        return Finding(
            check="alloc-conf-sense",
            area=FindingArea.ALLOCATOR,
            severity=severity,
            finding=text,
            why=why,
            fix=fix,
        )

    plain = AllocatorConfig()
    native = [name for name in _NATIVE_ONLY if getattr(config, name) != getattr(plain, name)]
    if config.backend != "native":
        if native:
            yield finding(
                f"backend:cudaMallocAsync with {', '.join(native)}",
                "that backend leaves memory to CUDA's own pools: these settings do nothing there",
                "Drop them, or go back to backend:native",
            )
        yield finding(
            "backend:cudaMallocAsync",
            "no memory history is recorded, and the virtual GPU models the native backend",
            "Use backend:native while measuring",
        )
        return
    if config.expandable_segments and config.max_split_size is not None:
        yield finding(
            f"expandable_segments:True with max_split_size_mb:{config.max_split_size // MIB}",
            "blocks above that size are never split, also not in a segment that could grow: each new size maps new "
            "pages, and reserved memory can grow to many times what is allocated",
            "Keep expandable_segments:True alone",
        )
    if config.expandable_segments and (facts.host.system == "Windows"):
        yield finding(
            "expandable_segments:True on Windows",
            "this platform has none: torch warns once and goes on without",
            "Drop it",
        )
    if config.garbage_collection_threshold and config.per_process_memory_fraction >= 1.0:
        yield finding(
            f"garbage_collection_threshold:{config.garbage_collection_threshold:g} without a memory fraction",
            "old cached blocks are collected only where a limit is set for the process, so it does nothing",
            "Add per_process_memory_fraction:0.95, or call torch.cuda.set_per_process_memory_fraction",
        )
    if config.per_process_memory_fraction < 1.0:
        yield finding(
            f"per_process_memory_fraction:{config.per_process_memory_fraction:g}",
            "torch gives up at that share of the card, though the rest is free",
            "Nothing to do if that is meant",
            Severity.INFO,
        )
    if any(division > 1 for division in config.roundup_power2_divisions):
        yield finding(
            "roundup_power2_divisions is set",
            "requests are rounded up: fewer distinct sizes and less fragmentation, but each block may be larger",
            "vramfit replay --alloc-conf shows what it costs on a recording",
            Severity.INFO,
        )


def check_caching(facts: Facts) -> Iterator[Finding]:
    """The allocator caches."""
    # c10/cuda/CUDACachingAllocator.cpp, forceUncachedAllocator: only whether it is set counts.
    value = facts.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
    if value is not None:
        yield FindingArea.ALLOCATOR.warning(
            "caching",
            f"PYTORCH_NO_CUDA_MEMORY_CACHING={value}",
            why="whatever its value, even 0: each tensor is a cudaMalloc and a cudaFree of its own, programs are "
            "several times slower, memory_stats() stays at 0 and no memory history is recorded",
            fix="Unset it, unless you look for memory errors with compute-sanitizer",
        )


def check_cublas(facts: Facts) -> Iterator[Finding]:
    """The size of cuBLAS' workspaces."""
    text = facts.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if text is None:
        return
    # aten/src/ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize: pairs of :KiB:count, the default if there is none.
    pairs = re.findall(r":([0-9]+):([0-9]+)", text)
    if not pairs:
        yield FindingArea.ALLOCATOR.warning(
            "cublas-workspace",
            f"CUBLAS_WORKSPACE_CONFIG={text!r} cannot be read",
            why="torch warns and takes its default; deterministic algorithms of cuBLAS are not ensured",
            fix="CUBLAS_WORKSPACE_CONFIG=:4096:8 (or :16:8, smaller and slower)",
        )
        return
    size = sum(int(size) * KIB * int(count) for size, count in pairs)
    yield FindingArea.ALLOCATOR.info(
        "cublas-workspace",
        f"CUBLAS_WORKSPACE_CONFIG={text}: {format_bytes(size)} for each handle and stream",
        why="torch holds that much for cuBLAS, usually twice in training (autograd's thread has a handle of its own)",
        fix="Nothing to do if that is meant",
    )


def check_launching(facts: Facts) -> Iterator[Finding]:
    """How CUDA loads and starts kernels."""
    if facts.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield FindingArea.ALLOCATOR.warning(
            "launch-blocking",
            "CUDA_LAUNCH_BLOCKING is on",
            why="each kernel is waited for: programs are slower; memory stays nearly the same",
            fix="Unset it once the error that it was set for is found",
        )
    if facts.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER":
        yield FindingArea.ALLOCATOR.warning(
            "module-loading",
            "CUDA_MODULE_LOADING=EAGER",
            why="all kernels of all libraries are loaded at the start, hundreds of MiB of the card outside torch",
            fix="Unset it: since CUDA 11.7 kernels are loaded when they are first used (LAZY)",
        )


def _version(facts: Facts) -> TorchVersion:
    return facts.torch.version_pair if facts.torch else REFERENCE_VERSION


CHECKS: tuple[Check, ...] = (check_settings, check_caching, check_cublas, check_launching)
