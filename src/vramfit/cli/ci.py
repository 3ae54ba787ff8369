"""``vramfit check`` in continuous integration: what it leaves for GitHub Actions, and JUnit XML for all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vramfit.cli.printing import STANDARD_OUTPUT
from vramfit.errors import VramfitError

if TYPE_CHECKING:
    from vramfit.report import Check
    from vramfit.report.ci import Annotation


def in_github_actions() -> bool:
    """Whether this is a step of a workflow (docs.github.com, "Variables reference")."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def tell_check(check: Check, *, seconds: float, junit: Path | None, json: Path | None) -> None:
    """Write the annotations and the summary of a workflow's step, and JUnit XML where that was asked for.

    Args:
        json: where the result goes as JSON; annotations do not go there too.

    Raises:
        WriteError: the JUnit file cannot be written.
    """
    if in_github_actions():
        from vramfit.report.ci import annotations_of, render_summary

        checked_out = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
        _annotate(annotations_of(check, repository=checked_out), json)
        _summarise(render_summary(check, root=Path.cwd()))
    if junit is not None:
        from vramfit.report import write_text
        from vramfit.report.ci import render_junit

        write_text(junit, render_junit(check, seconds=seconds))


@contextlib.contextmanager
def failures_told(target: str, *, junit: Path | None, json: Path | None) -> Iterator[None]:
    """Tell in the same places of a target that cannot be checked, before the error goes its way."""
    try:
        yield
    except VramfitError as error:
        reason = f"{error.message}. {error.hint}" if error.hint else error.message
        if in_github_actions():
            from vramfit.report.ci import failure_annotation, render_failure_summary

            _annotate([failure_annotation(target, reason)], json)
            _summarise(render_failure_summary(target, reason))
        if junit is not None:
            from vramfit.report import write_text
            from vramfit.report.ci import render_junit_failure

            write_text(junit, render_junit_failure(target, reason))
        raise


def _annotate(annotations: Iterator[Annotation] | list[Annotation], json: Path | None) -> None:
    """Print the annotations at the beginning of lines; the runner reads both streams."""
    stream = sys.stderr if json == STANDARD_OUTPUT else sys.stdout
    for annotation in annotations:
        typer.echo(annotation.command(), file=stream)


def _summarise(text: str) -> None:
    """Append to the step's summary; one that cannot be written changes no gate."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8", errors="replace") as stream:
            stream.write(text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        typer.echo(f"Did not write the step summary {path}: {reason}", err=True)
