"""Values on their way through JSON, and values read from files as the types that they should have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

import pytest
import torch
from msgspec import Meta

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, catalogue
from vramfit.plain import Misfit, decode, from_plain, read, to_plain


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


class Bits(Enum):
    FOUR = 4
    EIGHT = 8


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (None, float | None, None),
        (4, Bits, Bits.FOUR),
        ([4, 8], tuple[Bits, ...], (Bits.FOUR, Bits.EIGHT)),
        ({"a": ["b"]}, Mapping[str, tuple[str, ...]], {"a": ("b",)}),
    ],
)
def test_values_get_their_type(value: object, kind: Any, expected: object) -> None:
    found = decode(value, kind, "it")
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (True, int, "count is True. It has to be of type int"),
        (1.0, int, "count is 1.0. It has to be of type int"),
        ("3", float | None, "count is '3'. It has to be of type float"),
        ("a", tuple[str, ...], "count is 'a'. It has to be of type list"),
        (["a", 1], tuple[str, ...], "count is 1. It has to be of type str"),
        ([1], Mapping[str, int], r"count is \[1\]. It has to be of type table"),
        ({"a": "b"}, Mapping[str, int], "count is {'a': 'b'}. It has to be of type int"),
        (5, Bits, "count is 5. Give one of 4, 8"),
        ([4, "8"], tuple[Bits, ...], "count is '8'. Give one of 4, 8"),
    ],
)
def test_what_is_of_another_type_is_refused(value: object, kind: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decode(value, kind, "count")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    rate: Annotated[float, Meta(gt=0, description="a positive number")] | None = None
    blocks: tuple[Annotated[int, Meta(title="a block's size", description="a whole number")], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    name: str


class Outer(TypedDict, total=False):
    cards: Mapping[str, Inner]
    pair: tuple[int, str]
    list: list[int]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"cards": {"a": {"rate": 0}}}, "cards.a.rate is 0, not a positive number"),
        (
            {"cards": {"a": {}, "b": {"blocks": [1, "x"]}}},
            "cards.b.blocks: a block's size is 'x', not a whole number",
        ),
        ({"cards": {"a": [1]}}, "cards.a is [1], not of type table"),
        ({"cards": 3}, "cards is 3, not of type table"),
        ({"pair": [1, 2]}, "pair is 2, not of type str"),
        ({"pair": [1]}, "pair is [1], not of type list"),
        ({"list": [1, "x"]}, "list is 'x', not of type int"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_by_its_place(value: object, message: str) -> None:
    with pytest.raises(Misfit) as caught:
        read(value, Outer)
    assert str(caught.value) == message


def test_a_key_that_is_missing_is_named_by_its_place() -> None:
    with pytest.raises(Misfit, match=r"^cards\.a\.name is missing$"):
        read({"a": {}}, Mapping[str, Named], "cards")


def test_values_of_files_get_the_types_of_a_table() -> None:
    found = read({"cards": {"a": {"rate": 1}}, "pair": [1, "x"]}, Outer)
    assert found == {"cards": {"a": Inner(rate=1.0)}, "pair": (1, "x")}


def test_an_error_of_a_table_names_the_key() -> None:
    with pytest.raises(UsageError, match=r"at b$"):
        decode({"a": 1, "b": "c"}, Mapping[str, int], "count")
