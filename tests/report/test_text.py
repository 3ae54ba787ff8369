import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.analysis import fold_layers, module_tree
from vramfit.report.text import (
    bar,
    elide_left,
    elide_middle,
    percent,
    relative,
    seconds,
    short_op,
    split_width,
    tree_lines,
)
from vramfit.trace import Category


@pytest.mark.parametrize(
    ("share", "expected"), [(0, ""), (0.5, "█████"), (1, "██████████"), (0.55, "█████▌"), (2, "██████████")]
)
def test_bars_are_drawn_to_an_eighth(share: float, expected: str) -> None:
    assert bar(share, 10) == expected


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6), st.integers(8, 200))
def test_a_width_is_shared_out_completely(amounts: list[int], width: int) -> None:
    cells = split_width(amounts, width)
    assert sum(cells) == (width if any(amounts) else 0)
    assert all((cell > 0) == (amount > 0) for cell, amount in zip(cells, amounts, strict=True))


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [(0, 5, "0 %"), (1, 1000, "<1 %"), (1, 4, "25 %"), (4, 4, "100 %"), (1, 0, "0 %")],
)
def test_percent(part: int, whole: int, expected: str) -> None:
    assert percent(part, whole) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2e-6, "2 µs"), (0.0456, "45.6 ms"), (1.234, "1.23 s"), (123.4, "123 s"), (1200, "20.0 min")],
)
def test_seconds(value: float, expected: str) -> None:
    assert seconds(value) == expected


def test_operators_lose_namespace_and_overload() -> None:
    assert short_op("aten.mm.default") == "mm"
    assert short_op("aten::mm") == "mm"
    assert short_op("aten.add.Tensor") == "add"
    assert short_op("cublas") == "cublas"
    assert short_op("") == ""
    assert short_op("mylib.attention.default") == "mylib.attention"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.025, "+2.50 %"),
        (-1, "-100.00 %"),
        (9.9999, "+999.99 %"),
        (529.6108, "+52,961 %"),
        (9999.99, "+999,999 %"),
        (10_000, "+1.0e+06 %"),
        (1.23e9, "+1.2e+11 %"),
    ],
)
def test_changes_are_short(share: float, text: str) -> None:
    assert relative(share) == text
    assert len(text) <= 10


def test_long_paths_lose_their_beginning() -> None:
    assert elide_left("src/model.py:42", 11) == "…odel.py:42"
    assert elide_left("a.py:1", 11) == "a.py:1"


def test_long_messages_lose_their_middle() -> None:
    assert elide_middle("no such\n  file", 12) == "no such file"
    assert elide_middle("no such file: labels.csv", 16) == "no such fi…s.csv"


def test_chains_of_single_children_are_one_line() -> None:
    tree = fold_layers(
        module_tree([(f"GPT.body.h.{n}.{part}", Category.OTHER, 10) for n in range(4) for part in "ab"])
    )
    lines = tree_lines(tree, limit=10)
    assert [(line.depth, line.label, line.total_bytes) for line in lines] == [
        (0, "GPT.body.h.* ×4", 80),
        (1, "a", 40),
        (1, "b", 40),
    ]


def test_small_modules_are_summed_up() -> None:
    amounts = [("Net.big", Category.OTHER, 1000)] + [(f"Net.small{n}", Category.OTHER, 1) for n in range(3)]
    lines = tree_lines(module_tree(amounts), limit=10)
    assert [(line.label, line.total_bytes) for line in lines] == [
        ("Net", 1003),
        ("big", 1000),
        ("3 smaller", 3),
    ]


def test_a_single_small_module_keeps_its_name() -> None:
    tree = module_tree([("Net.big", Category.OTHER, 1000), ("Net.head", Category.OTHER, 1)])
    assert [line.label for line in tree_lines(tree, limit=10)] == ["Net", "big", "head"]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc01"), max_size=5).map(".".join), st.integers(1, 100)),
        max_size=30,
    ),
    st.integers(1, 12),
)
def test_lines_never_exceed_the_limit_nor_count_twice(amounts: list[tuple[str, int]], limit: int) -> None:
    tree = fold_layers(module_tree((path, Category.OTHER, amount) for path, amount in amounts))
    lines = tree_lines(tree, limit=limit)
    assert len(lines) <= limit
    assert sum(line.total_bytes for line in lines if line.depth == 0) <= tree.total_bytes
