"""Each check on machines that it is made for, and silent on those that are fine."""

from dataclasses import replace

import pytest
from tests.doctor.machines import (
    CARD,
    CONTAINER,
    DEVICE,
    DRIVER,
    HOST,
    MACHINES,
    MIG_SLICE,
    NO_CARD,
    QUIET_BOX,
    SHARED_BOX,
    TORCH,
    TWO_CARDS,
    WSL,
)

from vramfit.doctor import Facts, Finding, Severity, diagnose
from vramfit.doctor.checks.build import runs_on
from vramfit.doctor.facts import Container, FolderFacts
from vramfit.units import GIB, MIB


def found(facts: Facts, check: str) -> list[Finding]:
    return [finding for finding in diagnose(facts).findings if finding.check == check]


def one(facts: Facts, check: str) -> Finding:
    [finding] = found(facts, check)
    return finding


def with_environ(**environ: str) -> Facts:
    return replace(QUIET_BOX, environ=environ)


def test_a_well_kept_machine_has_nothing_to_mend() -> None:
    assert diagnose(QUIET_BOX).worst is Severity.OK


@pytest.mark.parametrize("facts", MACHINES.values(), ids=MACHINES.keys())
def test_what_is_wrong_says_why_and_what_to_do(facts: Facts) -> None:
    for finding in diagnose(facts).findings:
        assert finding.finding
        if finding.severity is not Severity.OK:
            assert finding.why, finding
            assert finding.fix, finding


def test_the_heaviest_come_first() -> None:
    ranks = [finding.severity.rank for finding in diagnose(TWO_CARDS).findings]
    assert ranks == sorted(ranks, reverse=True)


def test_a_machine_without_a_card_is_no_error() -> None:
    diagnosis = diagnose(NO_CARD)
    assert diagnosis.worst is Severity.INFO
    assert "vramfit run --gpu" in one(NO_CARD, "driver").fix


def test_neighbours_are_named_with_what_they_hold() -> None:
    finding = one(SHARED_BOX, "processes")
    assert finding.severity is Severity.WARNING
    assert "python3 (pid 4242) 8.79 GiB" in finding.finding
    assert "Xorg (pid 900, drawing)" in finding.finding
    assert "--budget 14964MiB" in finding.fix
    assert found(SHARED_BOX, "unaccounted") == []


def test_a_small_neighbour_is_no_warning() -> None:
    desktop = SHARED_BOX.cards[0].processes[1]
    facts = replace(QUIET_BOX, driver=replace(DRIVER, cards=(replace(CARD, processes=(desktop,)),)))
    assert one(facts, "processes").severity is Severity.INFO


def test_memory_of_nobody_visible() -> None:
    finding = one(CONTAINER, "unaccounted")
    assert "5.86 GiB" in finding.finding
    assert "outside the container" in finding.fix


def test_a_container_with_the_defaults_of_docker() -> None:
    assert "64.00 MiB" in one(CONTAINER, "shared-memory").finding
    assert "--shm-size" in one(CONTAINER, "shared-memory").fix
    assert one(CONTAINER, "container-memory").severity is Severity.WARNING
    assert one(CONTAINER, "host-smaller").severity is Severity.WARNING


def test_kubernetes_has_another_way_to_more_shared_memory() -> None:
    facts = replace(CONTAINER, container=replace(CONTAINER.container, kind="kubernetes"))
    assert "emptyDir" in one(facts, "shared-memory").fix


def test_shared_memory_that_is_full() -> None:
    full = FolderFacts(path="/dev/shm", filesystem="tmpfs", total_bytes=8 * GIB, free_bytes=MIB)
    facts = replace(QUIET_BOX, host=replace(HOST, shared_memory=full))
    assert "ls -la /dev/shm" in one(facts, "shared-memory").fix


def test_a_limit_with_room_is_told_without_a_warning() -> None:
    roomy = Container(kind="slurm", version=1, memory_max_bytes=64 * GIB, memory_used_bytes=GIB)
    assert one(replace(QUIET_BOX, container=roomy), "container-memory").severity is Severity.INFO


