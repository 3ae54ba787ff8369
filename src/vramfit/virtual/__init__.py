"""The virtual GPU: CUDA programs run unmodified, compute nothing, and their memory comes out as on the card.

Import `vramfit.virtual.gpu` for the context manager and `vramfit.virtual.virtual_run` for child processes; this package
itself imports nothing, so that the runner works without torch.
"""
