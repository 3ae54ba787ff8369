"""Parts of ``benchmarks/frontier.py``: peak memory against arithmetic, for peers and for plans."""
