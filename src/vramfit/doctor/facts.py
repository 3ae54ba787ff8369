"""Facts about a machine, from which findings are drawn, and what a finding is: plain values. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Tool(Enum):
    """Where the facts about the driver come from."""

    NVML = "nvml"
    NVIDIA_SMI = "nvidia-smi"


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process that uses a card.

    Attributes:
        pid: its id where the driver counts, which in a container may be another than here.
        name: its program, empty if the driver does not tell.
        used_bytes: memory of the card that it holds; None where the driver does not tell (WSL, Windows, MIG).
        graphics: whether the process draws rather than computes.
    """

    pid: int
    name: str = ""
    used_bytes: int | None = None
    graphics: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProcess:
    """A process of this machine that uses a card or inherited one, as the system sees it.

    Attributes:
        pid, parent: its id and its parent's; a parent of 1 is the system's, after the real one has ended.
        name: its program.
        has_card_open: it has the file open that a CUDA context opens (``/dev/nvidia-uvm``).
        rank, local_rank: of a launcher (``RANK``, ``LOCAL_RANK``), None without.
        job: the port at which the ranks of its job meet (``MASTER_PORT``), empty if no launcher says so.
    """

    pid: int
    parent: int
    name: str = ""
    has_card_open: bool = False
    rank: int | None = None
    local_rank: int | None = None
    job: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclFileSetting:
    """A variable that a file of NCCL sets (``/etc/nccl.conf``, ``~/.nccl.conf``)."""

    name: str
    value: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MigInstance:
    """A slice of a card in MIG mode."""

    uuid: str
    name: str = ""
    total_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A card as the driver sees it. None is what the driver does not report.

    Attributes:
        index: in the driver's order, that of the PCI bus.
        pci_bus_id: ``00000000:3B:00.0``.
        total_bytes: all memory, with what the driver keeps for itself.
        reserved_bytes: kept by driver and firmware, usable by nobody.
        used_bytes: held by processes, or by the driver on their behalf.
        capability: compute capability.
        mig: its slices in MIG mode.
        ecc_pending: ECC as it will be after a restart.
        compute_mode: ``default``, ``exclusive_process`` or ``prohibited``.
    """

    index: int
    name: str
    uuid: str = ""
    pci_bus_id: str = ""
    total_bytes: int = 0
    reserved_bytes: int | None = None
    used_bytes: int = 0
    free_bytes: int = 0
    capability: tuple[int, int] | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigInstance, ...] = ()
    ecc: bool | None = None
    ecc_pending: bool | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NvidiaDriver:
    """The NVIDIA driver and its cards.

    Attributes:
        tool: what answered.
        cuda_version: the newest CUDA that it serves.
    """

    tool: Tool
    version: str
    cuda_version: tuple[int, int] | None = None
    cards: tuple[Card, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchDevice:
    """A card as torch sees it, while a process of ours had a context on it.

    Attributes:
        index: torch's own.
        uuid: without ``GPU-``; of the slice for a MIG instance.
        pci_bus_id: as ``00000000:3B:00.0``.
        total_bytes, free_bytes: of ``torch.cuda.mem_get_info``, our context taken.
        reserved_bytes: what our allocator held.
        integrated: the card shares the host's memory.
        driver_used_bytes: what the driver said was used at that time; None if it was not asked.
        own_bytes: what the driver counted as ours; None if it does not tell.
        error: why it could not be used, empty if it could.
    """

    index: int
    name: str
    uuid: str = ""
    pci_bus_id: str = ""
    capability: tuple[int, int] | None = None
    total_bytes: int = 0
    free_bytes: int = 0
    reserved_bytes: int = 0
    integrated: bool = False
    driver_used_bytes: int | None = None
    own_bytes: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """The torch that this interpreter imports.

    Attributes:
        cuda: version of CUDA that it was built with, None for a CPU or ROCm build.
        hip: version of ROCm, None without.
        architectures: what its kernels are compiled for: ``sm_80``, ``compute_90``.
        count: cards that it sees.
        error: why it sees none although it was built for them, in torch's own words; else empty.
        settings_error: what torch answered to the allocator settings of the environment; empty if it took them.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()
    count: int = 0
    devices: tuple[TorchDevice, ...] = ()
    error: str = ""
    settings_error: str = ""

    @property
    def version_pair(self) -> tuple[int, int]:
        """Major and minor number."""
        from vramfit.allocator.versions import parse_torch_version

        return parse_torch_version(self.version)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFacts:
    """A folder and the file system below it."""

    path: str
    filesystem: str = ""
    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """What the kernel's control groups allow this process.

    Attributes:
        kind: ``docker``, ``podman``, ``kubernetes``, ``slurm``, or empty.
        version: of the control groups, 1 or 2; 0 where there are none.
        memory_max_bytes: hard limit of host memory, the tightest on the way up; None without one.
        memory_used_bytes: charged now in the group that sets the limit, else in the process's own.
        swap_max_bytes: None without a limit.
    """

    kind: str = ""
    version: int = 0
    memory_max_bytes: int | None = None
    memory_used_bytes: int | None = None
    swap_max_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine around the card.

    Attributes:
        wsl: Linux inside Windows.
        memory_bytes, available_bytes: of the host; 0 if unknown.
        overcommit: ``vm.overcommit_memory`` of Linux: 0, 1 or 2.
        commit_limit_bytes, committed_bytes: what counts where overcommit is 2.
        locked_limit_bytes: RLIMIT_MEMLOCK, None if unlimited.
        address_space_limit_bytes: RLIMIT_AS, None if unlimited.
        infiniband: there is an adapter for remote direct memory access.
        shared_memory: /dev/shm.
        scratch: where temporary files go, and offloaded tensors by default.
        kernel_module: version of the driver's part in the kernel, empty if it is not loaded.
        device_nodes: the process sees the driver's device files.
    """

    system: str = "Linux"
    machine: str = "x86_64"
    python: tuple[int, int, int] = (3, 12, 0)
    wsl: bool = False
    memory_bytes: int = 0
    available_bytes: int = 0
    swap_bytes: int = 0
    overcommit: int | None = None
    commit_limit_bytes: int | None = None
    committed_bytes: int | None = None
    locked_limit_bytes: int | None = None
    address_space_limit_bytes: int | None = None
    infiniband: bool = False
    shared_memory: FolderFacts | None = None
    scratch: FolderFacts | None = None
    kernel_module: str = ""
    device_nodes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that the checks look at.

    Attributes:
        environ: the variables that matter (see `RELEVANT`), as they are set.
        driver: None where there is none, or where it could not be asked.
        driver_error: why it could not be asked, empty where nothing hints at a driver.
        torch: None if it could not be imported.
        torch_error: why.
        virtual_error: why the virtual GPU cannot run here; empty if its self-check passed, None if it did not run.
        nccl_files: what NCCL's own files set, the first of a name winning; the environment goes before them.
        processes: those of this machine that use a card, or inherited one.
    """

    host: Host = field(default_factory=Host)
    container: Container = field(default_factory=Container)
    environ: Mapping[str, str] = field(default_factory=dict)
    driver: NvidiaDriver | None = None
    driver_error: str = ""
    torch: Torch | None = None
    torch_error: str = ""
    virtual_error: str | None = ""
    nccl_files: tuple[NcclFileSetting, ...] = ()
    processes: tuple[HostProcess, ...] = ()

    @property
    def cards(self) -> tuple[Card, ...]:
        """The driver's cards."""
        return self.driver.cards if self.driver else ()


