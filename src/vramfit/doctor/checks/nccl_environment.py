"""NCCL's settings in the environment and in its files: what each does to memory, and what is misread. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from vramfit.doctor.facts import Check, Facts, Finding, FindingArea
from vramfit.errors import UnknownGpuError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.gpus.nccl.collective_times import NcclCollective, RankLayout
from vramfit.gpus.nccl.communicator_use import ByteRange, CommunicatorUse
from vramfit.gpus.nccl.nccl_buffers import in_blocks
from vramfit.gpus.nccl.nccl_memory import communicator_memory, library_part
from vramfit.gpus.nccl.nccl_settings import NcclSettings, nccl_number
from vramfit.gpus.nccl.node_types import usual_node
from vramfit.units import format_bytes

_WORDS = frozenset({"NCCL_ALGO", "NCCL_DEBUG", "NCCL_P2P_LEVEL", "NCCL_PROTO"})
"""Variables that are not numbers."""
_OFF = ("", "0")


def nccl_environ(facts: Facts) -> Mapping[str, str]:
    """NCCL's variables as NCCL sees them: of the environment, else of its files."""
    from_files = {one.name: one.value for one in facts.nccl_files}
    own = {name: value for name, value in facts.environ.items() if name.startswith("NCCL_")}
    return from_files | own


def check_numbers(facts: Facts) -> Iterator[Finding]:
    """NCCL reads a number up to the first other character, and a word as 0."""
    for name, text in nccl_environ(facts).items():
        read = nccl_number(text)
        if name in _WORDS or read is None or re.fullmatch(r"\s*[+-]?(0[xX][0-9a-fA-F]+|[1-9][0-9]*|0)", text):
            continue
        yield FindingArea.RANKS.warning(
            "nccl-number",
            f"{name}={text!r} means {read} to NCCL",
            why="it reads digits from the left, ignores what follows, and takes a leading 0 for octal: sizes are bytes "
            "without a unit",
            fix=f"Write the plain number, or unset {name}",
        )


def check_files(facts: Facts) -> Iterator[Finding]:
    """Files of NCCL set variables that nobody sees in the environment."""
    hidden = [one for one in facts.nccl_files if one.name not in facts.environ]
    if hidden:
        yield FindingArea.RANKS.info(
            "nccl-files",
            "; ".join(f"{one.path} sets {one.name}={one.value}" for one in hidden),
            why="NCCL reads them where the environment does not set the variable",
            fix="Nothing to do if that is meant; a variable of the environment wins over them",
        )


def _value(name: str, environ: Mapping[str, str]) -> int:
    return nccl_number(environ[name]) or 0


def _buffers(name: str, environ: Mapping[str, str]) -> str:
    settings = NcclSettings.from_environ(environ)
    taken = in_blocks(4096 + settings.connection_buffers)
    return (
        f"{format_bytes(_value(name, environ))} of the buffers of each connection; with those of the other protocols "
        f"{format_bytes(taken)} for each channel and neighbour, where the default is 10.00 MiB"
    )


def _channels(name: str, environ: Mapping[str, str]) -> str:
    bound = "at least" if "_MIN_" in name else "at most"
    kind = "channels of send and receive" if "P2P" in name else "channels"
    return (
        f"{bound} {_value(name, environ)} {kind}: memory grows linearly with them, 12 MiB a channel and neighbour "
        "and 6 MiB of arrays a channel, and so does the bandwidth up to a point"
    )


def _chunk(name: str, environ: Mapping[str, str]) -> str:
    return (
        f"slots of {format_bytes(_value(name, environ))}, 16 for each channel, in pools for send and receive: "
        "512 MiB a communicator at 64 channels of the default 512 KiB"
    )


def _switch(on: str, off: str) -> Callable[[str, Mapping[str, str]], str]:
    def told(name: str, environ: Mapping[str, str]) -> str:
        return on if _value(name, environ) else off

    return told


def _always(text: str) -> Callable[[str, Mapping[str, str]], str]:
    return lambda *_: text


