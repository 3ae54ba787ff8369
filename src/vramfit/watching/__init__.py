"""Watching a program's memory while it runs: what is sampled, what it means, and where it is reported."""
