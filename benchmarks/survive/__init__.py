"""Survival at run time: what holds when memory runs out, is slow, or is taken away."""
