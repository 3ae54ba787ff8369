"""vramfit makes PyTorch programs fit the GPU they have."""

__version__ = "0.1.0"
