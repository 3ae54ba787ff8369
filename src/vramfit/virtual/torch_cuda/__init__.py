"""``torch.cuda`` as a program finds it on the virtual GPU; `install` puts it in place.

Not covered: pluggable allocators (a warning says so), ``torch.cuda.gds``, green contexts, jiterator,
``torch.accelerator.Graph``, ``can_use_flash_attention`` and its kin, ``torch.profiler``'s CUDA activities, NCCL calls
of ``torch.cuda.nccl``, and pynvml itself.
"""

from vramfit.virtual.torch_cuda.base import installed_machine as installed_machine
from vramfit.virtual.torch_cuda.base import invalid_device as invalid_device
from vramfit.virtual.torch_cuda.installation import install as install
from vramfit.virtual.torch_cuda.rng import VirtualGenerator as VirtualGenerator
from vramfit.virtual.torch_cuda.rng import default_generator as default_generator
from vramfit.virtual.torch_cuda.rng import virtual_generator as virtual_generator
