"""Recording real memory: who allocates it, and who holds it."""
