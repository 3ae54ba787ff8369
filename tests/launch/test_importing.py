"""While a child interpreter imports, it looks for no garbage; afterwards it does, whatever happened."""

from __future__ import annotations

import gc

import pytest

from vramfit.launch.running import importing


def test_no_garbage_is_looked_for_while_importing() -> None:
    kept = [[]]
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not any(one is kept for one in gc.get_objects()), "what was there is not looked through again"


def test_garbage_is_looked_for_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
