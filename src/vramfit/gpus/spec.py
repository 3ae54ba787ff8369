"""What a GPU is: the figures of one card that decide what fits on it and how fast it runs.

Figures: CUDA C++ Programming Guide, section "Compute Capabilities", table "Technical Specifications per
Compute Capability". The opt-in limit of a block is the shared memory of the SM less the 1 KiB that CUDA keeps
per block (from capability 8.0 on).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta

from vramfit.units import KIB, MIB

# -- What a compute capability fixes: resident threads, registers, shared memory -----------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureLimits:
    """Limits shared by every card of one compute capability; shared memory in bytes."""

    max_threads_per_sm: int
    shared_memory_per_sm: int
    shared_memory_per_block_optin: int
    shared_memory_per_block: int = 48 * KIB
    registers_per_sm: int = 65_536
    warp_size: int = 32


_GENERATIONS: dict[tuple[int, int], tuple[str, int, int, int]] = {
    (6, 0): ("Pascal", 2048, 64, 48),
    (6, 1): ("Pascal", 2048, 96, 48),
    (6, 2): ("Pascal", 2048, 64, 48),
    (7, 0): ("Volta", 2048, 96, 96),
    (7, 2): ("Volta", 2048, 96, 96),
    (7, 5): ("Turing", 1024, 64, 64),
    (8, 0): ("Ampere", 2048, 164, 163),
    (8, 6): ("Ampere", 1536, 100, 99),
    (8, 7): ("Ampere", 1536, 164, 163),
    (8, 9): ("Ada", 1536, 100, 99),
    (9, 0): ("Hopper", 2048, 228, 227),
    (10, 0): ("Blackwell", 2048, 228, 227),
    (10, 3): ("Blackwell", 2048, 228, 227),
    (11, 0): ("Blackwell", 1536, 228, 227),
    (12, 0): ("Blackwell", 1536, 100, 99),
    (12, 1): ("Blackwell", 1536, 100, 99),
}
"""By compute capability: architecture, threads of an SM, KiB of shared memory of an SM and of an opted-in block."""

ARCHITECTURES = {capability: row[0] for capability, row in _GENERATIONS.items()}
LIMITS = {
    capability: ArchitectureLimits(
        max_threads_per_sm=threads,
        shared_memory_per_sm=shared * KIB,
        shared_memory_per_block_optin=optin * KIB,
    )
    for capability, (_, threads, shared, optin) in _GENERATIONS.items()
}

# -- A card ---------------------------------------------------------------------------------------------------

Text = Annotated[str, Meta(pattern=r"\S", description="text")]
PositiveNumber = Annotated[float, Meta(gt=0, le=1e30, description="a positive number")]


class GpuKind(Enum):
    """Where a card is found."""

    DESKTOP = "desktop"
    LAPTOP = "laptop"
    WORKSTATION = "workstation"
    DATACENTER = "datacenter"
    EMBEDDED = "embedded"
    GENERIC = "generic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """A public price of a card, as it was on one day.

    Attributes:
        value: the number, in US dollars.
        unit: ``"USD"`` for a list price, ``"USD/h"`` for an on-demand hour of one card.
        date: the day or month it was published, ISO form (``2022-09-20`` or ``2022-09``).
        source: who published it.
    """

    value: PositiveNumber
    unit: Annotated[Literal["USD", "USD/h"], Meta(description='"USD" or "USD/h"')]
    date: Text
    source: Text

    def __str__(self) -> str:
        """Write the price as ``$1,599`` or ``$2.99/h``."""
        if self.unit == "USD/h":
            return f"${self.value:,.2f}/h"
        return f"${self.value:,.0f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NvLink:
    """NVLink of one card, to other cards.

    Attributes:
        generation: 1 to 5.
        links: links of the card.
        bandwidth: of all links together, B/s one way.
        bridged: a bridge joins cards by pairs; else the node's board decides who is reached.
    """

    generation: int
    links: int
    bandwidth: float
    bridged: bool = False

    def __str__(self) -> str:
        """Write it as the catalogue does: ``NVLink 4 x18``."""
        return f"NVLink {self.generation} x{self.links}{' bridge' if self.bridged else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """One card. Sizes are bytes, rates are per second, clocks are hertz.

    Attributes:
        name: the catalogue's name, ``"RTX 4090"``.
        aliases: other names that mean this card.
        vendor_name: what ``torch.cuda.get_device_name()`` says.
        kind: desktop, laptop, workstation, datacenter or embedded.
        architecture: ``"Ampere"``, ``"Hopper"``, ...
        compute_capability: ``(major, minor)``.
        total_bytes: memory as CUDA reports it (``cudaDeviceProp.totalGlobalMem``): less than on the box.
        memory_estimated: no report of ``total_bytes`` was found; it follows from the nominal size by a rule.
        memory_source: where ``total_bytes`` was read, or the rule that gave it.
        sm_count: streaming multiprocessors.
        l2_bytes: size of the L2 cache.
        bandwidth: peak memory bandwidth in B/s.
        memory_bus_bits: width of the memory interface.
        boost_clock: the clock of the peak figures.
        peak_flops: dense (not sparse) peak by dtype: ``float64``, ``float32``, ``tf32``, ``float16``,
            ``bfloat16``, ``float8``, ``int8``, ``fp4``. Half precision is with float32 accumulation, which is
            what torch asks for (GeForce cards run it at half the advertised rate). A dtype without hardware
            is absent.
        link: the link to the host in words, ``"PCIe 4.0 x16"``.
        host_link: its bandwidth in B/s one way.
        nvlink: NVLink to other cards, None for a card without.
        context_bytes: device memory that a CUDA context of torch takes, where it was measured.
        context_source: where that was read.
        integrated: the card shares its memory with the host.
        price: a public price, where there is one.
        source: where the figures come from.
        notes: what a reader should know (ECC, variants).
    """

    name: str
    aliases: tuple[str, ...] = ()
    vendor_name: str
    kind: GpuKind = GpuKind.GENERIC
    architecture: str
    compute_capability: tuple[int, int]
    total_bytes: int
    memory_estimated: bool = False
    memory_source: str = ""
    sm_count: int
    l2_bytes: int
    bandwidth: float
    memory_bus_bits: int
    boost_clock: float
    peak_flops: Mapping[str, float]
    link: str
    host_link: float
    nvlink: NvLink | None = None
    context_bytes: int | None = None
    context_source: str = ""
    integrated: bool = False
    price: Price | None = None
    source: str
    notes: str = ""

    @property
    def typical_context_bytes(self) -> int:
        """Device memory to expect for a CUDA context, in bytes: as measured, else 50 MiB + 2.67 MiB per SM.

        The rule meets within 8 % two torch contexts that were measured (RTX 3090: 250 MiB, RTX 6000
        Ada: 430 MiB) and what llama.cpp logs show between total and free memory right after start-up
        (RTX 4090: 392 MiB, RTX 3080: 225, RTX 4070: 161, RTX 5060: 135). It is too low for what an H100 holds
        at the end of a program with CUDA 13: 767 MiB, and 402 by the rule.
        """
        if self.context_bytes is not None:
            return self.context_bytes
        return round(50 + 2.67 * self.sm_count) * MIB

    @property
    def limits(self) -> ArchitectureLimits:
        """What the compute capability fixes: threads, registers and shared memory per SM."""
        return LIMITS[self.compute_capability]

    @property
    def max_threads_per_sm(self) -> int:
        """Threads that one SM keeps resident (``maxThreadsPerMultiProcessor``)."""
        return self.limits.max_threads_per_sm

    @property
    def shared_memory_per_block(self) -> int:
        """Static shared memory limit of a block, in bytes (``sharedMemPerBlock``)."""
        return self.limits.shared_memory_per_block

    @property
    def shared_memory_per_block_optin(self) -> int:
        """Shared memory that a kernel may opt in to, in bytes (``sharedMemPerBlockOptin``)."""
        return self.limits.shared_memory_per_block_optin

    @property
    def shared_memory_per_sm(self) -> int:
        """Shared memory of one SM, in bytes (``sharedMemPerMultiprocessor``)."""
        return self.limits.shared_memory_per_sm

    @property
    def registers_per_sm(self) -> int:
        """32-bit registers of one SM (``regsPerMultiprocessor``)."""
        return self.limits.registers_per_sm

    @property
    def warp_size(self) -> int:
        """Threads of a warp."""
        return self.limits.warp_size

    @property
    def memory_clock(self) -> float:
        """Memory clock in Hz as CUDA counts it: the bandwidth over the bus width, two transfers a cycle."""
        return self.bandwidth / (self.memory_bus_bits / 8) / 2
