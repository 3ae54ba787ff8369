"""Parts of weights that are left out: channels with what follows of them, single values, and two of four.

- `vramfit.techniques.pruning.channels.prune_channels`: whole channels, so that tensors are smaller.
- `vramfit.techniques.pruning.zeros.zero_smallest`: single values set to zero, which saves nothing by itself.
- `vramfit.techniques.pruning.zeros.two_of_four`: two of four values, kept in nine sixteenths of the bytes by a card.

None is part of a plan: what is left out is the user's decision, and a model is trained on after it.
"""
