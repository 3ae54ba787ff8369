"""The commands of torchrun, accelerate and deepspeed are read as these read them themselves."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from vramfit.errors import UsageError
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.virtual.worlds.launchers import Launched, launched, launcher_of, torchrun_parser, without_python


def read(text: str, cards: int = 8) -> Launched:
    found = launched(text.split(), cards)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "per_node", "nodes", "program"),
    [
        ("torchrun --nproc-per-node 8 train.py --lr 1", 8, 1, ("train.py", "--lr", "1")),
        (
            "torchrun --nproc_per_node=4 --nnodes=2 --rdzv_backend c10d --rdzv-endpoint h:1 t.py",
            4,
            2,
            ("t.py",),
        ),
        (
            "/usr/bin/torchrun --standalone --nproc-per-node=gpu -m pkg.train --x",
            8,
            1,
            ("-m", "pkg.train", "--x"),
        ),
        ("torchrun --nnodes 1:4 --nproc-per-node auto --max-restarts=3 t.py", 8, 4, ("t.py",)),
        ("torchrun t.py --nproc-per-node 3", 1, 1, ("t.py", "--nproc-per-node", "3")),
        ("python -m torch.distributed.run --nproc-per-node 2 t.py", 2, 1, ("t.py",)),
        ("python3 -u -m torch.distributed.launch --use-env --nproc-per-node 2 t.py", 2, 1, ("t.py",)),
        ("deepspeed --num_gpus 4 --num_nodes 2 --master_port 1 train.py --deepspeed z.json", 4, 2, None),
        ("deepspeed train.py", 8, 1, ("train.py",)),
        ("deepspeed --include localhost:0,2,3 train.py", 3, 1, ("train.py",)),
        ("deepspeed --module pkg.train", 8, 1, ("-m", "pkg.train")),
    ],
)
def test_what_a_command_starts(text: str, per_node: int, nodes: int, program: tuple[str, ...] | None) -> None:
    found = read(text)
    assert (found.per_node, found.nodes, found.size) == (per_node, nodes, per_node * nodes)
    assert program is None or found.program == program


def test_torchruns_options_are_all_known() -> None:
    """torch's own parser has no option that ours lacks, and both take a value or both none."""
    from torch.distributed.run import get_args_parser

    ours = {name: action for action in torchrun_parser()._actions for name in action.option_strings}
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            if name not in ("-h", "--help"):
                assert name in ours, name
                assert (ours[name].nargs == 0) == (action.nargs == 0), name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("torchrun --nproc-per-node many t.py", "--nproc-per-node many is not a number of processes"),
        ("torchrun --nproc-per-node 0 t.py", "--nproc-per-node 0 is not a number of processes"),
        ("torchrun --nproc-per-node cpu t.py", "--nproc-per-node cpu is not a number of processes"),
        ("torchrun --nnodes two t.py", "--nnodes two is not a number of nodes"),
        ("torchrun --strange t.py", "unrecognized arguments|arguments are required"),
        ("torchrun --nproc-per-node 2", "arguments are required: training_script"),
        ("torchrun --no-python --nproc-per-node 2 a.out", "starts a program that is not Python's"),
        ("deepspeed --exclude h:1 t.py", "name cards of hosts"),
        ("deepspeed --hostfile /nowhere/hosts t.py", "cannot read the hostfile /nowhere/hosts"),
        ("accelerate config", "only launch starts a program"),
        ("accelerate launch --strange t.py", "accelerate launch: unrecognized arguments"),
    ],
)
def test_what_cannot_be_read(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        launched(text.split(), 8)


def test_a_hostfile_counts(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\n# spare\nb slots=4\n")
    found = read(f"deepspeed --hostfile {hosts} t.py")
    assert (found.per_node, found.nodes) == (4, 2)
    hosts.write_text("a\n")
    with pytest.raises(UsageError, match="is not a hostfile"):
        launched(["deepspeed", "--hostfile", str(hosts), "t.py"], 8)


def test_launchers_that_number_their_processes() -> None:
    place = RankPlace(rank=11, world_size=16)
    assert read("deepspeed --num_nodes 2 t.py --a").command(place) == ["t.py", "--local_rank=3", "--a"]
    assert read("deepspeed --no_local_rank t.py").command(place) == ["t.py"]
    old = read("python -m torch.distributed.launch --nproc_per_node 8 -m pkg --a")
    assert old.command(place) == ["-m", "pkg", "--local-rank=3", "--a"]
    assert read("torchrun --nproc-per-node 8 t.py").command(place) == ["t.py"]


def test_programs_that_are_no_launchers() -> None:
    for text in ("train.py", "torchrun.py --x", "-m pkg", "-m", ""):
        assert launcher_of(text.split()) is None
        assert launched(text.split(), 8) is None
    assert without_python(["python3.11", "-u", "-m", "pkg"]) == ["-m", "pkg"]
    assert without_python(["python.py", "-u"]) == ["python.py", "-u"]


def test_accelerate_reads_its_configuration_and_tells_its_variables(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = tmp_path / "fsdp.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmachine_rank: 0\nmixed_precision: bf16\n"
        "num_machines: 2\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    )
    found = read(f"accelerate launch --config_file {config} train.py --lr 1")
    assert (found.per_node, found.nodes, found.program) == (4, 2, ("train.py", "--lr", "1"))
    told = {
        name: found.environ[name]
        for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_MIXED_PRECISION")
    }
    assert told == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}
    one = read("accelerate launch --multi_gpu --num_processes 2 --mixed_precision fp16 train.py")
    assert (one.size, one.environ["ACCELERATE_MIXED_PRECISION"]) == (2, "fp16")
    job = read(
        "accelerate launch --multi_gpu --num_processes 2 --max_restarts 3 --role worker train.py"
    ).environ
    assert (job["TORCHELASTIC_MAX_RESTARTS"], job["ROLE_NAME"], job["TORCHELASTIC_RUN_ID"]) == (
        "3",
        "worker",
        "none",
    )
    alone = read("accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 train.py").environ
    assert uuid.UUID(alone["TORCHELASTIC_RUN_ID"])
    odd = (
        "accelerate launch --multi_gpu --num_machines 2 --num_processes 5 --machine_rank 0 "
        "--main_process_ip a --main_process_port 1 t.py"
    )
    with pytest.raises(UsageError, match="5 processes cannot be divided among 2 machines"):
        launched(odd.split(), 8)
    with pytest.raises(UsageError, match="to use Megatron-LM, a TPU or the CPU"):
        launched(["accelerate", "launch", "--cpu", "t.py"], 8)


def test_accelerate_tells_what_deepspeed_is_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    options = (
        "--use_deepspeed --num_processes 4 --zero_stage 3 --mixed_precision bf16 --gradient_clipping 1.0"
    )
    found = read(f"accelerate launch {options} train.py --lr 1")
    assert (found.per_node, found.nodes, found.program) == (4, 1, ("train.py", "--lr", "1"))
    assert found.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert found.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert found.environ["ACCELERATE_GRADIENT_CLIPPING"] == "1.0"
    assert found.environ["ACCELERATE_CONFIG_DS_FIELDS"] == ""
    config = tmp_path / "zero.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmachine_rank: 0\nmixed_precision: bf16\n"
        "num_machines: 2\nnum_processes: 8\nmain_process_ip: a\nmain_process_port: 1\n"
        "deepspeed_config:\n  zero_stage: 2\n  deepspeed_multinode_launcher: pdsh\n"
    )
    several = read(f"accelerate launch --config_file {config} train.py")
    assert (several.per_node, several.nodes, several.program) == (4, 2, ("train.py",))
    assert several.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    told = several.environ["ACCELERATE_CONFIG_DS_FIELDS"].split(",")
    assert told == ["zero_stage", "deepspeed_multinode_launcher", "mixed_precision"]
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: False)
    with pytest.raises(UsageError, match="accelerate launch: FP8 is not available"):
        launched(f"accelerate launch {options.replace('bf16', 'fp8')} train.py".split(), 8)


