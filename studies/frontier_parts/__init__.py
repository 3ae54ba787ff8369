"""Parts of ``studies/frontier.py``: peak memory against arithmetic, for peers and for plans."""
