"""Makes what the documents say about the source from the source: the glossary of modules and the table of floors.

    python studies/house_pages.py

`docs/glossary.md` holds every module with the first sentence of its docstring, and CONTRIBUTING.md the floors of the
import contracts with those of their packages. `tests/test_house.py` fails where either is out of date.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vramfit"
GLOSSARY = ROOT / "docs" / "glossary.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

_BEGIN = "<!-- floors: made by studies/house_pages.py -->"
_END = "<!-- end of floors -->"
_HEAD = """\
# Glossary of modules

Every module with the first sentence of its docstring, package by package; the ideas behind them are in
[architecture.md](architecture.md). This page is made by `studies/house_pages.py`.
"""


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, on one line and fit for a table."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(doc.split("\n\n")[0].split())
    sentence = re.match(r".*?[.:](?=\s|$)(?<!e\.g\.)", first)
    text = (sentence[0] if sentence and not sentence[0].endswith(":") else first).rstrip(".")
    return text.replace("|", "\\|")


def glossary() -> str:
    """The text of docs/glossary.md."""
    parts = [_HEAD]
    for package in sorted({path.parent for path in SOURCE.rglob("*.py")}):
        name = package.relative_to(SOURCE.parent).as_posix() + "/"
        parts.append(f"\n## {name}\n\n{summary(package / '__init__.py')}.\n\n| module | |\n|---|---|\n")
        parts.extend(
            f"| `{path.stem}` | {summary(path)} |\n"
            for path in sorted(package.glob("*.py"))
            if path.name != "__init__.py"
        )
    return "".join(parts).replace("\n\n| module | |\n|---|---|\n\n", "\n\n")


def _layered() -> list[dict[str, Any]]:
    """The import contracts of layers, in the order of pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return [one for one in contracts["contracts"] if one["type"] == "layers"]


def floors() -> list[list[str]]:
    """Modules and packages from the ground up, floor by floor, as the import contract has them."""
    layers = next(one["layers"] for one in _layered() if "vramfit.cli" in one["layers"])
    return [[name.strip(" ()") for name in layer.split(":")] for layer in reversed(layers)]


def layers() -> list[list[str]]:
    """The names in the package that belong to the doors, and to the layers plan, adapt and measure."""
    contract = next(one for one in _layered() if one.get("containers") == ["vramfit"])
    return [layer.split(" : ") for layer in contract["layers"]]


def table_of_floors() -> str:
    """The rows of CONTRIBUTING.md."""
    rows = ["| floor, from the ground up | what is there |", "|---|---|"]
    for floor in floors():
        for name in floor:
            path = SOURCE.joinpath(*name.split(".")[1:])
            package = path.is_dir()
            shown = "/".join(name.split(".")[1:]) + ("/" if package else ".py")
            what = summary(path / "__init__.py" if package else path.with_suffix(".py"))
            rows.append(f"| `{shown}` | {what} |")
    return "\n".join(rows)


def contributing() -> str:
    """The text of CONTRIBUTING.md with the table as it has to be."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    return f"{before}{_BEGIN}\n{table_of_floors()}\n{_END}{rest.split(_END)[1]}"


def main() -> None:
    """Write both."""
    GLOSSARY.write_text(glossary(), encoding="utf-8")
    CONTRIBUTING.write_text(contributing(), encoding="utf-8")


if __name__ == "__main__":
    main()