def test_a_slice_is_named_with_its_size() -> None:
    finding = one(MIG_SLICE, "mig")
    assert "20.00 GiB" in finding.finding
    assert "--gpu 20GiB" in finding.fix
    assert one(MIG_SLICE, "visible-devices").severity is Severity.OK


def test_mig_without_a_slice() -> None:
    card = replace(MIG_SLICE.cards[0], mig=())
    facts = replace(MIG_SLICE, driver=replace(DRIVER, cards=(card,)), environ={})
    assert one(facts, "mig").severity is Severity.ERROR


def test_windows_below() -> None:
    assert one(WSL, "system-memory-fallback").severity is Severity.WARNING
    assert one(WSL, "pinned-memory").severity is Severity.WARNING
    assert one(WSL, "processes").severity is Severity.WARNING  # it does not tell how much each holds
    assert found(WSL, "unaccounted") == []


def test_torch_counts_the_other_way_round_and_has_no_kernels_for_one() -> None:
    assert "cuda:0 is GPU 1, cuda:1 is GPU 0" in one(TWO_CARDS, "device-order").finding
    finding = one(TWO_CARDS, "architecture")
    assert finding.severity is Severity.ERROR
    assert "cuda:1 (NVIDIA GeForce GT 1030) has compute capability 6.1" in finding.finding


def test_cards_of_several_kinds_in_an_order_not_asked_for() -> None:
    facts = replace(TWO_CARDS, torch=None)
    assert one(facts, "device-order").fix == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert found(replace(facts, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}), "device-order") == []


def test_an_order_that_cuda_does_not_know() -> None:
    facts = replace(TWO_CARDS, torch=None, environ={"CUDA_DEVICE_ORDER": "PCI"})
    assert any("means nothing" in finding.finding for finding in found(facts, "device-order"))


@pytest.mark.parametrize(
    ("text", "severity", "said"),
    [
        ("", Severity.ERROR, "hides every card"),
        ("0,0", Severity.ERROR, "twice"),
        ("0,4", Severity.ERROR, "no card 4"),
        ("-1", Severity.INFO, "ends the list"),
        ("[0]", Severity.ERROR, "neither a number nor a name"),
        ("0,GPU-1", Severity.ERROR, "another kind"),
        ("GPU-77", Severity.ERROR, "no card or slice"),
        ("0gpu", Severity.WARNING, "only the number"),
    ],
)
def test_values_of_visible_devices(text: str, severity: Severity, said: str) -> None:
    finding = one(with_environ(CUDA_VISIBLE_DEVICES=text), "visible-devices")
    assert finding.severity is severity
    assert said in finding.why


def test_a_cpu_build_beside_a_card() -> None:
    finding = one(replace(QUIET_BOX, torch=replace(NO_CARD.torch)), "torch-build")
    assert finding.severity is Severity.ERROR
    assert "RTX 4090" in finding.finding
    assert "CUDA 13.0 or older" in finding.fix


def test_rocm() -> None:
    rocm = replace(TORCH, version="2.13.0+rocm7.0", cuda=None, hip="7.0", devices=(), architectures=())
    facts = replace(NO_CARD, torch=rocm)
    assert one(facts, "torch-build").severity is Severity.WARNING


def test_a_driver_older_than_torch() -> None:
    facts = replace(
        QUIET_BOX,
        driver=replace(DRIVER, version="535.54", cuda_version=(12, 2)),
        torch=replace(TORCH, devices=(), count=0, error="The NVIDIA driver on your system is too old"),
    )
    assert one(facts, "driver-age").severity is Severity.ERROR
    assert found(facts, "cuda-start") == []  # one cause, told once


def test_cuda_that_does_not_start() -> None:
    facts = replace(QUIET_BOX, torch=replace(TORCH, devices=(), count=0, error="CUDA unknown error"))
    assert "CUDA unknown error" in one(facts, "cuda-start").finding


