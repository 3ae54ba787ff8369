"""What activations are kept, recomputed or offloaded: decisions, and the mixed-integer program that makes them."""
