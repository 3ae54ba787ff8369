"""What the shell completes: names of cards."""

from __future__ import annotations

from collections.abc import Iterator


def gpu_names(incomplete: str) -> list[tuple[str, str]]:
    """Cards of the catalogue whose names begin with what was typed, each with its memory.

    They are written with hyphens instead of spaces, which need no quotes in any shell, and begin as they were typed:
    ``rtx-40`` is completed to ``rtx-4090``. After a digit the series is left out: ``4090`` is the RTX 4090.
    Nothing is offered for a size or for a file, whose names the shell completes itself.
    """
    from vramfit.gpus import catalogue
    from vramfit.units import format_bytes

    typed = incomplete.lower().replace(" ", "-")
    digits = typed[:1].isdigit()
    return [
        (incomplete + name[len(typed) :], format_bytes(spec.total_bytes))
        for spec in catalogue()
        for name in _spellings(spec.name, digits=digits)
        if name.lower().startswith(typed)
    ]


def _spellings(name: str, *, digits: bool) -> Iterator[str]:
    words = name.split()
    if not digits:
        yield "-".join(words)
    elif words[0] in ("RTX", "GTX") and words[1][0].isdigit():
        yield "-".join(words[1:])
