"""vramfit makes PyTorch programs fit the GPU they have.

- `run`: a script or module on the virtual GPU, in a process of its own.
- `VirtualGPU`: the virtual GPU around a block of code.
- `track`: a recording of the memory of any block of code, on a card or on the metered CPU.
- `snapshot`: a line of figures.
- `Workload`: a model and its batches at sizes that can be varied, for ``vramfit plan``, ``fit`` and ``stress``.
- `plain_workload`, `transformers_workload`, `lightning_workload`: one of what you have.
- `chunked`: a call in chunks of its batch or sequence, equal to the whole.
- `batches`: batches by tokens, none larger than a bound on memory allows.
- `largest_batch`: the largest batch that a live training's steps fit with, each size run and taken back.
- `check_leaks`: what grows when a function is called again and again, and who holds it.
- `annotate`, `join_profile`: names for Nsight Systems, and categories for torch.profiler.
- `ModelPool`: several models on one device, the one that is used brought there, others dropped when it needs room.
- `run_ranks`: ranks of a distributed program on virtual GPUs, and the worst of them.
- `together`: what several programs take side by side on one card.
- `plan`, `fit`, `verify`: the cheapest changes that make a workload fit, the largest size that does, and the proof.
- `tiled`: a model over a picture or volume that is too large for the device, tile by tile.
- `TieredStore`: tensors on the device while they are used, else on a peer, the host, or in files.
- `MappedDataset`: samples in memory-mapped files that all processes share.
- `prefetch`: a loader's batches, brought to the device while steps are computed.
- `SharedTensors`: tensors that several processes have, and that leave nothing behind.
- `streamed`: a model that is larger than the card, its weights brought layer by layer.
- `quantized`: weights in fewer bits, a format for each layer, within a budget of bytes.
- `watch`: what a process holds, from a thread, and when its memory runs out.
- `Plan`: what `plan` finds, to be applied to a workload or to your own model and loop.
- `MemoryTrace`: what every run, recording and snapshot comes to.

In a notebook, ``%load_ext vramfit`` gives the cell magic ``%%vram``.

PYTEST_DONT_REWRITE: a package with a pytest plugin would have its assertions rewritten, and may be imported before.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

__version__ = "0.1.0"

# They are imported at first use: `import vramfit` must not import torch. They are listed in `__init__.pyi`.
_imported, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    try:
        return _imported(name)
    except (AttributeError, ImportError):
        if name in __all__:  # a torch that is too old lacks what its modules import
            from vramfit.torch_internals.releases import refuse_older

            refuse_older()
        raise


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext vramfit``: the cell magic ``%%vram``, and traces that show themselves."""
    from vramfit.integrations import jupyter

    jupyter.load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext vramfit``."""
    from vramfit.integrations import jupyter

    jupyter.unload_ipython_extension(shell)
