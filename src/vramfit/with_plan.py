"""``python -m vramfit.with_plan PLAN.toml SCRIPT [ARGS]``: runs a program with a plan, and nothing else of vramfit.

For real cards, behind launchers too: ``torchrun --nproc-per-node 2 -m vramfit.with_plan plan.toml train.py``, and so
``accelerate launch -m vramfit.with_plan`` and ``deepspeed --module vramfit.with_plan``.
``-m MODULE`` stands in place of a script as in python. What watches for the model is gone once the plan is attached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

USAGE = "python -m vramfit.with_plan PLAN.toml (SCRIPT | -m MODULE) [ARGS]"

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Which of the two counts depends on the release of torch."""


def main(arguments: list[str]) -> None:
    """Run the program of a command line with a plan.

    Raises:
        UsageError: there is no plan or no program, or the plan cannot be attached to it.
        SystemExit: what the program ended with.
    """
    from vramfit.cli.program import check_source, program_command
    from vramfit.errors import UsageError
    from vramfit.planner.planned_program import PlannedProgram

    passed_on, arguments = _of_launcher(arguments)
    if len(arguments) < 2:
        raise UsageError("there is no plan or no program", f"Write it as {USAGE}")
    planned = PlannedProgram.load(Path(arguments[0]))
    is_module = arguments[1] == "-m"
    if is_module and len(arguments) < 3:
        raise UsageError("-m needs the name of a module", f"Write it as {USAGE}")
    rest = [*passed_on, *arguments[3 if is_module else 2 :]]
    command = (
        program_command(arguments[2], rest) if is_module else program_command(None, [arguments[1], *rest])
    )
    check_source(command)
    if planned.alloc_conf is not None:
        os.environ.update(dict.fromkeys(_SETTINGS, planned.alloc_conf))
    if other := planned.made_for(command):
        _tell(f"{planned.file} was made for another command line: {other}")
    _run(command, planned)


def _of_launcher(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What a launcher (deepspeed) puts before the arguments, for the program, and the rest."""
    count = 0
    while count < len(arguments) and arguments[count].startswith(("--local_rank", "--local-rank")):
        count += 1
    return arguments[:count], arguments[count:]


def _run(command: list[str], planned: Any) -> None:
    from vramfit.attaching.attached_script import AttachedScript
    from vramfit.attaching.first_training import attach_at_first_training
    from vramfit.launch.running import become

    refused = []

    def refuse(error: Exception) -> NoReturn:
        refused.append(error)
        _tell_error(error)
        raise SystemExit(getattr(error, "exit_code", 2))

    watch = attach_at_first_training(
        lambda finder: AttachedScript(planned.plan.choices, planned.target, finder), refuse
    )
    try:
        become(command)
    finally:
        watch.close()
        if not refused:
            _tell(_kept(planned, watch.script))


def _kept(planned: Any, script: Any) -> str:
    """What the plan promised and what was seen, in one line."""
    import torch

    from vramfit.units import format_bytes

    names = ", ".join(choice.name for choice in planned.plan.choices) or "nothing to change"
    if script.live is None:
        return f"{planned.file} was not attached: the program trained no model before it ended"
    promised = f"{format_bytes(planned.plan.after.peak_reserved_bytes)} reserved promised on {planned.plan.aim.device}"
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return f"ran with {planned.file} ({names}): {promised}; no card was used"
    seen = format_bytes(torch.cuda.max_memory_reserved())
    return f"ran with {planned.file} ({names}): {promised}, {seen} seen on {torch.cuda.get_device_name()}"


def _tell(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"vramfit: {text}", file=sys.stderr, flush=True)


def _tell_error(error: Any) -> None:
    lines = [f"error: {getattr(error, 'message', error)}"]
    if hint := getattr(error, "hint", ""):
        lines.append(f"next:  {hint}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _guarded(run: Callable[[list[str]], None], arguments: list[str]) -> None:
    from vramfit.errors import VramfitError

    try:
        run(arguments)
    except VramfitError as error:
        _tell_error(error)
        raise SystemExit(error.exit_code) from None


def _ended(end: SystemExit) -> int:
    """The exit code that Python makes of an exit; a text is printed, as Python does."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    code = 0
    try:
        _guarded(main, sys.argv[1:])
    except SystemExit as end:
        code = _ended(end)
    from vramfit.launch.running import end_interpreter

    end_interpreter(code)
