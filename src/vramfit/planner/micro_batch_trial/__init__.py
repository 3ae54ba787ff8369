"""Whether a batch can be cut into micro-batches with the gradients of the whole: tried for real, as far as it can
be."""
