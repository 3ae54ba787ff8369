"""The commands with which people start the ranks of a program: torchrun, accelerate, deepspeed; read, never run.

Each launcher's options are parsed as it parses them. What they say of the network is left aside: no rank is reached.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from vramfit.errors import UsageError
from vramfit.virtual.ranks.rank_place import PORT, RankPlace, elastic_variables

_LEGACY = "torch.distributed.launch"
_GROUPED = ("accelerate", "accelerate.commands.accelerate_cli")
"""accelerate's commands, of which launch is one."""
_NAMES = {
    "torchrun": ("torchrun", "torch.distributed.run", _LEGACY),
    "accelerate launch": (*_GROUPED, "accelerate-launch", "accelerate.commands.launch"),
    "deepspeed": ("deepspeed", "ds", "deepspeed.launcher.runner"),
}
"""Programs and modules of each launcher."""
_OTHERS = ("mpirun", "mpiexec", "srun", "horovodrun", "colossalai", "composer", "ray")
"""Programs that start ranks too, whose options nobody reads here."""
_PYTHON = re.compile(r"python(?:3(?:\.\d+)?)?")
_ALL_CARDS = ("gpu", "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What a launcher's command starts.

    Attributes:
        launcher: its name.
        program: what python would be given.
        per_node: processes on each node.
        nodes: how many nodes.
        environ: variables that it adds, beside those of a rank.
        numbered: it gives each process its number on its node, as ``--local_rank=N`` before the script's own arguments.
    """

    launcher: str
    program: tuple[str, ...]
    per_node: int
    nodes: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)
    numbered: str | None = None

    @property
    def size(self) -> int:
        """How many processes in all."""
        return self.per_node * self.nodes

    def command(self, place: RankPlace) -> list[str]:
        """What python is given for a rank."""
        if self.numbered is None:
            return list(self.program)
        at = 2 if self.program[0] == "-m" else 1
        return [*self.program[:at], f"{self.numbered}={place.local_rank}", *self.program[at:]]


def launched(command: Sequence[str], cards: int) -> Launched | None:
    """What a command starts; None where it is not one of a launcher.

    Args:
        command: a launcher with its arguments, or ``-m``, its module and its arguments; ``python`` may stand before.
        cards: of a node, for options that mean all of them.

    Raises:
        UsageError: its options cannot be read, or it starts what no virtual run can be.
    """
    name, rest = _parts(command)
    if name in _OTHERS and not Path(name).is_file():
        raise UsageError(
            f"{name}'s commands are not read",
            "Give the script itself and say how many ranks there are: --ranks 8 train.py",
        )
    starts = _STARTS.get(launcher_of(command) or "")
    return None if starts is None else starts(name, rest, cards)


def launcher_of(command: Sequence[str]) -> str | None:
    """The name of the launcher of a command; None where it is none."""
    name, _ = _parts(command)
    return next((launcher for launcher, names in _NAMES.items() if name in names), None)


def _parts(command: Sequence[str]) -> tuple[str, list[str]]:
    """The program or module of a command, and what follows."""
    words = without_python(command)
    if words[:1] == ["-m"]:
        return (words[1], words[2:]) if len(words) > 1 else ("", [])
    return (Path(words[0]).name, words[1:]) if words else ("", [])


def without_python(command: Sequence[str]) -> list[str]:
    """A command without the interpreter that stands before it."""
    words = list(command)
    if words and _PYTHON.fullmatch(Path(words[0]).name) and Path(words[0]).suffix != ".py":
        words = words[1:]
        while words and words[0] in ("-u", "-O", "-OO", "-B", "-s", "-E", "-I"):
            words = words[1:]
    return words


class LauncherParser(argparse.ArgumentParser):
    """Reads a launcher's options, and says in one line what is wrong with them."""

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.prog}: {message}", f"Write it as it runs on cards; {self.prog} --help lists its options"
        )


