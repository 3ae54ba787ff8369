"""Facts of many machines, as they would be gathered there."""

from dataclasses import replace

from vramfit.doctor.facts import (
    Card,
    Container,
    Facts,
    FolderFacts,
    Host,
    MigInstance,
    NvidiaDriver,
    Process,
    Tool,
    Torch,
    TorchDevice,
)
from vramfit.units import GIB, MIB

HOST = Host(
    memory_bytes=256 * GIB,
    available_bytes=200 * GIB,
    swap_bytes=8 * GIB,
    overcommit=0,
    shared_memory=FolderFacts(
        path="/dev/shm", filesystem="tmpfs", total_bytes=128 * GIB, free_bytes=128 * GIB
    ),
    scratch=FolderFacts(path="/tmp", filesystem="ext4", total_bytes=900 * GIB, free_bytes=400 * GIB),
    kernel_module="580.95.05",
    device_nodes=True,
)
"""A well-kept server."""

UUID = "GPU-11111111-2222-3333-4444-555555555555"
CARD = Card(
    index=0,
    name="NVIDIA GeForce RTX 4090",
    uuid=UUID,
    pci_bus_id="00000000:01:00.0",
    total_bytes=24564 * MIB,
    reserved_bytes=480 * MIB,
    used_bytes=2 * MIB,
    free_bytes=24082 * MIB,
    capability=(8, 9),
    mig_enabled=None,
    persistence=True,
    compute_mode="default",
)
DRIVER = NvidiaDriver(tool=Tool.NVML, version="580.95.05", cuda_version=(13, 0), cards=(CARD,))
DEVICE = TorchDevice(
    index=0,
    name=CARD.name,
    uuid=UUID.removeprefix("GPU-"),
    pci_bus_id=CARD.pci_bus_id,
    capability=(8, 9),
    total_bytes=24084 * MIB,
    free_bytes=23680 * MIB,
    reserved_bytes=2 * MIB,
    driver_used_bytes=404 * MIB,
    own_bytes=402 * MIB,
)
TORCH = Torch(
    version="2.13.0+cu130",
    cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    count=1,
    devices=(DEVICE,),
)

QUIET_BOX = Facts(host=HOST, driver=DRIVER, torch=TORCH)
"""One card, nobody else on it."""

_NEIGHBOUR = Process(pid=4242, name="/usr/bin/python3", used_bytes=9000 * MIB)
_DESKTOP = Process(pid=900, name="/usr/lib/xorg/Xorg", used_bytes=120 * MIB, graphics=True)
_SHARED_CARD = replace(CARD, used_bytes=9122 * MIB, free_bytes=14962 * MIB, processes=(_NEIGHBOUR, _DESKTOP))
SHARED_BOX = replace(
    QUIET_BOX,
    driver=replace(DRIVER, cards=(_SHARED_CARD,)),
    torch=replace(TORCH, devices=(replace(DEVICE, free_bytes=14560 * MIB, driver_used_bytes=9524 * MIB),)),
)
"""Somebody trains on the same card, which also drives a desktop."""

CONTAINER = replace(
    QUIET_BOX,
    host=replace(
        HOST,
        shared_memory=FolderFacts(
            path="/dev/shm", filesystem="tmpfs", total_bytes=64 * MIB, free_bytes=64 * MIB
        ),
    ),
    container=Container(
        kind="docker", version=2, memory_max_bytes=16 * GIB, memory_used_bytes=15 * GIB, swap_max_bytes=0
    ),
    driver=replace(DRIVER, cards=(replace(CARD, used_bytes=6000 * MIB, free_bytes=18084 * MIB),)),
    torch=replace(
        TORCH,
        devices=(replace(DEVICE, free_bytes=17680 * MIB, driver_used_bytes=6402 * MIB, own_bytes=None),),
    ),
)
"""Docker's defaults: 64 MiB of shared memory, a memory limit, and a neighbour that its process list hides."""

MIG_SLICE = replace(
    QUIET_BOX,
    driver=replace(
        DRIVER,
        cards=(
            replace(
                CARD,
                name="NVIDIA A100-SXM4-80GB",
                total_bytes=80 * GIB,
                capability=(8, 0),
                mig_enabled=True,
                mig=(
                    MigInstance(uuid="MIG-aaaa", name="MIG 2g.20gb", total_bytes=20 * GIB),
                    MigInstance(uuid="MIG-aabb", name="MIG 2g.20gb", total_bytes=20 * GIB),
                ),
            ),
        ),
    ),
    environ={"CUDA_VISIBLE_DEVICES": "MIG-aaaa"},
    torch=replace(
        TORCH,
        devices=(
            replace(
                DEVICE,
                name="NVIDIA A100-SXM4-80GB MIG 2g.20gb",
                uuid="aaaa",
                pci_bus_id="",
                capability=(8, 0),
                total_bytes=20 * GIB,
                driver_used_bytes=None,
                own_bytes=None,
            ),
        ),
    ),
)
"""A slice of a card."""

WSL = replace(
    QUIET_BOX,
    host=replace(HOST, wsl=True, kernel_module=""),
    driver=replace(DRIVER, cards=(replace(CARD, processes=(Process(pid=1, name="", used_bytes=None),)),)),
)
"""Linux in Windows."""

NO_CARD = Facts(
    host=replace(HOST, kernel_module="", device_nodes=False),
    torch=Torch(version="2.13.0+cpu"),
    driver_error="NVML: NVML Shared Library Not Found",
)
"""A laptop or a continuous integration machine."""

_SECOND = replace(
    CARD,
    index=1,
    name="NVIDIA GeForce GT 1030",
    uuid="GPU-99999999-0000",
    pci_bus_id="00000000:02:00.0",
    total_bytes=2 * GIB,
    reserved_bytes=100 * MIB,
    free_bytes=1900 * MIB,
    capability=(6, 1),
)
TWO_CARDS = replace(
    QUIET_BOX,
    driver=replace(DRIVER, cards=(replace(_SECOND, index=0), replace(CARD, index=1))),
    torch=replace(
        TORCH,
        count=2,
        devices=(
            DEVICE,
            replace(
                DEVICE,
                index=1,
                name=_SECOND.name,
                uuid="99999999-0000",
                pci_bus_id=_SECOND.pci_bus_id,
                capability=(6, 1),
                total_bytes=1948 * MIB,
                free_bytes=1880 * MIB,
                driver_used_bytes=70 * MIB,
                own_bytes=68 * MIB,
            ),
        ),
    ),
)
"""A slow card in the first slot: torch counts the other way round, and has no kernels for it."""

MACHINES = {
    "quiet": QUIET_BOX,
    "shared": SHARED_BOX,
    "container": CONTAINER,
    "mig": MIG_SLICE,
    "wsl": WSL,
    "no card": NO_CARD,
    "two cards": TWO_CARDS,
}
