"""Python, torch and the driver: do they go together, with the cards and with the virtual GPU? No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vramfit.doctor.facts import Check, Facts, Finding, FindingArea, TorchDevice
from vramfit.torch_internals.releases import ADVICE, NEWEST_TRIED, OLDEST, dotted

_PYTHONS = ((3, 11), (3, 14))
_TESTED = ("Linux", "x86_64")
"""System and machine on which the virtual GPU is tested."""


def check_python(facts: Facts) -> Iterator[Finding]:
    """The interpreter is one that vramfit is tested with."""
    version = ".".join(str(part) for part in facts.host.python)
    if _PYTHONS[0] <= facts.host.python[:2] <= _PYTHONS[1]:
        return
    yield FindingArea.TORCH.warning(
        "python",
        f"Python {version}",
        why="vramfit is made for Python 3.11 to 3.14; torch's wheels and the virtual GPU are not tested on others",
        fix="Make an environment with Python 3.12",
    )


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Torch imports, is new enough, and was built for the card that is there."""
    torch = facts.torch
    if torch is None:
        yield FindingArea.TORCH.error(
            "torch-import",
            f"importing torch and asking it for cards {facts.torch_error or 'failed'}",
            why="nothing that uses torch can run in this interpreter",
            fix="Run python -c 'import torch; torch.cuda.init()' to see it fail; install torch from "
            "https://pytorch.org, or, if it hangs, look at the driver (dmesg, nvidia-smi)",
        )
        return
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    described = f"torch {torch.version} ({build})"
    if torch.version_pair < OLDEST:
        yield FindingArea.TORCH.error(
            "torch-version",
            described,
            why=f"vramfit reads torch's own interfaces as they are from {dotted(OLDEST)} on",
            fix="pip install --upgrade torch",
        )
    elif torch.version_pair > NEWEST_TRIED:
        yield FindingArea.TORCH.info(
            "torch-version",
            described,
            why=f"vramfit was tried with releases up to {dotted(NEWEST_TRIED)}; each run on this one says so",
            fix="Look for a newer vramfit, or compare a run with a recording of your card",
        )
    newest = facts.driver.cuda_version if facts.driver else None
    if torch.cuda is None and torch.hip is None and facts.cards:
        yield FindingArea.TORCH.error(
            "torch-build",
            f"{described}, but there is a card: {facts.cards[0].name}",
            why="this build has no CUDA code: torch.cuda.is_available() is False, and programs fall back to the CPU "
            "or fail",
            fix="Install the CUDA build that https://pytorch.org names for this driver"
            + (f" (CUDA {_dotted(newest)} or older)" if newest else ""),
        )
    elif torch.hip is not None:
        yield FindingArea.TORCH.warning(
            "torch-build",
            described,
            why="the caching allocator is the same, but workspaces and contexts are modelled for NVIDIA cards only",
            fix="Take reserved bytes of the virtual GPU as an estimate here",
        )
    else:
        yield FindingArea.TORCH.ok("torch-build", described)


def check_driver(facts: Facts) -> Iterator[Finding]:
    """The driver answers."""
    driver = facts.driver
    if driver is not None:
        cuda = f", up to CUDA {_dotted(driver.cuda_version)}" if driver.cuda_version else ""
        yield FindingArea.DRIVER.ok("driver", f"NVIDIA driver {driver.version}{cuda}")
        return
    present = bool(facts.host.kernel_module or facts.host.device_nodes)
    if facts.driver_error and (present or "not found" not in facts.driver_error.lower()):
        yield FindingArea.DRIVER.error(
            "driver",
            f"the driver cannot be asked: {facts.driver_error}",
            why="cards, processes and their memory stay unknown, and CUDA will most likely fail as well",
            fix=_driver_fix(facts),
        )
    elif facts.host.kernel_module and not facts.host.device_nodes:
        yield FindingArea.DRIVER.warning(
            "driver",
            f"the kernel has the NVIDIA driver {facts.host.kernel_module}, but this container sees no card",
            why="its device files are not passed in, so torch finds no card",
            fix="Start the container with --gpus all (Docker), --device nvidia.com/gpu=all (Podman), or request "
            "nvidia.com/gpu (Kubernetes)",
        )
    else:
        yield FindingArea.DRIVER.info(
            "driver",
            "no NVIDIA driver and no card here",
            why="programs that ask for CUDA fail here, but vramfit still measures them",
            fix='Use a virtual card: vramfit run --gpu "RTX 4090" script.py',
        )