def torchrun_parser() -> LauncherParser:
    """torchrun's options (torch/distributed/run.py: get_args_parser), with and without hyphens."""
    parser = LauncherParser(prog="torchrun", add_help=False)

    def option(*names: str, **how: Any) -> None:
        both = [name for one in names for name in dict.fromkeys((one, "--" + one[2:].replace("-", "_")))]
        parser.add_argument(*(both if names[0].startswith("--") else names), **how)

    option("--nnodes", default=os.environ.get("PET_NNODES", "1"))
    option("--nproc-per-node", default=os.environ.get("PET_NPROC_PER_NODE", "1"))
    for name in ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval"):
        option(f"--{name}")
    for name in ("start-method", "event-log-handler", "role", "log-dir", "local-ranks-filter", "node-rank"):
        option(f"--{name}")
    for name in (
        "master-addr",
        "master-port",
        "local-addr",
        "logs-specs",
        "numa-binding",
        "signals-to-handle",
        "log-line-prefix-template",  # since 2.14, as the next
        "print-completion",
    ):
        option(f"--{name}")
    for name in ("duplicate-stdout-filters", "duplicate-stderr-filters"):
        option(f"--{name}", nargs="*")
    for name in ("shutdown-timeout",):
        option(f"--{name}")
    parser.add_argument("-r", "--redirects")
    parser.add_argument("-t", "--tee")
    parser.add_argument("-m", "--module", action="store_true")
    for name in ("standalone", "no-python", "run-path", "virtual-local-rank"):
        option(f"--{name}", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _torchrun(name: str, arguments: list[str], cards: int) -> Launched:
    legacy = name == _LEGACY
    parser = torchrun_parser()
    if legacy:
        parser.add_argument("--use-env", "--use_env", action="store_true")
    options = parser.parse_args(arguments)
    if options.no_python:
        raise UsageError(
            "torchrun --no-python starts a program that is not Python's", "Give its Python script itself"
        )
    nodes = str(options.nnodes).split(":")[
        -1
    ]  # of a range the most: an elastic job begins with all that come
    count = _count("--nnodes", nodes, None)
    return Launched(
        launcher="torch.distributed.launch" if legacy else "torchrun",
        program=_program(options.training_script, options.training_script_args, module=options.module),
        per_node=_count("--nproc-per-node", options.nproc_per_node, cards),
        nodes=count,
        environ=elastic_variables(options, count),
        numbered="--local-rank" if legacy and not options.use_env else None,
    )


def _deepspeed(name: str, arguments: list[str], cards: int) -> Launched:
    """DeepSpeed's options (deepspeed/launcher/runner.py: parse_args)."""
    del name
    parser = LauncherParser(prog="deepspeed", add_help=False)
    parser.add_argument("-H", "--hostfile")
    for name in ("include", "exclude"):
        parser.add_argument("-" + name[0], f"--{name}", default="")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    for name in (
        "min_elastic_nodes",
        "max_elastic_nodes",
        "master_port",
        "master_addr",
        "node_rank",
        "launcher",
    ):
        parser.add_argument(f"--{name}")
    for name in (
        "launcher_args",
        "save_pid",
        "enable_each_rank_log",
        "autotuning",
        "bind_core_list",
        "ssh_port",
    ):
        parser.add_argument(f"--{name}", nargs="?" if name == "save_pid" else None)
    for name in (
        "module",
        "no_python",
        "no_local_rank",
        "force_multi",
        "elastic_training",
        "bind_cores_to_rank",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--no_ssh", action="store_true")
    parser.add_argument("--no_ssh_check", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.no_python:
        raise UsageError(
            "deepspeed --no_python starts a program that is not Python's", "Give its Python script itself"
        )
    per_node, nodes = _deepspeed_slots(options, cards)
    return Launched(
        launcher="deepspeed",
        program=_program(options.user_script, options.user_args, module=options.module),
        per_node=per_node,
        nodes=nodes,
        numbered=None if options.no_local_rank else "--local_rank",
    )


def _deepspeed_slots(options: argparse.Namespace, cards: int) -> tuple[int, int]:
    """Processes of a node, and nodes."""
    slots = _hostfile(Path(options.hostfile)) if options.hostfile else []
    if (options.include or options.exclude) and (options.num_nodes >= 0 or options.num_gpus >= 0):
        raise UsageError(  # as deepspeed/launcher/runner.py: main
            "deepspeed takes --num_nodes and --num_gpus and --include or --exclude apart",
            "Leave one kind out",
        )
    if options.include or options.exclude:
        kept = [one.partition(":")[2] for one in str(options.include).split("@") if one]
        numbers = {len(part.split(",")) for part in kept if part}
        if options.exclude or len(numbers) != 1 or any(not part for part in kept):
            raise UsageError(
                "deepspeed's --include and --exclude name cards of hosts that only the cluster knows",
                "Give --num_nodes and --num_gpus instead",
            )
        return numbers.pop(), len(kept)
    nodes = options.num_nodes if options.num_nodes > 0 else len(slots) or 1
    per_node = options.num_gpus if options.num_gpus > 0 else min(slots, default=cards)
    return per_node, nodes


def _hostfile(file: Path) -> list[int]:
    """The slots of each host: lines such as ``worker-1 slots=8``."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read the hostfile {file}: {error.strerror}", "Give --num_nodes and --num_gpus"
        ) from None
    found = [
        re.fullmatch(r"\S+\s+slots=(\d+)", line.strip())
        for line in text.splitlines()
        if line.split("#")[0].strip()
    ]
    if not found or any(one is None for one in found):
        raise UsageError(f"{file} is not a hostfile", "Its lines are such as: worker-1 slots=8")
    return [int(one[1]) for one in found if one is not None]


def _accelerate(name: str, arguments: list[str], cards: int) -> Launched:
    """What ``accelerate launch`` starts, read by accelerate itself: its configuration file decides with its options."""
    if name in _GROUPED:
        if arguments[:1] != ["launch"]:
            raise UsageError(
                "of accelerate's commands only launch starts a program", "Write accelerate launch ..."
            )
        arguments = arguments[1:]
    try:
        from accelerate.commands import launch
        from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
    except ImportError:
        raise UsageError("accelerate is not installed", "Install it: pip install accelerate") from None
    parser = launch.launch_command_parser()
    parser.error = _refusal("accelerate launch")
    options = parser.parse_args(arguments)
    if options.num_processes is None and not _configured(options):
        options.num_processes = cards
    try:
        options, settings, with_precision = launch._validate_launch_command(options)
    except ValueError as error:
        raise UsageError(f"accelerate launch: {error}", "Write it as it runs on cards") from None
    if options.use_megatron_lm or options.tpu or options.cpu:
        raise UsageError(
            "accelerate launch is to use Megatron-LM, a TPU or the CPU",
            "Choose distributed_type MULTI_GPU, FSDP or DEEPSPEED",
        )
    if options.no_python:
        raise UsageError("--no_python starts a program that is not Python's", "Give its Python script itself")
    machines, processes = int(options.num_machines or 1), int(options.num_processes or cards)
    if processes % machines:
        raise UsageError(
            f"{processes} processes cannot be divided among {machines} machines", "Change one of them"
        )
    options.num_machines, options.num_processes = machines, processes
    port = options.main_process_port
    meeting = {"standalone": port == 0, "master_port": PORT if port is None else port}
    elastic = elastic_variables(argparse.Namespace(**vars(options) | meeting), machines)
    options.main_process_port = 0  # a free one: nobody listens
    before = dict(os.environ)
    if options.use_deepspeed:
        # As accelerate's own launch_command does: a DeepSpeed file must not say anew what its configuration file says.
        said = list(settings.deepspeed_config) if settings else []
        said += ["mixed_precision"] if with_precision else []
        options.deepspeed_fields_from_accelerate_config = ",".join(said)
    try:
        # Of DeepSpeed beside the command of its own launcher, which starts the same program on several machines.
        environ = (
            prepare_deepspeed_cmd_env(options)[1] if options.use_deepspeed else prepare_multi_gpu_env(options)
        )
    except (ValueError, RuntimeError, ImportError) as error:  # options that do not go together, or a library
        raise UsageError(f"accelerate launch: {error}", "Write it as it runs on cards") from None
    return Launched(
        launcher="accelerate launch",
        program=_program(options.training_script, options.training_script_args, module=options.module),
        per_node=processes // machines,
        nodes=machines,
        environ={name: value for name, value in environ.items() if before.get(name) != value} | elastic,
    )


def _configured(options: argparse.Namespace) -> bool:
    """Whether accelerate finds a configuration file."""
    from accelerate.commands.config.config_args import default_config_file

    return options.config_file is not None or Path(default_config_file).is_file()


def _refusal(name: str) -> Callable[[str], NoReturn]:
    def refuse(message: str) -> NoReturn:
        raise UsageError(
            f"{name}: {message}", f"Write it as it runs on cards; {name} --help lists its options"
        )

    return refuse


def _program(script: str, arguments: Sequence[str], *, module: bool) -> tuple[str, ...]:
    return ("-m", script, *arguments) if module else (script, *arguments)


def _count(option: str, text: str, cards: int | None) -> int:
    """A number of processes or nodes.

    Raises:
        UsageError: it is none.
    """
    if cards is not None and text in _ALL_CARDS:
        return cards
    if not re.fullmatch(r"[0-9]{1,7}", text) or not int(text):
        meant = "a number, or gpu for all cards" if cards is not None else "a number"
        raise UsageError(
            f"torchrun {option} {text} is not a number of {'processes' if cards else 'nodes'}",
            f"Give {meant}",
        )
    return int(text)


_STARTS = {"torchrun": _torchrun, "accelerate launch": _accelerate, "deepspeed": _deepspeed}
