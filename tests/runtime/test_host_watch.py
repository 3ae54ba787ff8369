"""A training whose control group comes near its limit of memory."""

from __future__ import annotations

import pytest
import torch

import vramfit
from vramfit.runtime.oom_forms import ShortOf, recognised
from vramfit.runtime.survival.host_watch import HostWatch
from vramfit.runtime.survival.ladder import Rung
from vramfit.runtime.survival.survivor import SurvivalSettings, Survivor
from vramfit.techniques import Numerics
from vramfit.units import GIB, MIB
from watching.group_trees import Tree, v2

__all__ = ["v2"]


def test_pressure_is_a_shortage_of_its_own_kind(v2: Tree) -> None:
    folder = v2.group("sys/fs/cgroup/user.slice/job", current=90 * MIB, max=100 * MIB)
    watch = HostWatch(0.05, v2.groups, every=0)
    assert watch.near() is None
    (folder / "memory.current").write_text(f"{96 * MIB}\n")
    error = watch.near()
    assert error is not None
    found = recognised(error)
    assert found is not None and found.of is ShortOf.PRESSURE and "4.00 MiB left" in found.message
    assert not watch.relieve()
    assert HostWatch(0.0, v2.groups, every=0).near() is None


def survivor_of(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Survivor:
    monkeypatch.setattr(
        "vramfit.runtime.survival.climber.HostWatch", lambda margin: HostWatch(margin, tree.groups, every=0)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Survivor(
        model,
        optimizer,
        lambda net, batch: net(batch).square().mean(),
        SurvivalSettings(patience=3, numerics=Numerics.ROUNDING),
    )


def test_a_step_under_pressure_is_done_in_pieces_and_whole_again_later(
    v2: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = v2.group("sys/fs/cgroup/user.slice/job", current=50 * MIB, max=100 * MIB)
    batches = list(torch.rand(20, 8, 8))
    plain = survivor_of(v2, monkeypatch)
    losses = [plain.step(batch) for batch in batches]
    assert plain.events == []

    survivor = survivor_of(v2, monkeypatch)
    seen = [survivor.step(batch) for batch in batches[:2]]  # before the second, pieces are compared
    (folder / "memory.current").write_text(f"{97 * MIB}\n")
    seen.append(survivor.step(batches[2]))
    (event,) = survivor.events
    assert (event.kind, event.step, event.pieces) == ("host-pressure", 2, 2)
    assert "3.00 MiB left" in event.cause
    (folder / "memory.current").write_text(f"{50 * MIB}\n")
    seen += [survivor.step(batch) for batch in batches[3:]]
    assert {one.kind for one in survivor.events[1:]} == {"down"} and survivor.events[-1].rung is Rung.PLAIN
    assert survivor.steps == 20
    torch.testing.assert_close(torch.stack(seen), torch.stack(losses))


def test_what_cannot_be_helped_is_said_once(v2: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    v2.group("sys/fs/cgroup/user.slice/job", current=99 * MIB, max=100 * MIB)
    survivor = survivor_of(v2, monkeypatch)
    for batch in torch.rand(12, 4, 8):
        survivor.step(batch)
    kinds = [one.kind for one in survivor.events]
    assert set(kinds) == {"host-pressure"}
    said = [one.evidence for one in survivor.events]
    assert said.count("nothing that vramfit.survive may do takes less of the host") == 1
    assert len(kinds) == len(set(map(str, survivor.events))) and survivor.steps == 12


def test_offloaded_activations_stay_on_a_card_that_has_room(
    v2: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2.group("sys/fs/cgroup/user.slice/job", current=99 * MIB, max=100 * MIB)
    monkeypatch.setattr(
        "vramfit.runtime.survival.climber.HostWatch", lambda margin: HostWatch(margin, v2.groups, every=0)
    )
    with vramfit.VirtualGPU("8GiB", writes="real"):
        model = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
        )
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        survivor = Survivor(
            model,
            optimizer,
            lambda net, batch: net(batch).square().mean(),
            SurvivalSettings(numerics=Numerics.ROUNDING),
        )
        batch = torch.ones(8, 64, device="cuda")
        ladder = survivor._climber.ladder_for(batch)
        offload = next(place for place, level in enumerate(ladder.levels) if level.offload)
        ladder.climb(offload)
        survivor.step(batch)
        (event,) = survivor.events
        assert (event.kind, event.evidence) == ("host-pressure", "activations stay on the device")
        assert not ladder.level.offload

        ladder.climb(offload)
        ladder.shortage(offload - 1, 9 * GIB)  # without offloading the card was too small
        survivor.step(batch)
        assert ladder.level.offload
        assert survivor.events[-1].evidence == "nothing that vramfit.survive may do takes less of the host"
        survivor.close()

        ladder.climb(len(ladder.levels) - 1)
        ladder.shortage(offload, 9 * GIB)  # with states on the device it was too small
        survivor.step(batch)
        assert ladder.level.states and survivor._guard.hosted == set(model.parameters())
