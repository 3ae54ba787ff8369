"""The table of rules is made of the modules of the package."""

import pkgutil
from importlib import import_module

from vramfit.virtual import kernels


def test_every_module_with_rules_takes_part_and_no_op_has_two() -> None:
    found = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        for op in getattr(import_module(f"vramfit.virtual.kernels.{module.name}"), "RULES", {}):
            assert op not in found, (op, found[op], module.name)
            found[op] = module.name
    assert found.keys() == kernels._RULES.keys()
    assert len(set(found.values())) >= 20
