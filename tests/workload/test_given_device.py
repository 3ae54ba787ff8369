"""Devices that users name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vramfit
from vramfit.errors import UsageError
from vramfit.workload.given_device import device_argument, device_or_default


def test_a_card_gets_its_number() -> None:
    assert device_argument("device", "cpu") == device_or_default("device", None) == torch.device("cpu")
    with vramfit.VirtualGPU("RTX 4090"):
        for given in ("cuda", "cuda:0", torch.device("cuda")):
            assert device_argument("device", given) == torch.device("cuda", 0)
        assert device_or_default("device", None) == torch.device("cuda", 0)
        with pytest.raises(UsageError, match=r"there is no device cuda:1\. There are 1"):
            device_argument("device", "cuda:1")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("gpu", "where='gpu' is no device"),
        (1.5, r"where=1\.5 is no device"),
        (None, "where=None is no device"),
        ("meta", "where='meta' is neither a CUDA device nor the CPU"),
        ("cuda", "there is no CUDA device"),
    ],
)
def test_what_is_no_device_is_one_line(given: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line) as raised:
        device_argument("where", given)
    assert "\n" not in str(raised.value)
