"""The cards themselves: slices, modes, error correction, and what other processes hold of their memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from vramfit.doctor.card_accounting import accounts
from vramfit.doctor.facts import Card, Check, Facts, Finding, FindingArea, Process, Severity, Tool
from vramfit.units import MIB, format_bytes

_ECC_SHARE = 0.0625
"""GDDR cards store the check bits in the memory itself, one sixteenth of it (NVIDIA, nvidia-smi manual: ECC mode)."""


def check_cards(facts: Facts) -> Iterator[Finding]:
    """Name each card with its memory."""
    for card in facts.cards:
        total = f"{format_bytes(card.total_bytes)}" if card.total_bytes else "memory shared with the host"
        yield FindingArea.CARDS.ok("card", f"GPU {card.index}: {card.name}, {total}")


def check_mig(facts: Facts) -> Iterator[Finding]:
    """A card in MIG mode offers slices, of which a process sees one."""
    for card in facts.cards:
        if not card.mig_enabled:
            continue
        if not card.mig:
            yield FindingArea.CARDS.error(
                "mig",
                f"GPU {card.index} is in MIG mode, but no slice of it is visible here",
                why="in MIG mode only slices can be used: CUDA finds no card",
                fix="Create slices (nvidia-smi mig -cgi PROFILE -C), pass one into the container, or ask for MIG mode "
                "to be turned off",
            )
            continue
        listed = ", ".join(_slice(one.name, one.total_bytes) for one in card.mig)
        yield FindingArea.CARDS.info(
            "mig",
            f"GPU {card.index} is in MIG mode: {listed}",
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
            yield FindingArea.CARDS.info(
                "persistence",
                f"GPU {card.index}: persistence mode is off",
                why="the driver unloads when the last process leaves, so each start of CUDA takes seconds; "
                "memory is the same",
                fix="sudo systemctl enable --now nvidia-persistenced",
            )
        if card.ecc_pending is not None and card.ecc is not None and card.ecc_pending != card.ecc:
            change = "on" if card.ecc_pending else "off"
            yield FindingArea.CARDS.warning(
                "ecc",
                f"GPU {card.index}: error correction goes {change} at the next restart",
                why="where the check bits lie in the card's own memory (GDDR), that changes its size by about "
                f"{_ECC_SHARE:.2%}",
                fix="Measure and plan after the restart",
            )
        elif card.ecc is not None:
            state = "on" if card.ecc else "off"
            yield FindingArea.CARDS.ok(
                "ecc", f"GPU {card.index}: error correction is {state}; the total above counts it"
            )


def check_unified(facts: Facts) -> Iterator[Finding]:
    """Memory that host and card share, or that flows over into the host's."""
    for device in facts.torch.devices if facts.torch else ():
        if device.integrated:
            yield FindingArea.CARDS.warning(
                "unified-memory",
                f"cuda:{device.index} ({device.name}) shares the host's memory",
                why="the host's programs and page cache take from the same memory: free bytes of the card change on "
                "their own, and offloading to the host gains nothing",
                fix="Close what holds host memory, drop caches before measuring, and set a budget below the total",
            )
    if facts.host.wsl or facts.host.system == "Windows":
        yield FindingArea.CARDS.warning(
            "system-memory-fallback",
            "Windows' driver manages the card's memory" + (" (WSL)" if facts.host.wsl else ""),
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


_NOTABLE = 0.02
"""Share of a card from which a neighbour's memory is worth a warning: a desktop holds less on most cards."""
_UNACCOUNTED = 64 * MIB
"""What may be left over: figures of driver and torch are not taken at one instant."""
_LISTED = 5


def check_processes(facts: Facts) -> Iterator[Finding]:
    """Other processes on the cards."""
    for card in facts.cards:
        if not card.processes:
            continue
        held = sum(process.used_bytes or 0 for process in card.processes)
        known = all(process.used_bytes is not None for process in card.processes)
        heavy = held > card.total_bytes * _NOTABLE
        more = len(card.processes) - _LISTED
        order = sorted(card.processes, key=lambda process: -(process.used_bytes or 0))
        listed = ", ".join(_describe(process) for process in order[:_LISTED])
        yield Finding(
            check="processes",
            area=FindingArea.CARDS,
            severity=Severity.WARNING if heavy or not known else Severity.INFO,
            finding=f"GPU {card.index}: other processes hold {format_bytes(held) if known else 'memory'}: {listed}"
            + (f" and {more} more" if more > 0 else ""),
            why="what they hold is missing for your program, and may grow while it runs",
            fix=f"End those that are not needed (kill {order[0].pid}), or keep below what is left: "
            f"--budget {_left(card.total_bytes, card.reserved_bytes, held)}",
        )


def check_unaccounted(facts: Facts) -> Iterator[Finding]:
    """Memory in use that belongs to no process that the driver names."""
    for account in accounts(facts):
        if any(process.used_bytes is None for process in account.processes):
            continue  # the driver does not tell how much each holds: nothing can be left over
        if account.unaccounted <= max(_UNACCOUNTED, account.total * 0.005):
            continue
        inside = bool(facts.container.kind)
        yield FindingArea.CARDS.warning(
            "unaccounted",
            f"GPU {account.index}: {format_bytes(account.unaccounted)} are in use by no process that is "
            "visible here",
            why="processes of other containers or users hold it"
            if inside
            else "processes of other users or containers hold it, or one that was ended left it behind",
            fix="Run nvidia-smi outside the container"
            if inside
            else "sudo fuser -v /dev/nvidia* lists them all; restart the card's last holder",
        )


def check_agreement(facts: Facts) -> Iterator[Finding]:
    """What torch calls total is what the driver has, less what it reserves."""
    for account in accounts(facts):
        if account.torch_total is None:
            continue
        usable = account.total - account.driver_reserved
        apart = usable - account.torch_total
        context = (
            ""
            if account.own_context is None
            else f", a CUDA context takes {format_bytes(account.own_context)}"
        )
        plain = (
            f"GPU {account.index} is cuda:{account.torch_index}: of {format_bytes(account.total)} torch can have "
            f"{format_bytes(account.torch_total)}{context}"
        )
        if account.driver_reserved and abs(apart) > max(_UNACCOUNTED, account.total * 0.01):
            yield FindingArea.CARDS.warning(
                "agreement",
                f"{plain}; the driver says {format_bytes(usable)}",
                why="a virtual machine, a slice or MPS gives this process another share than the card's whole",
                fix=f"Plan with torch's figure: --gpu {account.torch_total}B",
            )
        else:
            yield FindingArea.CARDS.ok("agreement", plain)


def check_tool(facts: Facts) -> Iterator[Finding]:
    """NVML reports more than the nvidia-smi command."""
    if facts.driver is not None and facts.driver.tool is Tool.NVIDIA_SMI:
        yield FindingArea.DRIVER.info(
            "nvml",
            "nvidia-ml-py is not installed, so nvidia-smi was asked",
            why="figures are rounded to MiB, and processes that draw are left out",
            fix="pip install 'vramfit[nvml]'",
        )


def check_mps(facts: Facts) -> Iterator[Finding]:
    """The multi-process service may limit what a client gets."""
    limit = facts.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    if limit:
        yield FindingArea.CARDS.warning(
            "mps",
            f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={limit}",
            why="under MPS this process may take no more than that, though the card has more",
            fix="Unset it, or plan with that size",
        )


def _describe(process: Process) -> str:
    name = process.name.rsplit("/", 1)[-1] or "?"
    size = "" if process.used_bytes is None else f" {format_bytes(process.used_bytes)}"
    return f"{name} (pid {process.pid}{', drawing' if process.graphics else ''}){size}"


def _left(total: int, reserved: int | None, held: int) -> str:
    return f"{max(0, total - (reserved or 0) - held) // MIB}MiB"


CHECKS: tuple[Check, ...] = (
    check_cards,
    check_mig,
    check_modes,
    check_unified,
    check_processes,
    check_unaccounted,
    check_agreement,
    check_tool,
    check_mps,
)
