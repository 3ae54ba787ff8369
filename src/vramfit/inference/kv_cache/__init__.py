"""Key-value caches of language models in blocks of one pool: shared, freed and spilled block by block."""
