"""A network layer by layer, each over chunks of rows: norms of everything included, and nothing computed twice."""

from vramfit.inference.layerwise.chunk_height import ChunkHeight as ChunkHeight
from vramfit.inference.layerwise.chunk_height import ChunkStore as ChunkStore
from vramfit.inference.layerwise.layer_runner import layerwise as layerwise
from vramfit.inference.layerwise.layer_runner import run_layerwise as run_layerwise
