"""``torch.cuda`` as a program finds it on the virtual GPU; `install` puts it in place.

Not covered: pluggable allocators (a warning says so), ``torch.cuda.gds``, green contexts, jiterator,
``torch.accelerator.Graph``, ``can_use_flash_attention`` and its kin, ``torch.profiler``'s CUDA activities, NCCL calls
of ``torch.cuda.nccl``, and pynvml itself.
"""

from vramfit.virtual.torch_cuda.base import installed_machine, invalid_device
from vramfit.virtual.torch_cuda.installation import install
from vramfit.virtual.torch_cuda.rng import VirtualGenerator, default_generator, virtual_generator

__all__ = [
    "VirtualGenerator",
    "default_generator",
    "install",
    "installed_machine",
    "invalid_device",
    "virtual_generator",
]