_AT_ONCE = (
    "each new communicator connects its rings and trees at once and takes a pool for send and receive, also for what "
    "it never does; arrays of channels no longer take 2 MiB each"
)
_LAZY = (
    "an algorithm is connected when it is first used, and each small array of a channel takes 2 MiB of the card, "
    "about 200 MiB a communicator over NVLink"
)
_HOST_ONLY = "threads and sockets of the host for TCP (their product at most 64); nothing on the card"
_MEANINGS: Mapping[str, Callable[[str, Mapping[str, str]], str]] = {
    "NCCL_ALGO": _always("what is never chosen is never connected: rings alone take least of a card"),
    "NCCL_BUFFSIZE": _buffers,
    "NCCL_COMM_SPLIT_SHARE_RESOURCES": _switch(
        "split communicators use the buffers of the one that they are split from",
        "each split communicator takes buffers of its own, as by default",
    ),
    "NCCL_CUMEM_ENABLE": _switch(_LAZY, _AT_ONCE),
    "NCCL_CUMEM_HOST_ENABLE": _switch(
        "buffers in host memory are CUDA's own rather than files of /dev/shm",
        "buffers in host memory are files of /dev/shm, which may be small in a container",
    ),
    "NCCL_DEBUG": _always(
        "lines in the log, nothing on the card; with NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=ALLOC,INIT they tell each "
        "allocation and the number of channels"
    ),
    "NCCL_IB_DISABLE": _switch(
        "nodes talk over TCP: buffers for other nodes lie in host memory instead of on the card, and all is slower",
        "InfiniBand and RoCE are used where they are, as by default",
    ),
    "NCCL_LL128_BUFFSIZE": _buffers,
    "NCCL_LL_BUFFSIZE": _buffers,
    "NCCL_NCHANNELS_PER_NET_PEER": _always(
        "channels to each rank of another node for send and receive, and, as the least of all pairs counts, to ranks "
        "of the same node too: memory of an all-to-all is linear in it"
    ),
    "NCCL_NSOCKS_PERTHREAD": _always(_HOST_ONLY),
    "NCCL_NVLS_CHUNKSIZE": _always("eight chunks for each channel, direction and card of the node"),
    "NCCL_NVLS_ENABLE": _switch(
        "NVLink SHARP on Hopper and later: 256 MiB of each of eight H100 for a communicator that uses it",
        "no NVLink SHARP: 256 MiB less on each of eight H100 for a communicator that would use it; slower all-reduce",
    ),
    "NCCL_NVLS_NCHANNELS": _always(
        "channels of NVLink SHARP: 2 MiB for each and each card of the node, and 2 MiB of arrays"
    ),
    "NCCL_P2P_DISABLE": _switch(
        "cards of a node meet in host memory: no connection takes memory of a card, /dev/shm takes it instead, and "
        "all is slower",
        "cards reach each other directly where they can, as by default",
    ),
    "NCCL_P2P_LEVEL": _always(
        "how far apart cards may be and still reach each other directly; those further apart meet in host memory"
    ),
    "NCCL_P2P_NET_CHUNKSIZE": _chunk,
    "NCCL_P2P_NVL_CHUNKSIZE": _chunk,
    "NCCL_P2P_PCI_CHUNKSIZE": _chunk,
    "NCCL_PROTO": _always(
        "nothing: every connection has the buffers of all three protocols, whichever are used"
    ),
    "NCCL_RUNTIME_CONNECT": _switch(_LAZY, _AT_ONCE),
    "NCCL_SHM_DISABLE": _switch(
        "cards that cannot reach each other directly talk over the network inside of the node too",
        "cards that cannot reach each other directly meet in host memory, as by default",
    ),
    "NCCL_SOCKET_NTHREADS": _always(_HOST_ONLY),
} | dict.fromkeys(
    (
        "NCCL_MAX_CTAS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MAX_NRINGS",
        "NCCL_MAX_P2P_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MIN_NRINGS",
        "NCCL_MIN_P2P_NCHANNELS",
    ),
    _channels,
)
"""What each variable does to memory; the figures are those of `vramfit.gpus.nccl`."""


def check_nccl_settings(facts: Facts) -> Iterator[Finding]:
    """What each setting does to memory."""
    environ = nccl_environ(facts)
    for name, meaning in sorted(_MEANINGS.items()):
        if environ.get(name):
            yield FindingArea.RANKS.info(
                "nccl-setting",
                f"{name}={environ[name]}",
                why=meaning(name, environ),
                fix="Nothing to do if that is meant; vramfit's estimate of NCCL's memory counts with it",
            )


def check_contradictions(facts: Facts) -> Iterator[Finding]:
    """Settings that fight each other."""
    environ = nccl_environ(facts)
    settings = NcclSettings.from_environ(environ)
    if not settings.p2p and not settings.shm:
        yield FindingArea.RANKS.warning(
            "nccl-sense",
            "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE",
            why="cards of one node can meet neither directly nor in host memory: everything goes out to the network "
            "adapter and back, or NCCL finds no way at all",
            fix="Unset NCCL_SHM_DISABLE; give a container more of it with --shm-size",
        )
    least = max(settings.min_channels or 0, settings.min_ctas or 0)
    most = min(settings.max_channels or least, settings.max_ctas or least)
    if most < least:
        yield FindingArea.RANKS.warning(
            "nccl-sense",
            f"at least {least} channels are asked for, and at most {most}",
            why=f"the lower bound wins: memory is that of {least} channels",
            fix="Unset one of them",
        )
    threads = nccl_number(environ.get("NCCL_SOCKET_NTHREADS", "")) or 1
    sockets = nccl_number(environ.get("NCCL_NSOCKS_PERTHREAD", "")) or 1
    if threads * sockets > 64:
        yield FindingArea.RANKS.warning(
            "nccl-sense",
            f"NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD is {threads * sockets}",
            why="NCCL uses 64 sockets at most, and then fewer for each thread",
            fix="Keep their product at 64 or below",
        )


