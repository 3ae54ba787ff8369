"""Edits of a program's source: a person's tabs, encoding, line ends and form feeds stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramfit.planner.remedies.source_edits import (
    edited,
    inserted_before,
    with_call_before,
    with_keyword,
    with_other_call,
    wrapped,
    wrapped_alone,
)
from vramfit.trace import Frame


def applied(path: Path, edit: object) -> bytes:
    assert edit is not None
    [text] = edited([edit]).values()  # type: ignore[list-item]
    compile(text, str(path), "exec")
    return text


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        (b"if True:\n\tx = 1\n\ty = 2\n", 3, b"if True:\n\tx = 1\n\tnew()\n\ty = 2\n"),
        (
            b"# coding: latin-1\nname = '\xe9'\nx = 1\n",
            3,
            b"# coding: latin-1\nname = '\xe9'\nnew()\nx = 1\n",
        ),
        (b"a = 1\n\x0c\nx = 1\n", 3, b"a = 1\n\x0c\nnew()\nx = 1\n"),
        (b"a = '\xe2\x80\xa8'\nx = 1\n", 2, b"a = '\xe2\x80\xa8'\nnew()\nx = 1\n"),
        (b"\xef\xbb\xbfa = 1\r\nx = 1\r\n", 2, b"\xef\xbb\xbfa = 1\nnew()\nx = 1\n"),
    ],
)
def test_lines_are_inserted_where_python_counts_them(
    tmp_path: Path, source: bytes, line: int, expected: bytes
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(source)
    edit = inserted_before(Frame(str(path), line, "<module>"), ("new()",), tmp_path)
    assert applied(path, edit) == expected
    assert path.read_bytes() == source


def test_statements_with_tabs_are_wrapped_with_tabs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"for x in y:\n\tout = model(x)\n\tloss = f(out)\n\tloss.backward()\n")
    first, until = Frame(str(path), 2, "<module>"), Frame(str(path), 4, "<module>")
    text = applied(path, wrapped(first, until, "with autocast():", tmp_path))
    assert text == (
        b"for x in y:\n\twith autocast():\n\t\tout = model(x)\n\t\tloss = f(out)\n\tloss.backward()\n"
    )


@pytest.mark.parametrize("text", ['"""a\nb"""', "'a\\\nb'", 'f"""{x}\nb"""'])
def test_a_text_over_several_lines_is_not_indented(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"out = model(x)\nprint({text})\nout.backward()\n")

    first = Frame(str(path), 1, "<module>")
    until = Frame(str(path), path.read_text().count("\n"), "<module>")
    assert wrapped(first, until, "with autocast():", tmp_path) is None


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        (
            "def f():\n\toptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)\n",
            2,
            "def f():\n\timport torchao.optim\n\toptimizer = torchao.optim.AdamW8bit(model.parameters(), lr=0.001)\n",
        ),
        (
            "wrapped = Wrapper(\n    AdamW(\n        model.parameters(),\n    ), 3)\n",
            2,
            "import torchao.optim\nwrapped = Wrapper(\n    torchao.optim.AdamW8bit(model.parameters()), 3)\n",
        ),
    ],
)
def test_another_class_is_called_with_its_import(
    tmp_path: Path, source: str, line: int, expected: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    edit = with_other_call(
        Frame(str(path), line, "f"), "AdamW", "torchao.optim.AdamW8bit", frozenset({"fused"}), tmp_path
    )
    assert applied(path, edit).decode() == expected
    assert edit is not None and edit.words.endswith("after  import torchao.optim")


def test_a_method_is_called_before_another(tmp_path: Path) -> None:
    path = tmp_path / "infer.py"
    path.write_text("\u00e9 = 1; model = Net(\n    width=8,\n).eval().to('cuda')\n", encoding="utf-8")
    edit = with_call_before(Frame(str(path), 3, "<module>"), frozenset({"to"}), ".bfloat16()", tmp_path)
    text = applied(path, edit).decode()
    assert text == "\u00e9 = 1; model = Net(\n    width=8,\n).eval().bfloat16().to('cuda')\n"
    assert edit is not None
    assert edit.words == "in infer.py:1 write Net(width=8).eval().bfloat16().to(...)"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("out = m.generate(x, n=1)\n", "out = m.generate(x, n=1, k=2)\n"),
        ("out = m.generate()\n", "out = m.generate(k=2)\n"),
        ("out = m.generate(\n    x,\n)\n", "out = m.generate(\n    x,\nk=2)\n"),
        ("out = m.generate(x, k=3)\n", None),
    ],
)
def test_a_keyword_is_given_once(tmp_path: Path, source: str, expected: str | None) -> None:
    path = tmp_path / "infer.py"
    path.write_text(source)
    edit = with_keyword(Frame(str(path), 1, "<module>"), frozenset({"generate"}), "k=2", tmp_path)
    assert (None if edit is None else applied(path, edit).decode()) == expected


def test_one_statement_is_wrapped_alone(tmp_path: Path) -> None:
    path = tmp_path / "infer.py"
    path.write_text("for x in y:\n\tout = f(\n\t\tx)\n\tg(out)\n")
    edit = wrapped_alone(Frame(str(path), 2, "<module>"), "with no_grad():", tmp_path)
    assert applied(path, edit) == b"for x in y:\n\twith no_grad():\n\t\tout = f(\n\t\t\tx)\n\tg(out)\n"
    path.write_text("a = 1; b = f(x)\nif f(x): pass\n")
    assert wrapped_alone(Frame(str(path), 2, "<module>"), "with no_grad():", tmp_path) is None
