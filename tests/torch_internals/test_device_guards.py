"""torch's no-op guard of ``cuda`` outlives the thread that asked for it, and each time it is put in place."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, os, threading
import torch
from vramfit.torch_internals import build_shim, device_guards

def fill():
    '''Write over what C++ has freed: blocks of a guard's size.'''
    process = ctypes.CDLL(None)
    process.malloc.restype = ctypes.c_void_p
    for size in (8, 16, 24):
        for _ in range(500):
            ctypes.memset(process.malloc(size), 0x5a, size)

def go_back():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        weight = torch.empty(4, 4, device="cuda", requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad is not None and weight.grad.device.type == "cuda"

for _ in range(2):
    thread = threading.Thread(target=build_shim.install)
    thread.start()
    thread.join()
    fill()
    go_back()
    device_guards.set_current_device(3)
    assert device_guards.current_device() == 3
    device_guards.set_current_device(0)
    build_shim.uninstall()
    build_shim.install()
    fill()
    go_back()
print("went back", flush=True)
os._exit(0)  # threads of autograd, which were let go above, may end the interpreter's end with an abort
"""


def test_a_guard_lives_on_when_the_thread_that_put_it_there_has_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "went back\n"), done.stderr