def check_init(facts: Facts) -> Iterator[Finding]:
    """Torch reaches the cards that the driver has."""
    torch, driver = facts.torch, facts.driver
    if torch is None or torch.cuda is None:
        return
    if driver is not None and driver.cuda_version is not None:
        built = tuple(int(part) for part in torch.cuda.split(".")[:2])
        if driver.cuda_version[0] < built[0]:
            yield FindingArea.DRIVER.error(
                "driver-age",
                f"torch was built with CUDA {torch.cuda}, the driver {driver.version} serves up to "
                f"{_dotted(driver.cuda_version)}",
                why="a driver serves no newer major version of CUDA: CUDA does not start (unless the compatibility "
                "package of NVIDIA is installed)",
                fix=f"Update the driver, or install a torch built for CUDA {driver.cuda_version[0]}.x",
            )
            return
    if torch.error and (facts.cards or facts.host.device_nodes):
        yield FindingArea.DRIVER.error(
            "cuda-start",
            f"CUDA does not start in torch: {torch.error}",
            why="torch sees no card, whatever the program asks for",
            fix="Compare `nvidia-smi` with the message; after an update of the driver, restart the machine "
            "(or reload its kernel modules)",
        )
    for device in torch.devices:
        if device.error:
            yield FindingArea.CARDS.error(
                "card-start",
                f"cuda:{device.index} cannot be used: {device.error}",
                why="a tensor of one element could not be made on it",
                fix="See the findings on its processes, its compute mode and its architecture; then nvidia-smi -q and "
                "dmesg for errors of the card (Xid)",
            )


def check_architectures(facts: Facts) -> Iterator[Finding]:
    """The kernels in this torch run on each card."""
    torch = facts.torch
    if torch is None or torch.cuda is None or not torch.architectures:
        return
    for device in torch.devices:
        if device.capability is not None and not runs_on(torch.architectures, device.capability):
            yield _unsupported(device, torch.architectures, torch.cuda)


def check_virtual(facts: Facts) -> Iterator[Finding]:
    """Its self-check, a small training step in a process of its own, passed."""
    if facts.virtual_error is None:
        return
    if facts.virtual_error:
        yield FindingArea.VIRTUAL.error(
            "virtual-gpu",
            f"its self-check failed: {facts.virtual_error}",
            why="vramfit run --gpu, the planner and the tests on virtual cards cannot run in this interpreter",
            fix=ADVICE.removesuffix("."),
        )
    elif (facts.host.system, facts.host.machine) != _TESTED:
        yield FindingArea.VIRTUAL.info(
            "virtual-gpu",
            f"its self-check passed on {facts.host.system} {facts.host.machine}",
            why="its developers have not run it on this platform",
            fix="Report what differs from a card",
        )
    else:
        yield FindingArea.VIRTUAL.ok("virtual-gpu", "its self-check passed")


def runs_on(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether kernels compiled for some architectures run on a card.

    Machine code (``sm_86``) runs on cards of the same major version and no lower minor one; intermediate code
    (``compute_90``) on all that are not older (CUDA C++ programming guide, "Binary compatibility" and "PTX
    compatibility"). Names that end in ``a`` or ``f`` bind to that version or family.
    """
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            continue
        version = (int(match.group(2)), int(match.group(3)))
        if match.group(4) == "a":
            fits = version == capability
        elif match.group(1) == "sm" or match.group(4) == "f":
            fits = version[0] == capability[0] and version <= capability
        else:
            fits = version <= capability
        if fits:
            return True
    return False


def _unsupported(device: TorchDevice, architectures: Sequence[str], cuda: str) -> Finding:
    wanted = "{}.{}".format(*(device.capability or (0, 0)))
    return FindingArea.CARDS.error(
        "architecture",
        f"cuda:{device.index} ({device.name}) has compute capability {wanted}; this torch (CUDA {cuda}) has "
        f"kernels for {', '.join(architectures)}",
        why='its kernels fail there: "no kernel image is available for execution on the device"',
        fix="Install a torch built with a CUDA version that knows this card: newer for a new card, older for one "
        "whose support has ended",
    )


def _driver_fix(facts: Facts) -> str:
    if "mismatch" in facts.driver_error.lower():
        return "The driver was updated while its old part is still loaded: restart the machine"
    if "did not answer" in facts.driver_error:
        return "The driver hangs: look at dmesg for Xid errors, end stuck processes (fuser -v /dev/nvidia*), restart"
    if "not found" in facts.driver_error.lower() and facts.container.kind:
        return "Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    if facts.host.wsl:
        return "Update Windows' NVIDIA driver and run wsl --update; install no driver inside WSL"
    return "Install or repair the NVIDIA driver, then run nvidia-smi"


def _dotted(version: tuple[int, int] | None) -> str:
    return "?" if version is None else "{}.{}".format(*version)


CHECKS: tuple[Check, ...] = (
    check_python,
    check_torch,
    check_driver,
    check_init,
    check_architectures,
    check_virtual,
)