def test_a_card_that_cannot_be_used() -> None:
    broken = replace(DEVICE, error="CUDA error: out of memory")
    assert (
        one(replace(QUIET_BOX, torch=replace(TORCH, devices=(broken,))), "card-start").severity
        is Severity.ERROR
    )


def test_torch_that_hangs() -> None:
    facts = replace(QUIET_BOX, torch=None, torch_error="did not answer within 60 s", virtual_error=None)
    assert "did not answer" in one(facts, "torch-import").finding
    assert found(facts, "virtual-gpu") == []


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("NVML: Driver/library version mismatch", "restart the machine"),
        ("did not answer within 60 s", "hangs"),
        ("NVML: NVML Shared Library Not Found", "nvidia-smi"),
    ],
)
def test_a_driver_that_fails(error: str, fix: str) -> None:
    finding = one(replace(QUIET_BOX, driver=None, driver_error=error), "driver")
    assert finding.severity is Severity.ERROR
    assert fix in finding.fix


def test_a_container_without_its_library() -> None:
    facts = replace(CONTAINER, driver=None, driver_error="NVML: NVML Shared Library Not Found")
    assert "NVIDIA_DRIVER_CAPABILITIES" in one(facts, "driver").fix


def test_a_container_without_its_card() -> None:
    facts = replace(NO_CARD, host=replace(HOST, device_nodes=False), driver_error="")
    finding = one(facts, "driver")
    assert finding.severity is Severity.WARNING
    assert "--gpus all" in finding.fix


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80",), (8, 6), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("sm_100f",), (10, 3), True),
        (("sm_120", "compute_120"), (12, 1), True),
        (("sm_75",), (7, 0), False),
        (("gfx90a",), (9, 0), False),
    ],
)
def test_which_kernels_run_where(
    architectures: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(architectures, capability) is runs


@pytest.mark.parametrize(
    ("environ", "check", "severity", "said"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "nonsense:1"}, "alloc-conf", Severity.ERROR, "Unrecognized key"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:5"}, "alloc-conf", Severity.ERROR, "too small"),
        (
            {
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            },
            "alloc-conf-variables",
            Severity.WARNING,
            "PYTORCH_CUDA_ALLOC_CONF wins",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"},
            "alloc-conf-sense",
            Severity.WARNING,
            "max_split_size_mb:128",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"},
            "alloc-conf-sense",
            Severity.WARNING,
            "without a memory fraction",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:-5"},
            "alloc-conf-sense",
            Severity.WARNING,
            "wraps around",
        ),
        ({"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.5"}, "alloc-conf-sense", Severity.INFO, "0.5"),
        ({"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"}, "alloc-conf-sense", Severity.INFO, "roundup"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "caching", Severity.WARNING, "CACHING=1"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "cublas-workspace", Severity.INFO, "32.00 MiB"),
        ({"CUBLAS_WORKSPACE_CONFIG": "4096"}, "cublas-workspace", Severity.WARNING, "cannot be read"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "launch-blocking", Severity.WARNING, "is on"),
        ({"CUDA_MODULE_LOADING": "EAGER"}, "module-loading", Severity.WARNING, "EAGER"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"}, "mps", Severity.WARNING, "0=2G"),
    ],
)
def test_the_environment(environ: dict[str, str], check: str, severity: Severity, said: str) -> None:
    finding = one(with_environ(**environ), check)
    assert finding.severity is severity
    assert said in finding.finding


def test_the_other_backend_makes_settings_idle() -> None:
    facts = with_environ(PYTORCH_ALLOC_CONF="backend:cudaMallocAsync,expandable_segments:True")
    said = [finding.finding for finding in found(facts, "alloc-conf-sense")]
    assert said == ["backend:cudaMallocAsync with expandable_segments", "backend:cudaMallocAsync"]


def test_what_torch_itself_refuses() -> None:
    facts = replace(
        QUIET_BOX,
        torch=replace(TORCH, settings_error="Unrecognized key"),
        environ={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )
    assert one(facts, "alloc-conf").severity is Severity.ERROR


@pytest.mark.parametrize("text", ["", "CUDA_LAUNCH_BLOCKING"])
def test_switches_that_are_off(text: str) -> None:
    facts = with_environ(**{text: "0"}) if text else QUIET_BOX
    assert found(facts, "launch-blocking") == []


def test_limits_of_the_host() -> None:
    host = replace(
        HOST,
        address_space_limit_bytes=8 * GIB,
        overcommit=2,
        commit_limit_bytes=10 * GIB,
        committed_bytes=4 * GIB,
        infiniband=True,
        locked_limit_bytes=64 * 1024,
        swap_bytes=0,
        available_bytes=GIB,
        scratch=FolderFacts(path="/tmp", filesystem="tmpfs", total_bytes=GIB, free_bytes=GIB),
    )
    facts = replace(QUIET_BOX, host=host)
    assert one(facts, "address-space").severity is Severity.ERROR
    assert one(replace(NO_CARD, host=host), "address-space").severity is Severity.WARNING
    assert "6.00 GiB may still" in one(facts, "overcommit").finding
    assert one(facts, "locked-memory").severity is Severity.WARNING
    assert one(facts, "swap").severity is Severity.INFO
    assert one(facts, "host-memory").severity is Severity.WARNING
    assert "frees nothing" in one(facts, "scratch").why


def test_a_full_disk() -> None:
    full = FolderFacts(path="/tmp", filesystem="ext4", total_bytes=100 * GIB, free_bytes=GIB)
    assert one(replace(QUIET_BOX, host=replace(HOST, scratch=full)), "scratch").severity is Severity.WARNING


@pytest.mark.parametrize(
    ("change", "check", "severity"),
    [
        ({"compute_mode": "prohibited"}, "compute-mode", Severity.ERROR),
        ({"compute_mode": "exclusive_process"}, "compute-mode", Severity.WARNING),
        ({"persistence": False}, "persistence", Severity.INFO),
        ({"ecc": True, "ecc_pending": False}, "ecc", Severity.WARNING),
        ({"ecc": True, "ecc_pending": True}, "ecc", Severity.OK),
    ],
)
def test_modes_of_a_card(change: dict[str, object], check: str, severity: Severity) -> None:
    facts = replace(QUIET_BOX, driver=replace(DRIVER, cards=(replace(CARD, **change),)))
    assert one(facts, check).severity is severity


def test_memory_shared_with_the_host() -> None:
    facts = replace(QUIET_BOX, torch=replace(TORCH, devices=(replace(DEVICE, integrated=True),)))
    assert one(facts, "unified-memory").severity is Severity.WARNING


def test_torch_and_driver_disagree_on_the_size() -> None:
    half = replace(DEVICE, total_bytes=DEVICE.total_bytes // 2)
    facts = replace(QUIET_BOX, torch=replace(TORCH, devices=(half,)))
    assert one(facts, "agreement").severity is Severity.WARNING


def test_old_python_and_torch() -> None:
    facts = replace(
        QUIET_BOX,
        host=replace(HOST, python=(3, 9, 1)),
        torch=replace(TORCH, version="2.4.1+cu121", cuda="12.1"),
    )
    assert one(facts, "python").severity is Severity.WARNING
    assert one(facts, "torch-version").severity is Severity.ERROR


def test_a_torch_that_was_never_tried() -> None:
    newer = replace(QUIET_BOX, torch=replace(TORCH, version="2.99.0.dev20290101+cu150"))
    assert one(newer, "torch-version").severity is Severity.INFO
    assert not found(QUIET_BOX, "torch-version")


def test_a_self_check_that_fails_or_runs_elsewhere() -> None:
    assert one(replace(QUIET_BOX, virtual_error="no guard"), "virtual-gpu").severity is Severity.ERROR
    arm = replace(QUIET_BOX, host=replace(HOST, machine="aarch64"))
    assert one(arm, "virtual-gpu").severity is Severity.INFO
