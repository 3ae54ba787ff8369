"""Values on their way through JSON."""

import json
from types import MappingProxyType

import pytest
import torch

from vramfit.gpus import GpuSpec, catalogue
from vramfit.plain import from_plain, to_plain


def test_every_card_comes_back() -> None:
    for card in catalogue():
        assert from_plain(json.loads(json.dumps(to_plain(card))), GpuSpec) == card


def test_classes_of_texts_and_mappings_are_plain_ones() -> None:
    plain = to_plain(
        {"torch": torch.torch_version.TorchVersion("2.13.0"), "of": MappingProxyType({"a": (1, 2)})}
    )
    assert plain == {"torch": "2.13.0", "of": {"a": [1, 2]}}
    assert type(plain["torch"]) is str


def test_what_has_no_plain_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no plain form"):
        to_plain(object())


def test_numbers_beside_all_numbers_pass() -> None:
    assert json.loads(json.dumps(to_plain([float("inf"), 1.5]))) == [float("inf"), 1.5]
