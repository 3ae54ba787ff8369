"""Recording real memory: what is allocated, by whom and when."""
