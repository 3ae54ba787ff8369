"""Real worlds of gloo processes on CPU tensors, metered, and virtual ranks of the same programs hold as much."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests import warm
from tests.virtual.ranks import gloo_programs

WORLDS = {
    2: ("ddp_views", "fsdp2", "experts", "context_parallel", "pipeline", "interleaved"),
    4: ("tensor_parallel", "loss_parallel", "two_dimensions", "fsdp1"),
}
"""Programs by world; benchmarks/ranks.py compares all of them in both."""


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank of each world held, real and virtual."""
    folder = tmp_path_factory.mktemp("figures")
    worlds = [f"{world}:{','.join(names)}" for world, names in WORLDS.items()]
    command = [sys.executable, str(gloo_programs.__file__), str(folder), *worlds]
    done = warm.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


PLACES = [
    (world, rank) for world, names in WORLDS.items() for rank in gloo_programs.virtual_ranks(world, names)
]


@pytest.mark.parametrize(("world", "rank"), PLACES)
def test_a_virtual_rank_holds_what_a_real_one_holds(figures: Path, world: int, rank: int) -> None:
    real, virtual = (
        json.loads((figures / f"{kind}-{world}-{rank}.json").read_text()) for kind in ("real", "virtual")
    )
    assert virtual.keys() == real.keys() == set(WORLDS[world])
    for name, held in virtual.items():
        on_host = gloo_programs.ON_HOST.get(name, 0)
        assert [of_card + on_host for of_card in held] == real[name], name


@pytest.mark.parametrize(("world", "rank"), PLACES)
def test_both_tell_apart_what_is_for_communication(figures: Path, world: int, rank: int) -> None:
    real, virtual = (
        json.loads((figures / f"shared-{kind}-{world}-{rank}.json").read_text())
        for kind in ("real", "virtual")
    )
    assert real == virtual
    if world == 2:
        buffers, unsharded, prefetch = zip(
            *(real[name] for name in ("ddp_views", "fsdp2", "pipeline")), strict=True
        )
        assert all(buffers)
        assert [bool(one) for one in unsharded] == [bool(one) for one in prefetch] == [False, True, False]
