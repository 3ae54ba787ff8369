"""Models larger than the card: weights wait on the host or on disk, and come to the card layer by layer.

- `layer_weights`: which parameters belong to a layer alone, and where its modules look for them.
- `pinned_home`, `weight_files`: where weights wait, in pinned memory and on disk.
- `weight_slots`: the memory on the card that layers take turns in.
- `weight_stream`: which layer is brought when.
- `placement`: the decision which layers stay on the card, as JSON.
"""
