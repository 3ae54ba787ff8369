"""Stands in for gym, which does not go with today's NumPy: gymnasium, its successor."""

from gymnasium import *  # noqa: F403
from gymnasium import make, spaces, wrappers  # noqa: F401
