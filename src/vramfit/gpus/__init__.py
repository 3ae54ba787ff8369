"""What a GPU is: one GpuSpec per card, the catalogue of cards, and finding one by what people write."""

from vramfit.gpus.card_file import catalogue
from vramfit.gpus.lookup import GpuMatch, find_gpu, match_gpu
from vramfit.gpus.spec import GpuKind, GpuSpec, Price

__all__ = ["GpuKind", "GpuMatch", "GpuSpec", "Price", "catalogue", "find_gpu", "match_gpu"]
