"""`vramfit run` and `check` of several ranks: what is run, what is told, exit codes and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.reconciling import predicted, training
from analysis.synthetic import oom_run, quick_run
from cli.conftest import Invocation
from vramfit.options.run_options import RunOptions
from vramfit.report import RANKS_SCHEMA
from vramfit.trace import Run, RunWarning, write_snapshot
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.virtual.virtual_run import VirtualSettings

Command = Callable[..., Invocation]
QUICK = quick_run()


class Ranks:
    """Takes the place of the child interpreters; each rank's run is the prepared one, on its own card."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], RunOptions]] = []
        self.ran: list[RankPlace] = []
        self.result: Callable[[int], Run] = lambda _: QUICK

    def __call__(self, command: list[str], options: RunOptions, settings: VirtualSettings) -> Run:
        assert settings.place is not None
        self.ran.append(settings.place)
        self.calls.append((list(command), options))
        return replace(self.result(settings.place.rank), program=tuple(command))

    @property
    def places(self) -> list[RankPlace]:
        return sorted((replace(place, mailbox=None) for place in self.ran), key=lambda place: place.rank)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found = Ranks()
    monkeypatch.setattr("vramfit.virtual.worlds.world_run.run_in_child", found)
    return found


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def test_first_and_last_rank_run_and_stand_for_the_others(vramfit: Command, ranks: Ranks) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--ranks", "64", "train.py", "--lr", "1")
    assert found.code == 0
    assert found.err == "vramfit: rank 0 of 64\nvramfit: rank 63 of 64\n"
    assert ranks.places == [RankPlace(rank=0, world_size=64), RankPlace(rank=63, world_size=64)]
    assert {tuple(command) for command, _ in ranks.calls} == {("train.py", "--lr", "1")}
    assert "64 cards RTX 4090 on 8 nodes: rank 0 is the worst" in " ".join(found.out.split())
    assert "0 to 63  fits" in found.out
    assert "ran: 0, 63" in found.out
    assert "Rank 0 by itself" in found.out


@pytest.mark.parametrize(
    ("line", "places"),
    [
        ("--ranks 4 --rank 1,3 train.py", [(1, 4, 4), (3, 4, 4)]),
        ("--ranks 4 --gpus 2 train.py", [(0, 4, 2), (3, 4, 2)]),
        ("--ranks 4 --per-node 2 --rank all train.py", [(0, 4, 2), (1, 4, 2), (2, 4, 2), (3, 4, 2)]),
        ("-- torchrun --nproc-per-node 2 --nnodes 2 train.py", [(0, 4, 2), (3, 4, 2)]),
        ("--gpus 4 -- torchrun --nproc-per-node gpu train.py", [(0, 4, 4), (3, 4, 4)]),
        ("--rank 2 -m torch.distributed.run --nproc-per-node 4 train.py", [(2, 4, 4)]),
        (
            "--per-node 8 -- python -m torch.distributed.run --nproc-per-node=auto train.py",
            [(0, 8, 8), (7, 8, 8)],
        ),
        ("-- deepspeed --num_gpus 2 train.py", [(0, 2, 2), (1, 2, 2)]),
    ],
)
def test_what_users_write(
    vramfit: Command, ranks: Ranks, line: str, places: list[tuple[int, int, int]]
) -> None:
    assert vramfit("run", "--gpu", "RTX 4090", *line.split()).code == 0
    assert [(one.rank, one.world_size, one.ranks_per_node) for one in ranks.places] == places


