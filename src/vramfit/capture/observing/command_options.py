"""The options of a program's own command line, as argparse reads them: whole numbers and flags alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from vramfit.masking import mask_arguments
from vramfit.trace.observed_program import ObservedOption


def following_options(note: Callable[[ObservedOption], object]) -> Callable[..., Any]:
    """`ArgumentParser.parse_known_args` that also tells of the options, to be put in its place."""
    original = argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        for action in self._actions:
            option = _option(action, getattr(found[0], action.dest, None))
            if option is not None:
                note(option)
        return found

    return parse


def _option(action: argparse.Action, value: Any) -> ObservedOption | None:
    """An option as what may be told of it; what could be a secret, a path or a name is left out."""
    flags = [flag for flag in action.option_strings if flag.startswith("--")] or action.option_strings
    if not flags or not isinstance(value, bool | int):
        return None
    if mask_arguments((flags[0], str(value))) != (flags[0], str(value)):
        return None
    is_flag = action.nargs == 0 or isinstance(value, bool)
    return ObservedOption(flag=flags[0], value=int(value), is_flag=is_flag)
