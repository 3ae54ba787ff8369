"""What a compute capability fixes: resident threads, registers, shared memory.

Figures: CUDA C++ Programming Guide, section "Compute Capabilities", table "Technical Specifications per
Compute Capability". The opt-in limit of a block is the shared memory of the SM less the 1 KiB that CUDA keeps
per block (from capability 8.0 on).
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureLimits:
    """Limits shared by every card of one compute capability; shared memory in bytes."""

    max_threads_per_sm: int
    shared_memory_per_sm: int
    shared_memory_per_block_optin: int
    shared_memory_per_block: int = 48 * KIB
    registers_per_sm: int = 65_536
    warp_size: int = 32


def _limits(threads: int, shared_kib: int, optin_kib: int) -> ArchitectureLimits:
    return ArchitectureLimits(
        max_threads_per_sm=threads,
        shared_memory_per_sm=shared_kib * KIB,
        shared_memory_per_block_optin=optin_kib * KIB,
    )


LIMITS: dict[tuple[int, int], ArchitectureLimits] = {
    (6, 0): _limits(2048, 64, 48),
    (6, 1): _limits(2048, 96, 48),
    (6, 2): _limits(2048, 64, 48),
    (7, 0): _limits(2048, 96, 96),
    (7, 2): _limits(2048, 96, 96),
    (7, 5): _limits(1024, 64, 64),
    (8, 0): _limits(2048, 164, 163),
    (8, 6): _limits(1536, 100, 99),
    (8, 7): _limits(1536, 164, 163),
    (8, 9): _limits(1536, 100, 99),
    (9, 0): _limits(2048, 228, 227),
    (10, 0): _limits(2048, 228, 227),
    (10, 3): _limits(2048, 228, 227),
    (11, 0): _limits(1536, 228, 227),
    (12, 0): _limits(1536, 100, 99),
    (12, 1): _limits(1536, 100, 99),
}

ARCHITECTURES: dict[tuple[int, int], str] = {
    (6, 0): "Pascal",
    (6, 1): "Pascal",
    (6, 2): "Pascal",
    (7, 0): "Volta",
    (7, 2): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 6): "Ampere",
    (8, 7): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
    (10, 3): "Blackwell",
    (11, 0): "Blackwell",
    (12, 0): "Blackwell",
    (12, 1): "Blackwell",
}


def limits_of(compute_capability: tuple[int, int]) -> ArchitectureLimits:
    """Give the limits of a compute capability.

    Raises:
        KeyError: no card of that capability is known here; :data:`LIMITS` names those that are.
    """
    return LIMITS[compute_capability]