def test_json(vramfit: Command, tmp_path: Path) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", "--ranks", "64", "--json", "-", "train.py")
    told = json.loads(found.out)
    assert told["schema"] == RANKS_SCHEMA == "vramfit.ranks/1"
    assert (told["world_size"], told["ranks_per_node"], told["nodes"], told["known_ranks"]) == (64, 8, 8, 64)
    assert told["fits"] is True and told["joined"] is True and told["launcher"] is None
    assert told["worst"] == {"rank": 0, "why": ["all that ran are alike"]}
    first, last = told["ranks"]
    assert first["stands_for"] == [{"first": 1, "last": 62, "alike": True, "same_place": False}]
    assert (last["rank"], last["node"], last["stands_for"]) == (63, 7, [])
    assert first["peak"]["reserved_bytes"] == QUICK.devices[0].peak_reserved_bytes
    assert first["certain"] is True
    assert first["peak"]["error"] == first["peak"]["reserved_error"] == {"below_bytes": 0, "above_bytes": 0}
    assert sum(first["categories"].values()) == first["peak"]["allocated_bytes"]
    assert first["total_bytes"] == first["peak"]["reserved_bytes"] + first["outside_pytorch_bytes"]
    assert told["hosts"] == [{"first_node": 0, "last_node": 7, "ranks": 8, "pinned_bytes": 0}]
    assert told["run"]["schema"] == "vramfit.run/1"
    vramfit(
        "run", "--gpu", "RTX 4090", "--ranks", "2", "--json", "r.json", "--trace", "worst.vft", "train.py"
    )
    assert json.loads((tmp_path / "r.json").read_text())["world_size"] == 2
    assert (tmp_path / "worst.vft").is_file()


def test_the_worst_rank_decides(vramfit: Command, ranks: Ranks) -> None:
    ranks.result = lambda rank: oom_run() if rank == 3 else QUICK
    found = vramfit("run", "--gpu", "14GiB", "--ranks", "4", "train.py")
    assert found.code == 3
    assert "✗ does not fit 4 cards" in found.out
    assert "rank 3 is the worst" in found.out


def test_a_rank_that_fails_ends_it(vramfit: Command, ranks: Ranks) -> None:
    ranks.result = lambda rank: replace(
        QUICK, exit_code=7 * (rank == 1), error="ValueError: no" if rank else None
    )
    found = vramfit("run", "--gpu", "RTX 4090", "--ranks", "2", "train.py")
    assert found.code == 7
    assert found.out.startswith("! the program failed on rank 1 of 2: ValueError: no")


def test_host_memory_of_a_node(vramfit: Command, ranks: Ranks) -> None:
    ranks.result = lambda rank: replace(QUICK, host_pinned_peak_bytes=(3 - rank // 4) << 20)
    found = vramfit("run", "--gpu", "RTX 4090", "--ranks", "8", "--per-node", "4", "train.py")
    assert "node 0: 12.00 MiB of 4 ranks" in found.out
    assert "node 1: 8.00 MiB of 4 ranks" in found.out


def test_a_program_that_never_joins(vramfit: Command, ranks: Ranks) -> None:
    warning = RunWarning(code="no-process-group", message="never", location=None, count=1)
    ranks.result = lambda _: replace(QUICK, warnings=(warning,))
    found = vramfit("run", "--gpu", "RTX 4090", "--ranks", "2", "train.py")
    assert "! the program never calls init_process_group" in found.out


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--ranks 12 train.py", "12 ranks cannot be divided among nodes of 8"),
        ("--ranks 4 --rank 4 train.py", "rank 4 is beyond a world of 4 ranks"),
        ("--ranks 4 --rank first train.py", "'first' names no rank"),
        ("--ranks 18 --per-node 9 train.py", "9 ranks on a node are more than the 8 cards"),
        ("--ranks 4 --rank= train.py", "'' names no rank"),
        ("-- torchrun --nproc-per-node 16 train.py", "16 ranks on a node are more than the 8 cards"),
        ("-- mpirun -np 4 python train.py", "mpirun's commands are not read"),
        (
            "-- deepspeed --include w:0,1 --num_gpus 3 train.py",
            "takes --num_nodes and --num_gpus and --include or --exclude apart",
        ),
        ("--rank 1 train.py", "--rank is for a program of several ranks"),
        ("--per-node 2 train.py", "--per-node is for a program of several ranks"),
        ("--ranks 4 nowhere.py", "there is no script nowhere.py"),
        ("--ranks 4 -- torchrun --nproc-per-node 2 train.py", "--ranks is 4, and torchrun starts 2"),
        ("-- torchrun --nproc-per-node 2 nowhere.py", "there is no script nowhere.py"),
        ("-- torchrun --nproc-per-node 2 --what train.py", "torchrun: unrecognized arguments: --what"),
    ],
)
def test_bad_input_is_one_line_and_nothing_runs(vramfit: Command, ranks: Ranks, line: str, told: str) -> None:
    found = vramfit("run", "--gpu", "RTX 4090", *line.split())
    assert (found.code, found.out, ranks.calls) == (2, "", [])
    first, second = found.err.splitlines()
    assert told in first and second.startswith("next: ")


