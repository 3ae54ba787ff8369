"""What acts while a model is used without training it: tiles, chunks, layers by rows, batches."""