def check_torch_of_nccl(facts: Facts) -> Iterator[Finding]:
    """What torch's own variables for NCCL do to memory."""
    environ = facts.environ
    if "TORCH_NCCL_AVOID_RECORD_STREAMS" in environ:
        yield FindingArea.RANKS.info(
            "record-streams",
            f"TORCH_NCCL_AVOID_RECORD_STREAMS={environ['TORCH_NCCL_AVOID_RECORD_STREAMS']}",
            why="it does nothing since torch 2.8, which always keeps a collective's tensors until it is waited for "
            "instead of calling record_stream; before, 1 lowered the reserved memory of tensor parallelism and FSDP2",
            fix="Unset it; wait() for the work of asynchronous collectives, which is what frees their tensors",
        )
    hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    if environ.get(hook, "0") not in _OFF:
        expandable = "expandable_segments:true" in _alloc_conf(environ)
        yield FindingArea.RANKS.info(
            "register-hook",
            f"{hook}={environ[hook]}",
            why="torch registers each segment of its allocator with NCCL, which then sends from it without buffers of "
            "its own; registered segments stay mapped"
            + ("; with expandable segments torch ignores it" if expandable else ""),
            fix="Drop one of the two" if expandable else "Nothing to do if that is meant",
        )
    if environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0") not in _OFF:
        yield FindingArea.RANKS.info(
            "flight-recorder",
            f"TORCH_NCCL_TRACE_BUFFER_SIZE={environ['TORCH_NCCL_TRACE_BUFFER_SIZE']}",
            why="torch keeps that many collectives with their stacks in host memory; nothing on the card",
            fix="Nothing to do if that is meant",
        )
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS"):
        yield FindingArea.RANKS.info(
            "connections",
            f"CUDA_DEVICE_MAX_CONNECTIONS={environ['CUDA_DEVICE_MAX_CONNECTIONS']}",
            why="kernels of all streams go through so many queues: with 1 they start in the program's order, which "
            "Megatron's overlap needs, and FSDP's prefetching starts late; torch allocates the same, but blocks may "
            "wait longer for other streams",
            fix="Keep 1 for Megatron's tensor and context parallelism; else unset it",
        )


def _alloc_conf(environ: Mapping[str, str]) -> str:
    texts = (environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return ",".join(texts).replace(" ", "").lower()


def check_nccl_memory(facts: Facts) -> Iterator[Finding]:
    """What NCCL would take of each of the cards here."""
    names = Counter(card.name for card in facts.cards if not card.mig_enabled)
    for name, count in names.items():
        spec = _known(name)
        if count < 2 or spec is None:
            continue
        settings = NcclSettings.from_environ(nccl_environ(facts))
        node = replace(usual_node(spec), cards=count)
        layout = RankLayout(card=spec, node=node, ranks=count, settings=settings)
        reduced = _taken(layout, NcclCollective.ALL_REDUCE)
        exchanged = _taken(layout, NcclCollective.ALL_TO_ALL)
        yield FindingArea.RANKS.ok(
            "nccl-memory",
            f"a communicator over {count} x {spec.name} takes {_range(reduced)} of each card for all-reduce, "
            f"{_range(exchanged)} for all-to-all, and the first one {_range(library_part(spec).nbytes)} more: "
            "outside of torch's allocator, estimated from NCCL's source",
        )


def _taken(layout: RankLayout, collective: NcclCollective) -> ByteRange:
    return communicator_memory(CommunicatorUse(layout=layout, collectives=frozenset({collective}))).total


def _range(found: ByteRange) -> str:
    if found.low == found.high:
        return format_bytes(found.low)
    return f"{format_bytes(found.low)} to {format_bytes(found.high)}"


def _known(name: str) -> GpuSpec | None:
    try:
        return find_gpu(name)
    except UnknownGpuError:
        return None


CHECKS: tuple[Check, ...] = (
    check_numbers,
    check_files,
    check_nccl_settings,
    check_contradictions,
    check_torch_of_nccl,
    check_nccl_memory,
)
