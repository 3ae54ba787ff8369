# Public names, listed here alone: what checkers read, and where lazy_loader finds each at its first use.
import typing

from . import analysis as analysis
from . import doctor as doctor
from . import gpus as gpus
from . import report as report
from . import techniques as techniques
from . import trace as trace
from .api.chunking_api import batches as batches
from .api.chunking_api import chunked as chunked
from .api.feeding_api import prefetch as prefetch
from .api.in_process import VirtualGPU as VirtualGPU
from .api.largest_batch_api import largest_batch as largest_batch
from .api.leak_check import LeakFoundError as LeakFoundError
from .api.leak_check import assert_no_leaks as assert_no_leaks
from .api.leak_check import check_leaks as check_leaks
from .api.programs import Report as Report
from .api.programs import run as run
from .api.quantizing_api import quantized as quantized
from .api.ranks_api import WorldReport as WorldReport
from .api.ranks_api import run_ranks as run_ranks
from .api.streaming_api import streamed as streamed
from .api.survival_api import survive as survive
from .api.tiers_api import TieredStore as TieredStore
from .api.tiling_api import tiled as tiled
from .api.together_api import Together as Together
from .api.together_api import together as together
from .api.tracking import Track as Track
from .api.tracking import snapshot as snapshot
from .api.tracking import track as track
from .api.watch_api import watch as watch
from .errors import VramfitError as VramfitError
from .inference.kv_cache.block_cache import BlockCache as BlockCache
from .inference.residency.model_pool import ModelPool as ModelPool
from .planner.api import fit as fit
from .planner.api import plan as plan
from .planner.api import verify as verify
from .planner.plans import Plan as Plan
from .record.annotating import annotate as annotate
from .record.profilers import join_profile as join_profile
from .runtime.controller.batch_controller import BatchController as BatchController
from .runtime.feeding.mapped_dataset import MappedDataset as MappedDataset
from .runtime.feeding.shared_tensors import SharedTensors as SharedTensors
from .trace import MemoryTrace as MemoryTrace
from .virtual.foreign.fake_kernels import fake_kernel as fake_kernel
from .workload import Workload as Workload
from .workload.makers import lightning_workload as lightning_workload
from .workload.makers import plain_workload as plain_workload
from .workload.makers import transformers_workload as transformers_workload

__version__: str

def load_ipython_extension(shell: typing.Any) -> None: ...
def unload_ipython_extension(shell: typing.Any) -> None: ...
