"""The options of a run: read alike by every door, refused in its own words, and handed to the child whole."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

import pytest

import vramfit
from vramfit.errors import UnknownGpuError, UsageError
from vramfit.files import Writes
from vramfit.gpus import find_gpu
from vramfit.launch.program_job import ProgramJob
from vramfit.options.declaration import Door
from vramfit.options.limits import Limits
from vramfit.options.run_options import (
    COMMAND_LINE,
    KEYWORDS,
    NOT_OF_A_BLOCK,
    NOT_OF_RANKS,
    NOT_TOGETHER,
    OPTIONS,
    SEVERAL,
    BlockKeywords,
    RunKeywords,
    RunOptions,
    WorldKeywords,
    check_runs,
    given_options,
    read_options,
)

GIVEN: dict[str, Any] = {
    "gpu": "RTX 4090",
    "gpus": 2,
    "alloc_conf": "expandable_segments:True",
    "assume": "typical,imbalance=2",
    "profile": "none",
    "cudnn": "none",
    "clock": "simulated",
    "steps": "3",
    "time": "2m",
    "writes": "keep",
    "writes_through": ["downloads"],
    "need": False,
    "host_memory": True,
    "environ": {"SEED": "1"},
    "cwd": ".",
}


def test_what_is_given_is_read_once_for_all() -> None:
    read = read_options(KEYWORDS, GIVEN)
    assert read == RunOptions(
        gpu=find_gpu("RTX 4090"),
        gpus=2,
        alloc_conf="expandable_segments:True",
        assume="typical,imbalance=2",
        profile="none",
        cudnn="none",
        clock="simulated",
        steps=3,
        time=120.0,
        writes=Writes.KEEP,
        writes_through=("downloads",),
        need=False,
        host_memory=True,
        environ={"SEED": "1"},
        cwd=".",
    )
    assert read == read_options(COMMAND_LINE, GIVEN)
    assert read.limits == Limits(steps=3, seconds=120.0)
    assert set(given_options(read)) == set(GIVEN)


def test_the_child_is_given_the_same_options(tmp_path: Path) -> None:
    job = ProgramJob(folder=str(tmp_path), command=["train.py"], options=read_options(KEYWORDS, GIVEN))
    assert ProgramJob.read(job.write()) == job
    recorded = dataclasses.replace(job, options=read_options(KEYWORDS, {"device": "cpu", "budget": "2GiB"}))
    assert ProgramJob.read(recorded.write()).options == RunOptions(device="cpu", budget=2 << 30)


def test_steady_is_a_number_of_steps_too() -> None:
    assert read_options(COMMAND_LINE, {"steps": "steady"}).limits == Limits(steady=True)


@pytest.mark.parametrize(
    ("written", "seconds"), [("0.00001s", 1e-5), ("100000000000000000h", 3.6e20), (2.5, 2.5)]
)
def test_a_time_is_read_once(written: object, seconds: float) -> None:
    """However Python writes the number that came of it."""
    assert read_options(KEYWORDS, {"time": written}).limits == Limits(seconds=seconds)
    assert RunOptions(time=seconds).limits.seconds == seconds


def test_options_of_a_card_may_come_before_the_card() -> None:
    """The verb that chooses a card checks them then."""
    early = read_options(COMMAND_LINE, {"assume": "typical", "gpus": 2}, card_follows=True)
    assert set(given_options(early)) == {"assume", "gpus"}
    with pytest.raises(UsageError, match="--gpus is for a virtual GPU"):
        check_runs(COMMAND_LINE, ["gpus"])
    check_runs(COMMAND_LINE, ["gpus", "gpu"])


def test_options_given_whole_to_a_block_stand_alone() -> None:
    options = RunOptions(gpu=find_gpu("24GiB"), gpus=2)
    assert len(vramfit.VirtualGPU(options).run.devices) == 2
    for wrong in (lambda: vramfit.VirtualGPU(options, gpus=1), lambda: vramfit.VirtualGPU(RunOptions())):
        with pytest.raises(UsageError, match="name the card and all else"):
            wrong()


@pytest.mark.parametrize(
    ("door", "given", "message", "hint"),
    [
        (
            COMMAND_LINE,
            {"gpu": "24GiB", "budget": "2GiB"},
            "--budget is for recording a real run, and --gpu",
            "",
        ),
        (
            KEYWORDS,
            {"gpu": "24GiB", "device": "cpu"},
            "device= is for recording a real run, and gpu=",
            "gpu='20GiB'",
        ),
        (COMMAND_LINE, {"gpus": 2}, "--gpus is for a virtual GPU", "--gpu NAME"),
        (KEYWORDS, {"assume": "typical"}, "assume= is for a virtual GPU", "gpu="),
        (
            COMMAND_LINE,
            {"writes": "keep"},
            "--writes is for a virtual GPU: a recorded program writes",
            "--gpu",
        ),
        (
            COMMAND_LINE,
            {"gpu": "24GiB", "writes": "real", "writes_through": ["x"]},
            "--writes real writes all files, so --writes-through has no effect",
            "Leave --writes-through out",
        ),
        (COMMAND_LINE, {"device": "cpu", "budget": "much"}, "--budget: ", ""),
        (COMMAND_LINE, {"device": "cpu", "budget": "0"}, "--budget 0 leaves no memory", "2GiB"),
        (KEYWORDS, {"device": "cpu", "budget": "much"}, "budget='much' cannot be read", ""),
        (COMMAND_LINE, {"device": "tpu"}, "--device tpu cannot be recorded", "cuda:1"),
        (KEYWORDS, {"device": 3}, "device=3 cannot be recorded", "cuda:1"),
        (KEYWORDS, {"gpu": "24GiB", "gpus": True}, "gpus=True is no whole number from 1 to 8", ""),
        (KEYWORDS, {"gpu": "24GiB", "gpus": 9}, "gpus=9 is no whole number from 1 to 8", ""),
        (KEYWORDS, {"need": 1}, "need=1 is neither True nor False", ""),
        (KEYWORDS, {"environ": ["SEED"]}, "holds no variables", "dict"),
        (KEYWORDS, {"cwd": "nowhere"}, "there is no folder nowhere", ""),
        (COMMAND_LINE, {"gpu": "24GiB", "kernels": "none.py"}, "there is no file none.py", "--kernels"),
        (KEYWORDS, {"steps": 0}, "0 is not a number of steps", ""),
        (KEYWORDS, {"gpu": "24GiB", "writes": "some"}, "writes='some' is unknown", "discard"),
    ],
)
def test_each_door_refuses_in_its_own_words(
    door: Door, given: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        read_options(door, given)
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_a_card_and_an_option_that_are_not_there() -> None:
    with pytest.raises(UnknownGpuError):
        read_options(KEYWORDS, {"gpu": "RTX 9999"})
    with pytest.raises(TypeError, match="no option 'gpuz' here: choose from gpu, gpus"):
        read_options(KEYWORDS, {"gpuz": 1})
    with pytest.raises(TypeError, match="'time'"):
        read_options(KEYWORDS, {"gpu": "24GiB", "time": "9s"}, without=NOT_OF_A_BLOCK)


def test_python_callers_are_told_the_type_of_every_option() -> None:
    """The keys that type checkers see are the fields."""
    run, world, block = (
        set(typing.get_type_hints(kind)) for kind in (RunKeywords, WorldKeywords, BlockKeywords)
    )
    assert run == set(OPTIONS) - SEVERAL
    assert block == set(OPTIONS) - NOT_OF_A_BLOCK - {"gpu"}
    assert world >= set(OPTIONS) - NOT_OF_RANKS - {"gpu"} and world >= set(OPTIONS) - NOT_TOGETHER - {"gpu"}


@pytest.mark.parametrize(
    ("function", "without"),
    [
        (vramfit.run, SEVERAL),
        (vramfit.run_ranks, NOT_OF_RANKS - {"per_node"}),
        (vramfit.together, NOT_TOGETHER),
    ],
)
def test_functions_list_every_option(function: Any, without: frozenset[str]) -> None:
    parameters = inspect.signature(function).parameters
    listed = {name for name in OPTIONS if name in parameters}
    assert listed >= set(OPTIONS) - without - SEVERAL
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in set(OPTIONS) - without:
        assert f"\n        {name}: " in function.__doc__
    assert "options: those of" not in function.__doc__
