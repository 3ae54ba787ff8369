"""What acts while a model is used: pure torch, the same on the CPU, on a card and on the virtual GPU."""
