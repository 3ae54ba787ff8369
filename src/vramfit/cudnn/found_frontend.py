"""Finds the cudnn-frontend with which attention's graphs are made, and says in words why none can be used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from vramfit.cudnn.found_library import CudnnInstallation, dotted

LEAST_FRONTEND = (1, 19)
"""The first that lets the caller say which card attention is meant for (``set_sm_version``) and then asks CUDA nothing:
1.18 still calls ``cudaGetDevice`` (``node/sdpa_support_surface.h``)."""

LEAST_CUDNN = 91000
"""The first cuDNN known to make plans of attention without a card: 9.8 loads each kernel while its plan is made."""

WANTS_DRIVER = "cuDNN wants the driver's library (libcuda.so.1) for it, which is not here"
"""Said where NVIDIA's driver is not installed: cuDNN refuses to plan attention then, although it needs no card."""

_MODULE = "_compiled_module"
_PACKAGE = "cudnn"
_RECORD = "nvidia_cudnn_frontend-"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontendInstallation:
    """A cudnn-frontend, or why there is none to use.

    Attributes:
        module: path of its compiled module; empty where attention cannot be asked about.
        lacks: why that is so, in a few words.
    """

    module: str = ""
    lacks: str = ""


def find_frontend(cudnn: CudnnInstallation) -> FrontendInstallation:
    """Look for the package ``nvidia-cudnn-frontend`` beside a cuDNN, then where this Python finds packages.

    Nothing is loaded. What cuDNN itself wants for attention, NVRTC and the driver's library, is looked for where it is
    loaded.

    Args:
        cudnn: the library that is to be asked.
    """
    if cudnn.version and cudnn.version < LEAST_CUDNN:
        return FrontendInstallation(
            lacks=f"cuDNN makes plans of attention without a card from {dotted(LEAST_CUDNN)} on"
        )
    lacks = "cudnn-frontend is not installed"
    for packages in _folders(Path(cudnn.library)):
        if not (packages / _PACKAGE).is_dir():
            continue
        for record in packages.glob(f"{_RECORD}*.dist-info"):
            version = record.name.removeprefix(_RECORD).removesuffix(".dist-info")
            found = _in_package(packages / _PACKAGE, version)
            if found.module:
                return found
            lacks = found.lacks
    return FrontendInstallation(lacks=lacks)


def _folders(library: Path) -> Iterator[Path]:
    """Folders of packages: the one of the library (``nvidia/cudnn/lib`` below it), then those of this Python."""
    yield library.parents[3] if len(library.parents) > 3 else library.parent
    yield from (Path(entry or ".") for entry in sys.path)


def _in_package(package: Path, version: str) -> FrontendInstallation:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < LEAST_FRONTEND:
        least = ".".join(map(str, LEAST_FRONTEND))
        return FrontendInstallation(
            lacks=f"cudnn-frontend {version} makes no graphs without a card, {least} does"
        )
    for suffix in EXTENSION_SUFFIXES:
        if (module := package / f"{_MODULE}{suffix}").is_file():
            return FrontendInstallation(module=str(module.absolute()))
    return FrontendInstallation(lacks=f"cudnn-frontend {version} is installed for another Python")