RELEVANT = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COMM_SPLIT_SHARE_RESOURCES",
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MAX_NRINGS",
    "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MIN_P2P_NCHANNELS",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NVLS_CHUNKSIZE",
    "NCCL_NVLS_ENABLE",
    "NCCL_NVLS_NCHANNELS",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE",
    "NCCL_P2P_PCI_CHUNKSIZE",
    "NCCL_PROTO",
    "NCCL_RUNTIME_CONNECT",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_NTHREADS",
    "NVIDIA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "TMPDIR",
)
"""Variables that decide about memory."""


class Severity(Enum):
    """How much a finding weighs."""

    OK = "ok"
    """As it should be."""
    INFO = "info"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    """Costs memory or time, or will surprise."""
    ERROR = "error"
    """Programs fail, or do not use the card."""

    @property
    def rank(self) -> int:
        """0 for the lightest."""
        return list(Severity).index(self)


class FindingArea(Enum):
    """What a finding is about; the order of the report."""

    TORCH = "torch"
    DRIVER = "driver"
    CARDS = "cards"
    VISIBILITY = "visible devices"
    ALLOCATOR = "allocator settings"
    RANKS = "several cards"
    HOST = "host"
    VIRTUAL = "virtual GPU"

    def ok(self, check: str, finding: str) -> Finding:
        """A finding that all is as it should be."""
        return Finding(check=check, area=self, severity=Severity.OK, finding=finding)

    def info(self, check: str, finding: str, *, why: str, fix: str) -> Finding:
        """A finding that is worth knowing."""
        return Finding(check=check, area=self, severity=Severity.INFO, finding=finding, why=why, fix=fix)

    def warning(self, check: str, finding: str, *, why: str, fix: str) -> Finding:
        """A finding that costs memory or time."""
        return Finding(check=check, area=self, severity=Severity.WARNING, finding=finding, why=why, fix=fix)

    def error(self, check: str, finding: str, *, why: str, fix: str) -> Finding:
        """A finding that makes programs fail."""
        return Finding(check=check, area=self, severity=Severity.ERROR, finding=finding, why=why, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that decides about memory on this machine.

    Attributes:
        check: the short name of what was looked at; stays the same from version to version.
        area: what it belongs to.
        severity: its weight.
        finding: what is so, in one line.
        why: what it does to memory or to the program; empty for what is as it should be.
        fix: what to do; empty where there is nothing to do.
    """

    check: str
    area: FindingArea
    severity: Severity
    finding: str
    why: str = ""
    fix: str = ""


Check = Callable[[Facts], Iterable[Finding]]
"""A pure function: what it finds in the facts, nothing where it does not apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The facts of a machine, and what they say.

    Attributes:
        findings: the heaviest first, then by area.
    """

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Severity:
        """The weight of the heaviest finding."""
        return max((finding.severity for finding in self.findings), key=lambda s: s.rank, default=Severity.OK)

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one weight."""
        return tuple(finding for finding in self.findings if finding.severity is severity)
