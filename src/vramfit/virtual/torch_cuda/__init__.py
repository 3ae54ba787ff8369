"""``torch.cuda`` as a program finds it on the virtual GPU; `install` puts it in place.

Not covered: pluggable allocators (a warning says so), ``torch.accelerator.Graph``, ``torch.profiler``'s CUDA
activities, what refused.py refuses by name, and packages beside torch that ask the driver themselves (pynvml,
cuda.bindings).
"""

from vramfit.virtual.torch_cuda.base import installed_machine as installed_machine
from vramfit.virtual.torch_cuda.base import invalid_device as invalid_device
from vramfit.virtual.torch_cuda.installation import install as install
from vramfit.virtual.torch_cuda.rng import VirtualGenerator as VirtualGenerator
from vramfit.virtual.torch_cuda.rng import default_generator as default_generator
from vramfit.virtual.torch_cuda.rng import virtual_generator as virtual_generator
