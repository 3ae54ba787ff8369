"""Control characters of other people's texts are shown, not sent."""

from __future__ import annotations

import io

from rich.table import Table
from rich.text import Text

from vramfit.cli.printing import GuardedStream, print_error
from vramfit.console import SafeConsole, shown_controls
from vramfit.errors import UsageError
from vramfit.writing import write_text


def test_controls_are_shown() -> None:
    assert shown_controls("a\x1b[31m\x07\x7f\x9b\r\n\t\u202e\udcffé") == "a␛[31m␇␡\ufffd␍\n\t\ufffd\ufffdé"
    assert shown_controls("plain ✓ text") == "plain ✓ text"


def test_a_console_sends_its_own_styles_alone() -> None:
    stream = io.StringIO()
    console = SafeConsole(
        file=stream, force_terminal=True, color_system="standard", width=60, highlight=False
    )
    table = Table("a name of some length")
    table.add_row(Text("in a table \x1b[2J"))
    console.print(Text("red \x1b]0;title\x07", style="red"), table)
    console.rule("rule \x1b[5m")
    told = stream.getvalue()
    assert "\x1b[31m" in told, "its own"
    assert "\x1b[2J" not in told and "\x1b]0" not in told and "\x1b[5m" not in told and "\x07" not in told
    assert "␛[2J" in told and "␛]0;title" in told


def test_errors_are_told_without(capsys) -> None:
    print_error(UsageError("no file \x1b[31mred", "Give\x9b another"))
    told = capsys.readouterr().err
    assert "\x1b[31mred" not in told and "\x9b" not in told and "␛[31mred" in told


def test_names_that_are_no_text_can_be_written(tmp_path) -> None:
    write_text(tmp_path / "page.html", "\udcff.py ✓")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "\ufffd.py ✓"
    data = io.BytesIO()
    stream = GuardedStream(io.TextIOWrapper(data, encoding="utf-8", write_through=True))
    assert stream.write("\udcff.py ✓\n") == 7
    assert data.getvalue() == "?.py ✓\n".encode()
