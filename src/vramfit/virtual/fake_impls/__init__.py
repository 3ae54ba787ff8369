"""Rules for ops that FakeTensorMode cannot describe, or that mean more than shapes on a virtual card.

Every module of this package is imported with it, and adds its rules to the table of registry.py.
"""

import pkgutil
from importlib import import_module

from vramfit.virtual.fake_impls.registry import LATE, RULES

__all__ = ["LATE", "RULES"]

for _found in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")
