"""HTML from values: what is text stays text, whatever characters it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is markup already and must not be escaped again."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: str | int | bool | None) -> Html:
    """An element. Children that are no `Html` are escaped.

    Args:
        children: its content; None is left out.
        attributes: by name; a trailing underscore is dropped (``class_``), other underscores become hyphens.
            True gives the bare name; False and None leave the attribute out.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        written.append(f" {attribute}" if value is True else f' {attribute}="{escape(str(value))}"')
    return Html(f"<{name}{''.join(written)}>{join(children)}</{name}>")


def join(children: Iterable[str | None], separator: str = "") -> Html:
    """Children one after the other, escaped unless they are `Html`."""
    return Html(
        separator.join(
            child if isinstance(child, Html) else escape(child) for child in children if child is not None
        )
    )


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    prose: Sequence[int] = (),
) -> Html:
    """A table in a box that scrolls where it is too wide.

    Args:
        numbers: the columns that hold figures, aligned to the right.
        prose: the columns that hold sentences, which may break.
    """
    kinds = [
        "number" if column in numbers else "wrap" if column in prose else "" for column in range(len(heads))
    ]
    head = join(
        tag("th", name, scope="col", class_=kind or None) for name, kind in zip(heads, kinds, strict=True)
    )
    body = join(
        tag(
            "tr",
            join(tag("td", cell, class_=kind or None) for cell, kind in zip(row, kinds, strict=True)),
        )
        for row in rows
    )
    whole = tag("table", tag("thead", tag("tr", head)), tag("tbody", body))
    return tag("div", whole, class_="scroll", tabindex=0, role="group", aria_label="table")


def details(summary: str, *children: str | None) -> Html:
    """Something that opens on demand."""
    return tag("details", tag("summary", summary), *children)


def figures(pairs: Iterable[tuple[str, str]]) -> Html:
    """Named figures beside each other."""
    return tag(
        "dl",
        join(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs),
        class_="figures",
    )
