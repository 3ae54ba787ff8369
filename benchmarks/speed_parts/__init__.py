"""Parts of `benchmarks/speed.py`: programs to be timed on two revisions of vramfit at once."""
