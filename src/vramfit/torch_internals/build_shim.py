"""Lets any build of torch carry fake ``cuda`` tensors through autograd, without a card and without a compiler.

NOTE [What a build lacks]
FakeTensorMode tensors on a ``cuda`` device go forward on any build, but the autograd engine of a CPU-only build aborts
on them: it finds no *device guard* of the device type (`device_guards`), and the *CUDA hooks* tell it that CUDA was not
built (`cuda_hooks`). A CUDA build brings its own guard and hooks, which ask the driver: without a card they fail, and
with one they would select real devices for virtual tensors. So both are replaced on any build, and `uninstall` puts
those of a CUDA build back. `build_check.self_check` proves the result through torch.
"""

from __future__ import annotations

import sys

import torch

from vramfit.errors import EnvironmentUnfitError
from vramfit.torch_internals import cuda_hooks, device_guards, releases
from vramfit.torch_internals.torch_libraries import Undo

# What puts a CUDA build's own guard and hooks back. None while the shim is not in place.
_undo: list[Undo] | None = None


def install() -> None:
    """Make this process able to run autograd on fake ``cuda`` tensors. Idempotent; it lasts as long as the process.

    Raises:
        EnvironmentUnfitError: this torch does not export what is needed, or nothing that it ships says where in a
            virtual table a method stands; the message names the version.
    """
    global _undo
    if _undo is not None:
        return
    done: list[Undo] = []
    try:
        done.append(device_guards.install())
        done.append(cuda_hooks.install())
    except EnvironmentUnfitError:
        _put_back(done)
        raise
    except (OSError, AttributeError, ValueError) as error:
        _put_back(done)
        raise EnvironmentUnfitError(
            f"torch {torch.__version__} on {sys.platform} does not export what the virtual GPU needs ({error})",
            releases.ADVICE,
        ) from error
    _undo = done


def uninstall() -> None:
    """Give a CUDA build its own guard and hooks back. On a CPU build the shim stays: there is nothing to go back to."""
    global _undo
    if _undo is not None and torch.backends.cuda.is_built():
        _put_back(_undo)
        _undo = None


def _put_back(done: list[Undo]) -> None:
    for undo in reversed(done):
        undo()
