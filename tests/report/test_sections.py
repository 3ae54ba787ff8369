"""Rows of the table of tensors: what is joined in one row, and which sizes it names."""

from __future__ import annotations

from rich.text import Text

from analysis.synthetic import Recorder
from vramfit.analysis import peak
from vramfit.report.sections import Sections
from vramfit.report.text import each_of_sizes
from vramfit.trace import Category, Frame, MemoryTrace
from vramfit.units import GIB, KIB, MIB

LINE = (Frame("train.py", 7, "step"),)


def rows(trace: MemoryTrace, width: int = 120) -> list[str]:
    lines: list[Text] = list(Sections(width, None).tensors(peak(trace)))
    return [line.plain for line in lines][2:]


def of_one_line(*sizes: int, stack: tuple[Frame, ...] = LINE) -> MemoryTrace:
    recorder = Recorder()
    for size in sizes:
        recorder.alloc("", size, Category.OTHER, op="aten.empty.memory_format" if stack else "", stack=stack)
    return recorder.finish()


def test_a_row_of_several_sizes_names_the_smallest_and_the_largest() -> None:
    trace = of_one_line(*[32 * MIB] * 3, *[8 * MIB] * 2, MIB)
    (row,) = rows(trace)
    assert row.startswith("  113.00 MiB 6 × 1.00-32.00 MiB ")
    assert row.endswith("train.py:7")


def test_a_row_of_one_size_names_it() -> None:
    (row,) = rows(of_one_line(*[32 * MIB] * 3))
    assert "   96.00 MiB 3 × 32.00 MiB    (other)" in row


def test_blocks_of_which_only_the_size_is_known_are_grouped_by_it() -> None:
    found = rows(of_one_line(*[32 * MIB] * 6, *[8 * MIB] * 24, 196 * MIB, stack=()))
    assert [row.split("(")[0].strip() for row in found] == [
        "196.00 MiB",
        "192.00 MiB 6 × 32.00 MiB",
        "192.00 MiB 24 × 8.00 MiB",
    ]


def test_a_wide_row_keeps_the_columns_of_the_others() -> None:
    recorder = Recorder()
    for size in (700 * KIB, GIB):
        recorder.alloc("", size, Category.OTHER, op="aten.empty.memory_format", stack=LINE)
    recorder.alloc("float32[1024, 1024]", 4 * MIB, Category.INPUTS, op="aten.add.Tensor", stack=LINE)
    first, second = rows(recorder.finish())
    assert "2 × 700.00 KiB-1.00 GiB" in first
    assert first.index("(other)") == second.index("float32[1024,1024]")


def test_narrow_rows_say_the_same() -> None:
    text = " ".join(rows(of_one_line(32 * MIB, 8 * MIB), width=50))
    assert "40.00 MiB = 2 × 8.00-32.00 MiB" in text


def test_the_unit_stands_once_where_it_is_the_same() -> None:
    assert each_of_sizes(1, MIB, MIB) == ""
    assert each_of_sizes(3, MIB, MIB) == "3 × 1.00 MiB"
    assert each_of_sizes(1_200, MIB, 32 * MIB) == "1,200 × 1.00-32.00 MiB"
    assert each_of_sizes(2, KIB, MIB) == "2 × 1.00 KiB-1.00 MiB"
    assert each_of_sizes(2, 512, 96 * MIB) == "2 × 512 B-96.00 MiB"
