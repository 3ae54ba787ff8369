"""What the virtual GPU and the recorder share: ops, storages, who allocates, steps, and gradients that are summed."""