def test_several_ranks_are_virtual(vramfit: Command) -> None:
    assert "several ranks are run on virtual GPUs only" in vramfit("run", "--ranks", "4", "train.py").err


class TestAgainst:
    """A recording of one rank."""

    @pytest.fixture
    def recording(self, tmp_path: Path, ranks: Ranks) -> Path:
        """Of rank 3, whose card is the fourth of its node."""
        ranks.result = lambda rank: predicted(training(layers=rank))
        path = tmp_path / "rank3.pickle"
        write_snapshot(predicted(training(layers=3)).trace, path)
        return path

    def test_its_rank_is_compared(self, vramfit: Command, recording: Path, tmp_path: Path) -> None:
        line = ("run", "--gpu", "RTX 4090", "--ranks", "8", "--against", recording, "--tolerance", "0%")
        found = vramfit(*line, "--rank", "3", "--json", "told.json", "train.py")
        assert found.code == 0
        assert "Rank 3 beside its recording" in found.out and "equal to rank3.pickle to the byte" in found.out
        told = json.loads((tmp_path / "told.json").read_text())["against"]
        assert (told["rank"], told["within"], told["file"]) == (3, True, "rank3.pickle")
        found = vramfit(*line, "--rank", "4", "train.py")
        assert found.code == 3 and "differs from rank3.pickle" in found.out

    @pytest.mark.parametrize("chosen", [(), ("--rank", "2,3"), ("--rank", "all")])
    def test_of_which_rank_it_is_has_to_be_said(
        self, vramfit: Command, ranks: Ranks, recording: Path, chosen: tuple[str, ...]
    ) -> None:
        found = vramfit(
            "run", "--gpu", "RTX 4090", "--ranks", "8", *chosen, "--against", recording, "train.py"
        )
        assert (found.code, found.out, ranks.calls) == (2, "", [])
        assert "--against has a recording of one rank, and " in found.err
        assert found.err.splitlines()[1].endswith("Say of which rank it is: --rank 0")


class TestCheck:
    """The gate is on the worst rank."""

    @pytest.mark.parametrize(("spare", "code"), [(0, 0), (1, 3)])
    def test_to_the_byte(self, vramfit: Command, ranks: Ranks, spare: int, code: int) -> None:
        used = QUICK.devices[0].peak_reserved_bytes + QUICK.devices[0].context_bytes
        found = vramfit(
            "check", "train.py", "--ranks", "8", "--gpu", "RTX 4090", "--budget", f"{used - spare}B"
        )
        assert found.code == code
        assert "train.py, rank 0 of 8" in found.out
        assert len(ranks.calls) == 2

    def test_a_launchers_command(self, vramfit: Command) -> None:
        line = "check --gpu RTX-4090 --budget 23GiB -- torchrun --nproc-per-node 2 train.py"
        assert vramfit(*line.split()).code == 0

    def test_a_rank_that_fails(self, vramfit: Command, ranks: Ranks) -> None:
        ranks.result = lambda _: replace(QUICK, exit_code=9, error="ValueError: no")
        found = vramfit("check", "train.py", "--ranks", "2", "--gpu", "RTX 4090", "--budget", "1GiB")
        assert found.code == 9
        assert "the program failed (exit code 9): ValueError: no" in found.err


