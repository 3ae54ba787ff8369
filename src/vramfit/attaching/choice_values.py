"""Techniques with their settings as plain values, for another process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vramfit.techniques import Choice, find_technique, setting_from_plain, setting_to_plain


def choices_to_plain(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """What `choices_from_plain` reads."""
    return [{"name": choice.name, "setting": setting_to_plain(choice.setting)} for choice in choices]


def choices_from_plain(values: Iterable[dict[str, Any]]) -> tuple[Choice, ...]:
    """The choices that `choices_to_plain` wrote.

    Raises:
        UsageError: there is no such technique or setting.
    """
    found = []
    for one in values:
        technique = find_technique(one["name"])
        found.append(Choice(technique=technique, setting=setting_from_plain(technique, one["setting"])))
    return tuple(found)