@pytest.mark.parametrize(
    ("options", "run_id", "restarts", "role"),
    [
        ("--nnodes 2 --nproc-per-node 8", "none", "0", "default"),
        ("--nnodes 2 --rdzv-id job7 --max-restarts 3 --role trainer", "job7", "3", "trainer"),
        ("--rdzv_backend=c10d --rdzv_endpoint=host:1 --rdzv_id=job8", "job8", "0", "default"),
        ("--nnodes 1 --master-port 29501", "none", "0", "default"),
    ],
)
def test_what_torchrun_is_told_of_a_job_reaches_its_script(
    options: str, run_id: str, restarts: str, role: str
) -> None:
    found = launched(["torchrun", *options.split(), "train.py"], 8)
    assert found is not None
    assert found.environ == {
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "ROLE_NAME": role,
    }


@pytest.mark.parametrize("options", ["", "--standalone --rdzv-id ignored"])
def test_a_job_on_one_node_has_an_id_that_torchrun_makes_up(options: str) -> None:
    first, again, other = (
        launched(["torchrun", *options.split(), script], 8) for script in ("a.py", "a.py", "b.py")
    )
    assert first is not None and again is not None and other is not None
    name = "TORCHELASTIC_RUN_ID"
    assert uuid.UUID(first.environ[name]) == uuid.UUID(again.environ[name])
    assert first.environ[name] != other.environ[name]


def test_a_job_may_be_described_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_RDZV_ID", "job9")
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    found = launched(["torchrun", "--nnodes", "2", "train.py"], 8)
    assert found is not None
    assert (found.environ["TORCHELASTIC_RUN_ID"], found.environ["TORCHELASTIC_MAX_RESTARTS"]) == ("job9", "5")


def test_a_rank_finds_what_its_launcher_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    found = RankPlace(rank=3, world_size=4).environment()
    assert (found["TORCHELASTIC_RUN_ID"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("job7", "0")