class TestFit:
    """`vramfit fit` of a script with ranks."""

    def test_the_fewest_cards(self, vramfit: Command, ranks: Ranks) -> None:
        ranks.result = lambda _: QUICK if ranks.ran[-1].world_size > 2 else oom_run()
        line = ("--gpu", "RTX 4090", "--ranks", "auto", "--assume", "typical,imbalance=2", "--", "--lr", "1")
        found = vramfit("fit", "train.py", *line)
        assert found.code == 0
        assert {options.assume for _, options in ranks.calls} == {"typical,imbalance=2"}
        assert found.out.startswith("✓ 4 cards RTX 4090 do: ")
        assert {tuple(command) for command, _ in ranks.calls} == {("train.py", "--lr", "1")}
        assert sorted({place.world_size for place in ranks.places}) == [1, 2, 4]
        gate = ("fit", "train.py", "--gpu", "RTX 4090", "--ranks", "auto", "--at-least", "2")
        assert vramfit(*gate).code == 3

    @pytest.mark.parametrize(
        "written", [("--batch-size", "3"), ("--batch-size=3",), ()], ids=["apart", "joined", "none"]
    )
    def test_the_largest_batch(self, vramfit: Command, ranks: Ranks, written: tuple[str, ...]) -> None:
        def batch(command: list[str]) -> int:
            return int(command[-1].rpartition("=")[2])

        def result(_: int) -> Run:
            size = batch(ranks.calls[-1][0])
            return replace(QUICK, host_pinned_peak_bytes=0) if size <= 9 else oom_run()

        ranks.result = result
        line = ("--gpu", "RTX 4090", "--ranks", "1", "--largest", "batch-size", "--json", "-", "--", *written)
        told = json.loads(vramfit("fit", "train.py", *line).out)
        assert (told["sought"], told["value"], told["failing"], told["world_size"]) == (
            "--batch-size",
            9,
            10,
            1,
        )
        assert told["schema"] == "vramfit.fit-ranks/1"
        assert batch(ranks.calls[0][0]) == (3 if written else 1)

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("--ranks 4", "nothing is sought on 4 cards"),
            ("--ranks 4 --largest=", "--largest names no option"),
            ("--ranks auto --per-node 3", "--per-node 3 does not divide 4 cards"),
            ("--ranks many", "--ranks many is not a number of cards"),
            ("--ranks auto --largest batch-size", "--ranks auto looks for the number of cards"),
            ("--per-node 4", "--per-node is for a script with --ranks"),
            ("--assume typical", "--assume is for a script with --ranks"),
            ("--ranks auto --assume most", "most"),
            ("--ranks 4 --largest bs -- --bs big", "the script's --bs is 'big', not a whole number"),
        ],
    )
    def test_bad_input(self, vramfit: Command, ranks: Ranks, line: str, told: str) -> None:
        found = vramfit("fit", "train.py", "--gpu", "RTX 4090", *line.split())
        assert (found.code, ranks.calls) == (2, [])
        assert told in found.err


def test_the_page_has_every_rank_and_the_assumption_reaches_them(
    vramfit: Command, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.result = lambda rank: replace(QUICK, host_pinned_peak_bytes=rank)
    found = vramfit(
        *("run", "--gpu", "RTX 4090", "--ranks", "3", "--rank", "all", "--report", "ranks.html"),
        *("--assume", "typical,imbalance=1.5", "train.py"),
    )
    assert found.code == 0
    page = (tmp_path / "ranks.html").read_text(encoding="utf-8")
    assert [f"rank-chart-{number}" in page for number in range(4)] == [True, True, True, False]
    assert {options.assume for _, options in ranks.calls} == {"typical,imbalance=1.5"}
    refused = vramfit("run", "--gpu", "RTX 4090", "--ranks", "2", "--assume", "imbalance=0", "train.py")
    assert refused.code == 2
    assert "imbalance" in refused.err
