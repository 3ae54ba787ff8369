"""One rank of each example of several cards, by the name of the script, as its launcher would start it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

RANK, WORLD = 7, 8
TINY = "--size tiny --batch-size 1 --seq-len 128 --steps 2"
TORCHRUN = "torchrun --nproc-per-node 8"
ACCELERATE = (
    "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --mixed_precision bf16"
    " --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
)
COMMANDS = {
    "ddp_llama": f"{TORCHRUN} ddp_llama.py {TINY} --autocast",
    "fsdp2_llama": f"{TORCHRUN} fsdp2_llama.py {TINY} --checkpointing",
    "tp_fsdp_llama": f"{TORCHRUN} tp_fsdp_llama.py {TINY} --tp 4",
    "llama3_pretrain": f"{TORCHRUN} llama3_pretrain.py --size tiny --seq-len 128 --tp 4 --steps 2",
    "context_parallel_llama": f"{TORCHRUN} context_parallel_llama.py --size tiny --seq-len 1024 --steps 2",
    "accelerate_llama": f"{ACCELERATE} accelerate_llama.py {TINY}",
    "trainer_llama": f"{TORCHRUN} trainer_llama.py {TINY}",
}
if find_spec("deepspeed"):
    COMMANDS["deepspeed_llama"] = f"deepspeed --num_gpus 8 deepspeed_llama.py {TINY} --zero 3"


def case(name: str, folder: str) -> dict[str, Any]:
    """What `framework_runs` is given; the launcher's command is read as ``vramfit run`` reads it."""
    from vramfit.virtual.ranks.rank_place import RankPlace
    from vramfit.virtual.worlds.launchers import launched

    place = RankPlace(rank=RANK, world_size=WORLD)
    read = launched(COMMANDS[name].split(), WORLD)
    assert read is not None and read.size == WORLD
    script, *arguments = read.command(place)
    return {
        "name": name,
        "script": f"{folder}/{script}",
        "arguments": arguments,
        "gpu": "H100",
        "compiles": False,
        "place": place.arguments(),
        "environ": dict(read.environ),
    }


def cases(folder: str) -> list[dict[str, Any]]:
    """All of them."""
    return [case(name, folder) for name in COMMANDS]
