"""The cards themselves: slices, modes, error correction, memory that they share with the host. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from vramfit.doctor.facts import Card, Facts
from vramfit.doctor.findings import Check, Finding, FindingArea, Severity
from vramfit.units import format_bytes

_ECC_SHARE = 0.0625
"""GDDR cards store the check bits in the memory itself, one sixteenth of it (NVIDIA, nvidia-smi manual: ECC mode)."""


def check_cards(facts: Facts) -> Iterator[Finding]:
    """Name each card with its memory."""
    for card in facts.cards:
        total = f"{format_bytes(card.total_bytes)}" if card.total_bytes else "memory shared with the host"
        yield Finding(
            check="card",
            area=FindingArea.CARDS,
            severity=Severity.OK,
            finding=f"GPU {card.index}: {card.name}, {total}",
        )


def check_mig(facts: Facts) -> Iterator[Finding]:
    """A card in MIG mode offers slices, of which a process sees one."""
    for card in facts.cards:
        if not card.mig_enabled:
            continue
        if not card.mig:
            yield Finding(
                check="mig",
                area=FindingArea.CARDS,
                severity=Severity.ERROR,
                finding=f"GPU {card.index} is in MIG mode, but no slice of it is visible here",
                why="in MIG mode only slices can be used: CUDA finds no card",
                fix="Create slices (nvidia-smi mig -cgi PROFILE -C), pass one into the container, or ask for MIG mode "
                "to be turned off",
            )
            continue
        listed = ", ".join(_slice(name, total) for name, total in ((m.name, m.total_bytes) for m in card.mig))
        yield Finding(
            check="mig",
            area=FindingArea.CARDS,
            severity=Severity.INFO,
            finding=f"GPU {card.index} is in MIG mode: {listed}",
            why="a process can use one slice, and no more than its memory; the card's own name and size mislead",
            fix="Choose it with CUDA_VISIBLE_DEVICES="
            + card.mig[0].uuid
            + ", and give vramfit the slice's size: "
            f"--gpu {_as_option(card.mig[0].total_bytes)}",
        )


def check_modes(facts: Facts) -> Iterator[Finding]:
    """Modes of a card that keep processes out or make them slow to start."""
    for card in facts.cards:
        if card.compute_mode in ("exclusive_process", "prohibited"):
            yield _compute_mode(card)
        if card.persistence is False and facts.host.system == "Linux" and not facts.host.wsl:
            yield Finding(
                check="persistence",
                area=FindingArea.CARDS,
                severity=Severity.INFO,
                finding=f"GPU {card.index}: persistence mode is off",
                why="the driver unloads when the last process leaves, so each start of CUDA takes seconds; "
                "memory is the same",
                fix="sudo systemctl enable --now nvidia-persistenced",
            )
        if card.ecc_pending is not None and card.ecc is not None and card.ecc_pending != card.ecc:
            change = "on" if card.ecc_pending else "off"
            yield Finding(
                check="ecc",
                area=FindingArea.CARDS,
                severity=Severity.WARNING,
                finding=f"GPU {card.index}: error correction goes {change} at the next restart",
                why="where the check bits lie in the card's own memory (GDDR), that changes its size by about "
                f"{_ECC_SHARE:.2%}",
                fix="Measure and plan after the restart",
            )
        elif card.ecc is not None:
            state = "on" if card.ecc else "off"
            yield Finding(
                check="ecc",
                area=FindingArea.CARDS,
                severity=Severity.OK,
                finding=f"GPU {card.index}: error correction is {state}; the total above counts it",
            )


def check_unified(facts: Facts) -> Iterator[Finding]:
    """Memory that host and card share, or that flows over into the host's."""
    for device in facts.torch.devices if facts.torch else ():
        if device.integrated:
            yield Finding(
                check="unified-memory",
                area=FindingArea.CARDS,
                severity=Severity.WARNING,
                finding=f"cuda:{device.index} ({device.name}) shares the host's memory",
                why="the host's programs and page cache take from the same memory: free bytes of the card change on "
                "their own, and offloading to the host gains nothing",
                fix="Close what holds host memory, drop caches before measuring, and set a budget below the total",
            )
    if facts.host.wsl or facts.host.system == "Windows":
        yield Finding(
            check="system-memory-fallback",
            area=FindingArea.CARDS,
            severity=Severity.WARNING,
            finding="Windows' driver manages the card's memory" + (" (WSL)" if facts.host.wsl else ""),
            why="past the card's memory it may move to the host's memory instead of failing: programs get many times "
            "slower and no torch.OutOfMemoryError tells; use per process is not reported either",
            fix="NVIDIA control panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback",
        )


def _compute_mode(card: Card) -> Finding:
    prohibited = card.compute_mode == "prohibited"
    return Finding(
        check="compute-mode",
        area=FindingArea.CARDS,
        severity=Severity.ERROR if prohibited else Severity.WARNING,
        finding=f"GPU {card.index}: compute mode is {'Prohibited' if prohibited else 'Exclusive_Process'}",
        why="no process can use it"
        if prohibited
        else "one process at a time: a second one (another rank, a child, a notebook) fails as if the card were busy",
        fix=f"sudo nvidia-smi -i {card.index} -c DEFAULT",
    )


def _slice(name: str, total: int | None) -> str:
    return f"{name or 'a slice'} ({format_bytes(total)})" if total else name or "a slice"


def _as_option(total: int | None) -> str:
    return f"{total / (1 << 30):.4g}GiB" if total else "SIZE"


CHECKS: tuple[Check, ...] = (check_cards, check_mig, check_modes, check_unified)
