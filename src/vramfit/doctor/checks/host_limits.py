"""The host's memory, its limits, shared memory and disks. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from vramfit.doctor.facts import Check, Facts, Finding, FindingArea, Severity
from vramfit.units import GIB, MIB, format_bytes

_SMALL_SHARED = GIB
_LOW_AVAILABLE = 0.1
_SMALL_SCRATCH = 10 * GIB
_SMALL_LOCKED = 64 * MIB
_IN_MEMORY = ("tmpfs", "ramfs")


def check_memory(facts: Facts) -> Iterator[Finding]:
    """The host has room for what is loaded and offloaded."""
    host, container = facts.host, facts.container
    if not host.memory_bytes:
        return
    limit = container.memory_max_bytes
    usable = min(host.memory_bytes, limit) if limit else host.memory_bytes
    largest = max((card.total_bytes for card in facts.cards), default=0)
    if limit is not None and limit < host.memory_bytes:
        used = container.memory_used_bytes or 0
        tight = used > limit * (1 - _LOW_AVAILABLE)
        yield Finding(
            check="container-memory",
            area=FindingArea.HOST,
            severity=Severity.WARNING if tight else Severity.INFO,
            finding=f"{_who(container.kind)} allows {format_bytes(limit)} of the host's "
            f"{format_bytes(host.memory_bytes)}; {format_bytes(used)} are in use",
            why="past it the kernel kills the process (exit code 137, 'Killed') without a word from torch; pinned "
            "memory, /dev/shm and files in tmpfs count too",
            fix="Raise it (docker run --memory, resources.limits.memory, sbatch --mem), or load checkpoints with "
            "torch.load(mmap=True) and safetensors",
        )
    elif host.available_bytes and host.available_bytes < host.memory_bytes * _LOW_AVAILABLE:
        yield FindingArea.HOST.warning(
            "host-memory",
            f"{format_bytes(host.available_bytes)} of {format_bytes(host.memory_bytes)} of host memory are "
            "available",
            why="loading a model or its checkpoint may end in swapping or in the kernel killing the process",
            fix="End other programs, or add memory or swap",
        )
    else:
        yield FindingArea.HOST.ok(
            "host-memory",
            f"{format_bytes(host.memory_bytes)} of host memory, {format_bytes(host.available_bytes)} available",
        )
    if largest > usable:
        yield FindingArea.HOST.warning(
            "host-smaller",
            f"the host's {format_bytes(usable)} are less than the card's {format_bytes(largest)}",
            why="a model that fills the card cannot pass through host memory when it is loaded, and little can be "
            "offloaded",
            fix="Build on the card (torch.device('cuda') or 'meta'), load shard by shard, map checkpoints into memory",
        )


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """DataLoader workers hand tensors over through /dev/shm."""
    place = facts.host.shared_memory
    if place is None:
        return
    size = f"/dev/shm has {format_bytes(place.total_bytes)}, {format_bytes(place.free_bytes)} free"
    if place.total_bytes >= _SMALL_SHARED and place.free_bytes >= _SMALL_SHARED // 4:
        yield FindingArea.HOST.ok("shared-memory", size)
        return
    small = place.total_bytes < _SMALL_SHARED
    fixes = {
        "kubernetes": "Mount an emptyDir with medium: Memory at /dev/shm",
        "podman": "Start the container with --shm-size=8g or --ipc=host",
        "docker": "Start the container with --shm-size=8g or --ipc=host",
    }
    yield FindingArea.HOST.warning(
        "shared-memory",
        size,
        why="batches of DataLoader(num_workers > 0) and NCCL's buffers pass through it: beyond it workers die with "
        "'Bus error' or 'unable to allocate shared memory(shm)'",
        fix=fixes.get(facts.container.kind, "sudo mount -o remount,size=8G /dev/shm")
        if small
        else "Remove what ended programs left there: ls -la /dev/shm",
    )


def check_locked_memory(facts: Facts) -> Iterator[Finding]:
    """Page-locked memory, which fast copies to the card need."""
    host = facts.host
    if host.wsl:
        yield FindingArea.HOST.warning(
            "pinned-memory",
            "WSL limits page-locked memory",
            why="pin_memory=True, offloading and non_blocking copies may fail with 'out of memory' long before the "
            "host's memory is used up",
            fix="Pin less, or raise memory= in %UserProfile%\\.wslconfig",
        )
    limit = host.locked_limit_bytes
    if host.infiniband and limit is not None and limit < _SMALL_LOCKED:
        yield FindingArea.HOST.warning(
            "locked-memory",
            f"ulimit -l is {format_bytes(limit)}, and there is an InfiniBand adapter",
            why="NCCL registers its buffers with the adapter, which counts against this limit: 'Cannot allocate "
            "memory' from ibv_reg_mr (what torch pins for the card does not count)",
            fix="docker run --ulimit memlock=-1, or memlock unlimited in /etc/security/limits.conf",
        )
    elif not host.wsl:
        size = "unlimited" if limit is None else format_bytes(limit)
        yield FindingArea.HOST.ok(
            "locked-memory", f"ulimit -l is {size}; what torch pins for the card does not count against it"
        )


def check_address_space(facts: Facts) -> Iterator[Finding]:
    """CUDA reserves far more addresses than it uses memory."""
    host = facts.host
    limit = host.address_space_limit_bytes
    if limit is not None:
        yield Finding(
            check="address-space",
            area=FindingArea.HOST,
            severity=Severity.ERROR if facts.cards else Severity.WARNING,
            finding=f"ulimit -v is {format_bytes(limit)}",
            why="CUDA reserves addresses for the memory of the host and of all cards at once, and expandable segments "
            "more of them: it fails to start, or later with 'out of memory' although memory is free",
            fix="ulimit -v unlimited; limit memory with a control group instead",
        )
    if host.overcommit == 2:
        room = (host.commit_limit_bytes or 0) - (host.committed_bytes or 0)
        yield FindingArea.HOST.warning(
            "overcommit",
            f"vm.overcommit_memory is 2: {format_bytes(max(0, room))} may still be promised",
            why="addresses that are only reserved count as memory: forked DataLoader workers and CUDA fail while "
            "memory is free",
            fix="sudo sysctl vm.overcommit_memory=0",
        )


def check_swap(facts: Facts) -> Iterator[Finding]:
    """Whether there is swap."""
    host = facts.host
    if not host.swap_bytes and host.memory_bytes:
        yield FindingArea.HOST.info(
            "swap",
            "no swap",
            why="what does not fit host memory is killed at once; pinned memory could not be swapped anyway",
            fix="Nothing to do, unless loading checkpoints ends in 'Killed'",
        )


def check_scratch(facts: Facts) -> Iterator[Finding]:
    """Where tensors could be offloaded to, and traces be written."""
    place = facts.host.scratch
    if place is None:
        return
    size = f"{place.path} ({place.filesystem or 'unknown file system'}) has {format_bytes(place.free_bytes)} free"
    if place.filesystem in _IN_MEMORY:
        yield FindingArea.HOST.warning(
            "scratch",
            size,
            why="it lies in host memory: offloading tensors there frees nothing",
            fix="Point TMPDIR and offload folders to a disk",
        )
    elif place.free_bytes < _SMALL_SCRATCH:
        yield FindingArea.HOST.warning(
            "scratch",
            size,
            why="little room for offloading to disk, for checkpoints and for traces",
            fix="Free some space, or point TMPDIR to another disk",
        )
    else:
        yield FindingArea.HOST.ok("scratch", size)


def _who(kind: str) -> str:
    return (
        f"the {kind.capitalize()} {'job' if kind == 'slurm' else 'container'}" if kind else "a control group"
    )


CHECKS: tuple[Check, ...] = (
    check_memory,
    check_shared_memory,
    check_locked_memory,
    check_address_space,
    check_swap,
    check_scratch,
)
