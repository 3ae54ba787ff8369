"""Who else holds memory of the cards, and whether driver and torch agree on what is left. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from vramfit.doctor.card_accounting import accounts
from vramfit.doctor.facts import Facts, Process, Tool
from vramfit.doctor.findings import Check, Finding, FindingArea, Severity
from vramfit.units import MIB, format_bytes

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
        yield Finding(
            check="unaccounted",
            area=FindingArea.CARDS,
            severity=Severity.WARNING,
            finding=f"GPU {account.index}: {format_bytes(account.unaccounted)} are in use by no process that is "
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
            yield Finding(
                check="agreement",
                area=FindingArea.CARDS,
                severity=Severity.WARNING,
                finding=f"{plain}; the driver says {format_bytes(usable)}",
                why="a virtual machine, a slice or MPS gives this process another share than the card's whole",
                fix=f"Plan with torch's figure: --gpu {account.torch_total}B",
            )
        else:
            yield Finding(check="agreement", area=FindingArea.CARDS, severity=Severity.OK, finding=plain)


def check_tool(facts: Facts) -> Iterator[Finding]:
    """NVML tells more than the command."""
    if facts.driver is not None and facts.driver.tool is Tool.NVIDIA_SMI:
        yield Finding(
            check="nvml",
            area=FindingArea.DRIVER,
            severity=Severity.INFO,
            finding="nvidia-ml-py is not installed, so nvidia-smi was asked",
            why="figures are rounded to MiB, and processes that draw are left out",
            fix="pip install 'vramfit[nvml]'",
        )


def check_mps(facts: Facts) -> Iterator[Finding]:
    """The multi-process service may limit what a client gets."""
    limit = facts.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    if limit:
        yield Finding(
            check="mps",
            area=FindingArea.CARDS,
            severity=Severity.WARNING,
            finding=f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={limit}",
            why="under MPS this process may take no more than that, though the card has more",
            fix="Unset it, or plan with that size",
        )


def _describe(process: Process) -> str:
    name = process.name.rsplit("/", 1)[-1] or "?"
    size = "" if process.used_bytes is None else f" {format_bytes(process.used_bytes)}"
    return f"{name} (pid {process.pid}{', drawing' if process.graphics else ''}){size}"


def _left(total: int, reserved: int | None, held: int) -> str:
    return f"{max(0, total - (reserved or 0) - held) // MIB}MiB"


CHECKS: tuple[Check, ...] = (check_processes, check_unaccounted, check_agreement, check_tool, check_mps)
