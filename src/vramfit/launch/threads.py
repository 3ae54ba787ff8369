"""Python threads: dispatch modes are per thread, so each new thread of the program enters ours."""

from __future__ import annotations

import threading
from typing import Any

from vramfit.patching import PatchStack
from vramfit.torch_internals.dispatch import TorchDispatchMode


class _ThreadMode(TorchDispatchMode):
    """The same mode, entered on another thread (a mode object keeps state while it is entered)."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._mode.__torch_dispatch__(func, types, args, kwargs)


def install(mode: TorchDispatchMode, patches: PatchStack) -> None:
    """Wrap the private entry of every Python thread: ``run`` itself is often overridden."""
    original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(self: threading.Thread) -> None:
        with _ThreadMode(mode):
            original(self)

    patches.set(threading.Thread, "_bootstrap_inner", bootstrap)
