"""Tensors in tiers of memory: on the device, a peer, in pinned host memory, in files, with a budget for each."""
