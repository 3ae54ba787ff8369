"""Several models that share one card: what fits together, which leaves when another needs room, and moving them.

`placement` says what fits, `eviction` who leaves, `simulation` plays requests against both without any model, and
`model_pool` does it with real ones, which `hosted_model` moves between pinned host memory and the device.
"""
