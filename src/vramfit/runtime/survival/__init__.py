"""Recovery from running out of memory: each step of a loop is a transaction that commits or leaves nothing behind."""
