"""Arguments of the public functions: what is refused before anything starts, and what is taken."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import vramfit
from vramfit.arguments import path_argument, paths_argument, size_argument, text_argument, whole_argument
from vramfit.errors import (
    ConfigError,
    EnvironmentUnfitError,
    OutOfMemory,
    TraceFormatError,
    UnknownGpuError,
    UsageError,
    VramfitError,
    WriteError,
)
from vramfit.gpus import find_gpu
from vramfit.launch.job import Failure
from vramfit.planner.plans import NothingFits
from vramfit.trace import read_any
from vramfit.units import GIB, parse_bytes

CARD = 'base = "RTX 4090"\nname = "mine"\ntotal_bytes = "12GiB"\n'


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text("raise SystemExit(7)\n")
    return file


@pytest.mark.parametrize(
    ("given", "size"), [("2GiB", 2 * GIB), (2.5e9, 2_500_000_000), (512, 512), (np.int64(512), 512)]
)
def test_a_size_is_a_text_or_a_whole_number(given: object, size: int) -> None:
    assert size_argument("budget", given) == size


@pytest.mark.parametrize(
    "given",
    [True, False, 2.5, float("nan"), float("inf"), 2**63, 1e30, None, b"2GiB", [], "1e99GiB", "much", 0, -1],
)
def test_what_is_no_size_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"^budget="):
        size_argument("budget", given)


def test_whole_numbers_within_bounds() -> None:
    assert whole_argument("gpus", np.int32(3), least=1, most=8) == 3
    for given in (0, 9, True, 2.0, "2", None):
        with pytest.raises(UsageError, match=r"is no whole number from 1 to 8"):
            whole_argument("gpus", given, least=1, most=8)


def test_texts_and_paths(tmp_path: Path) -> None:
    assert text_argument("alloc_conf", "a:b") == "a:b"
    assert path_argument("cwd", tmp_path) == str(tmp_path)
    assert paths_argument("against", tmp_path) == paths_argument("against", [str(tmp_path)])
    for given in (3, None, b"x", "a\0b"):
        with pytest.raises(UsageError, match="is no path"):
            path_argument("cwd", given)
    with pytest.raises(UsageError, match="is no text"):
        text_argument("alloc_conf", 3)


def test_an_error_shows_a_long_argument_in_part() -> None:
    with pytest.raises(UsageError) as caught:
        path_argument("cwd", ["x"] * 10_000)
    assert len(str(caught.value)) < 200


# -- cards -----------------------------------------------------------------------------------------------------------


def test_a_card_may_be_a_path_or_a_card(tmp_path: Path) -> None:
    file = tmp_path / "card.toml"
    file.write_text(CARD)
    assert find_gpu(file).total_bytes == 12 * GIB
    card = find_gpu("24GiB")
    assert find_gpu(card) is card


@pytest.mark.parametrize("given", [24, 24.0, True, None, b"4090", [], object()])
def test_what_names_no_card_is_refused_everywhere(given: object, script: Path) -> None:
    with pytest.raises(UsageError, match="names no card"):
        find_gpu(given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="names no card"):
        vramfit.VirtualGPU(given)  # type: ignore[arg-type]
    if given is not None:  # which records the real run
        with pytest.raises(UsageError, match="names no card"):
            vramfit.run(script, gpu=given)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="names no card"):
            vramfit.plan("train.py:workload", gpu=given)  # type: ignore[arg-type]


def test_a_size_beyond_all_memory_is_out_of_range() -> None:
    with pytest.raises(UsageError, match="a GPU of 1e99GiB is out of range"):
        find_gpu("1e99GiB")


# -- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("budget", True),
        ("budget", 2.5),
        ("budget", "much"),
        ("gpus", 2.0),
        ("gpus", 9),
        ("gpus", True),
        ("device", "tpu"),
        ("device", 3),
        ("alloc_conf", 3),
        ("cwd", 3),
        ("cwd", "not/there"),
        ("environ", 3),
        ("environ", {"SEED": 1}),
        ("environ", {"SE=ED": "1"}),
        ("environ", {1: "1"}),
        ("against", 3),
        ("tolerance", 2.5),
        ("tolerance", -1),
        ("tolerance", None),
    ],
)
def test_run_refuses_what_it_cannot_use(argument: str, given: object, script: Path) -> None:
    with pytest.raises(UsageError) as caught:
        vramfit.run(script, **{argument: given})  # type: ignore[arg-type]
    assert argument in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "given"),
    [("profile", 3), ("writes", {}), ("writes_through", 3), ("writes_through", [3]), ("assume", [])],
)
def test_run_on_a_virtual_gpu_refuses_what_it_cannot_use(argument: str, given: object, script: Path) -> None:
    with pytest.raises(UsageError):
        vramfit.run(script, gpu="24GiB", **{argument: given})  # type: ignore[arg-type]


@pytest.mark.parametrize("program", [3, None, b"train.py", "\0", []])
def test_a_program_is_a_path(program: object) -> None:
    with pytest.raises(UsageError, match=r"^program="):
        vramfit.run(program)  # type: ignore[arg-type]


def test_arguments_of_a_program_are_texts(script: Path) -> None:
    with pytest.raises(UsageError, match=r"^arguments\[1\]=3 "):
        vramfit.run(script, "--epochs", 3)  # type: ignore[arg-type]


def test_run_takes_a_card_file_as_a_path(tmp_path: Path, script: Path) -> None:
    file = tmp_path / "card.toml"
    file.write_text(CARD)
    report = vramfit.run(script, gpu=file)
    assert (report.exit_code, report.run.devices[0].total_bytes) == (7, 12 * GIB)


@pytest.mark.parametrize("given", [3, None, [], b"x"])
def test_the_planner_refuses_what_names_no_workload(given: object) -> None:
    for verb in (vramfit.plan, vramfit.fit, vramfit.verify):
        with pytest.raises(UsageError):
            verb(given, **{} if verb is vramfit.verify else {"gpu": "24GiB"})  # type: ignore[operator]


@pytest.mark.parametrize("argument", ["budget", "margin", "host_budget"])
def test_the_planner_refuses_what_is_no_size(argument: str) -> None:
    for given in (True, -1, 2.5, float("nan")):
        with pytest.raises(UsageError, match=f"^{argument}="):
            vramfit.plan("train.py:workload", gpu="24GiB", **{argument: given})  # type: ignore[arg-type]


# -- errors between processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        VramfitError,
        UsageError,
        ConfigError,
        UnknownGpuError,
        TraceFormatError,
        EnvironmentUnfitError,
        WriteError,
        OutOfMemory,
    ],
)
def test_an_error_arrives_as_itself(kind: type[VramfitError]) -> None:
    told = Failure.of(kind("it does not go", "Try another")).error()
    assert type(told) is kind
    assert (told.message, told.hint, told.exit_code) == ("it does not go", "Try another", kind.exit_code)


def test_an_error_of_elsewhere_arrives_as_its_nearest_base_with_its_code() -> None:
    told = Failure.of(NothingFits("nothing fits", "", plan=None)).error()  # type: ignore[arg-type]
    assert (type(told), told.exit_code) == (UsageError, 3)


def test_numbers_are_sizes_only_where_they_are_whole() -> None:
    assert parse_bytes(2.5e9) == 2_500_000_000
    for given in (True, 2.5, 2**63, None):
        with pytest.raises(ValueError, match=r"size|larger"):
            parse_bytes(given)  # type: ignore[arg-type]


def test_a_failing_start_in_a_child_arrives_as_itself(script: Path) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        vramfit.run(script, gpu="24GiB", alloc_conf="nonsense:1")


WRONG = [None, True, b"x", [], {}, object(), ("a",), math.nan]


@pytest.mark.parametrize("given", [*WRONG, 0, 1, -1, 2.5, math.inf, ""])
def test_a_chance_is_a_number_between_0_and_1(given: object) -> None:
    with pytest.raises(UsageError, match=r"alpha=.* is no number between 0 and 1"):
        vramfit.check_leaks(lambda: None, device="cpu", alpha=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [*WRONG, -1, ""])
def test_seconds_are_a_number(given: object) -> None:
    with pytest.raises(UsageError, match=r"seconds=.* is no number from 0 to inf"):
        vramfit.check_leaks(lambda: None, device="cpu", seconds=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [*WRONG, 3, 2.5, Path("a.b")])
def test_a_kernel_is_named_by_a_text(given: object) -> None:
    with pytest.raises(UsageError, match=r"name=.* is no text"):
        vramfit.fake_kernel(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, True, 3, "out", b"out", [1]])
def test_what_a_kernel_writes_are_names(given: object) -> None:
    with pytest.raises(UsageError, match="writes="):
        vramfit.fake_kernel("package.kernel", writes=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [*WRONG, 3, "gpt2"])
def test_a_model_of_transformers_is_a_model_or_makes_one(given: object) -> None:
    with pytest.raises(UsageError, match="is no model of transformers, and no function"):
        vramfit.transformers_workload(given)


@pytest.mark.parametrize("given", ["", [], {}, 0])
def test_a_loss_that_is_nothing_is_not_the_model_s_own(given: object) -> None:
    with pytest.raises(UsageError, match="loss of a Workload is no function"):
        vramfit.plain_workload(torch.nn.Linear(2, 2), torch.ones(2, 2), given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [True, 3, "", b"x", [], Path("log.txt")])
def test_a_snapshot_is_written_to_what_takes_text(given: object) -> None:
    with pytest.raises(UsageError, match=r"file=.* takes no text"):
        vramfit.snapshot(file=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, 1, None, "yes", b"x", [], object(), print])
def test_a_flag_is_true_or_false(given: object, script: Path) -> None:
    for call in (vramfit.run, vramfit.track):
        with pytest.raises(UsageError, match=r"host_memory=.* is neither True nor False"):
            call(*([script] if call is vramfit.run else []), device="cpu", budget="1GiB", host_memory=given)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("function", "argument", "given"),
    [
        *(
            ("fit", "sizes", given)
            for given in (True, 3, "x", b"x", [1], {1: 2}, {"a": 0}, {"a": 2.5}, print)
        ),
        *(("fit", "size", given) for given in (True, 3, b"x", [], Path("a"))),
        *(("fit", "card", given) for given in (0, "x", [])),
        *(("fit", "progress", given) for given in (0, "x", [])),
        *(("plan", "sizes", given) for given in (3, {"a": -1}, {"a": True})),
        *(("plan", "allow", given) for given in (3, "mixed-precision", [3])),
        *(("plan", "forbid", given) for given in (None, 3, "tf32", [None])),
        *(("plan", "numerics", given) for given in (None, 3, [])),
        *(("plan", "objective", given) for given in (None, 3, [])),
        *(("plan", "time_limit", given) for given in (None, "x", 0, -1, math.nan, math.inf, True)),
        *(("plan", "search_seconds", given) for given in ("x", 0, -1, math.nan, math.inf, True)),
        *(("plan", "fresh", given) for given in (None, 1, "x")),
        *(("verify", "sizes", given) for given in (3, "x", {"a": 0})),
        *(("verify", "memory", given) for given in (None, 1, "x")),
        *(("verify", "values", given) for given in (None, 1, "x")),
        *(("verify", "steps", given) for given in (None, 0, 2.5, "x", True)),
        *(("verify", "seconds", given) for given in (None, -1, math.nan, math.inf, "x")),
        *(("verify", "workload", given) for given in (3, b"x", [])),
    ],
)
def test_the_planner_s_arguments_are_checked_before_anything_starts(
    function: str, argument: str, given: object
) -> None:
    given_first = "plan.toml" if function == "verify" else "w.py:w"
    gpu = {} if function == "verify" else {"gpu": "2GiB"}
    with pytest.raises(UsageError, match=argument):
        getattr(vramfit, function)(given_first, **gpu, **{argument: given})


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a device without an end")
def test_a_device_is_no_recording() -> None:
    with pytest.raises(TraceFormatError, match="it is a device, which may have no end"):
        read_any("/dev/zero")
