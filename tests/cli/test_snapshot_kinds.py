"""What the commands say of the kinds of snapshots that people share."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import snapshot_kinds as kinds

from cli.conftest import Invocation

Command = Callable[..., Invocation]
MIB = kinds.MIB
HALF_FREE = (
    "  allocated 88.00 MiB in 2 blocks, reserved 160.00 MiB in 3 segments",
    "  free in it: 48.00 MiB that empty_cache would give back, 24.00 MiB beside live blocks (see --fragmentation)",
)
UNKNOWN = "  other              88.00 MiB  100 %  "
SAID: dict[str, tuple[str, ...]] = {
    "torch_26": (*HALF_FREE, UNKNOWN),
    "torch_25_with_more_cards_than_used": (*HALF_FREE, UNKNOWN),
    "torch_24_private_pool": (
        "  allocated 88.00 MiB in 2 blocks, reserved 192.00 MiB in 4 segments",
        "32.00 MiB in free segments of private pools",
        "private pool 0.1, large blocks, 1 segment: 0 B in 0 blocks, 32.00 MiB in 1 free segment",
        "torch.cuda.empty_cache() would give back 48.00 MiB here",
    ),
    "torch_23_settings": HALF_FREE,
    "torch_22_without_settings": HALF_FREE,
    "torch_21_without_pools": HALF_FREE,
    "torch_20_history_of_blocks": (
        *HALF_FREE,
        "  parameters         88.00 MiB  100 %  ",
        "   88.00 MiB 2 × 24.00-64.00 MiB (parameters)  parameters",
        "ada/train.py:7",
    ),
    "bare_list": (*HALF_FREE, UNKNOWN),
    "bare_list_torch_1": (*HALF_FREE, UNKNOWN),
    "segments_alone": (*HALF_FREE, UNKNOWN),
    "expandable": (
        "  allocated 44.00 MiB in 1 block, reserved 140.00 MiB in 1 segment",
        "  free in it: 80.00 MiB that empty_cache would give back, 16.00 MiB beside live blocks",
        "large pool, 1 segment of pages: 44.00 MiB in 1 block, 80.00 MiB in free pages, 16.00 MiB in gaps",
    ),
    "two_cards": ("two_cards.pickle (GPU 0): the state when it was dumped", *HALF_FREE),
    "with_stacks": (
        "  allocated 264.00 MiB in 11 blocks, reserved 264.00 MiB in 11 segments",
        "  parameters             24.00 MiB    9 %",
        "  gradients              24.00 MiB    9 %",
        "  optimizer state        48.00 MiB   18 %",
        "  activations            48.00 MiB   18 %",
        "  workspaces             48.00 MiB   18 %",
        "  communication buffers  24.00 MiB    9 %",
        "  other                  24.00 MiB    9 %",
    ),
    "waiting_for_a_stream": (
        "  allocated 64.00 MiB (and 32.00 MiB that wait for a stream), reserved 96.00 MiB in 1 segment",
        "1 block of 32.00 MiB was freed, but another stream that used it is not past it",
    ),
    "two_streams": (
        *HALF_FREE,
        "large pool of stream 94200000, 1 segment: 0 B in 0 blocks, 48.00 MiB in 1 free segment",
    ),
    "small_pool": (
        "  allocated 88.50 MiB in 3 blocks, reserved 162.00 MiB in 4 segments",
        "small pool, 1 segment: 512.00 KiB in 1 block, 1.50 MiB in gaps",
        "  512.00 KiB                  (other)  other",
    ),
}
"""What is said of each of `kinds.STATES`, in the lines of ``explain --fragmentation``."""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", kinds.STATES)
def test_a_state_is_explained_as_one(vramfit: Command, name: str) -> None:
    file = kinds.write(kinds.STATES[name](), Path(f"{name}.pickle"))
    found = vramfit("explain", file, "--fragmentation")
    assert (found.code, found.err) == (0, "")
    assert found.out.splitlines()[0].endswith("the state when it was dumped, without history")
    assert "torch.cuda.memory._record_memory_history()" in " ".join(found.out.split())
    for text in SAID[name]:
        assert text in found.out
    # Nothing of peaks, of events, or of settings that a replay without requests would have chosen.
    for word in (
        "peak allocated",
        "At the peak",
        "Local peaks",
        "Growth",
        "event -1",
        "replayed",
        "_segments:True",
    ):
        assert word not in found.out


@pytest.mark.parametrize("name", ["torch_26", "bare_list_torch_1", "expandable", "two_cards"])
def test_settings_of_a_state_are_refused(vramfit: Command, name: str) -> None:
    file = kinds.write(kinds.STATES[name](), Path("state.pickle"))
    for arguments in (("tune", file), ("replay", file, "--alloc-conf", "expandable_segments:True")):
        found = vramfit(*arguments)
        assert (found.code, found.out) == (2, "")
        assert "the state when it was dumped, without history: it holds no requests" in found.err
        assert "_record_memory_history() before the program allocates anything" in found.err


@pytest.mark.parametrize("name", ["torch_26", "expandable", "two_cards"])
def test_a_state_is_not_replayed(vramfit: Command, name: str) -> None:
    file = kinds.write(kinds.STATES[name](), Path("state.pickle"))
    found = vramfit("replay", file)
    assert found.code == 0
    assert found.out.startswith("state.pickle: nothing to replay\nGPU 0: the state when it was dumped")
    document = json.loads(vramfit("replay", file, "--json", "-").out)
    assert document["exact"] is None
    assert all(device["is_state"] for device in document["devices"])


def test_json_of_a_state(vramfit: Command) -> None:
    file = kinds.write(kinds.torch_24_private_pool(), Path("state.pickle"))
    document = json.loads(vramfit("explain", file, "--fragmentation", "--json", "-").out)
    assert (document["is_state"], document["peaks"], document["leaks"]) == (True, [], None)
    (warning,) = document["run"]["warnings"]
    assert warning["code"] == "no-history"
    causes = document["fragmentation_causes"]
    assert causes["pools"] == document["pools"]
    assert causes["empty_cache_releases_bytes"] == 48 * MIB
    assert [pool["private_pool_id"] for pool in causes["pools"]] == [None, [0, 1]]
    assert {cause["kind"]: cause["bytes"] for cause in causes["causes"]} == {
        "private_pool": 32 * MIB,
        "beside_live": 24 * MIB,
        "cached": 48 * MIB,
    }
    assert all(remedy["alloc_conf"] is None for cause in causes["causes"] for remedy in cause["remedies"])


def test_a_state_beside_a_history(vramfit: Command) -> None:
    file = kinds.write(kinds.history_of_one_card(), Path("half.pickle"))
    recorded = vramfit("explain", file).out
    assert recorded.startswith("half.pickle (GPU 0): 2 events\n  peak allocated 64.00 MiB")
    assert "  activations        64.00 MiB  100 %" in recorded
    assert "(GPU 1): the state when it was dumped" in vramfit("explain", file, "--device", 1).out
    replayed = vramfit("replay", file).out
    assert "GPU 1: the state when it was dumped" in replayed
    assert "GPU 0  requests, at their addresses          1          1" in replayed
    assert vramfit("tune", file).code == 0
    refused = vramfit("tune", file, "--device", 1)
    assert refused.code == 2
    assert "the recording of device 1 is the state when it was dumped" in refused.err


def test_states_are_compared_as_such(vramfit: Command) -> None:
    before = kinds.write(kinds.torch_26(), Path("before.pickle"))
    after = kinds.write(kinds.small_pool(), Path("after.pickle"))
    out = vramfit("diff", before, after).out
    told = "before.pickle and after.pickle are the states when dumped, without history, and no peak"
    assert told in " ".join(out.split())
    assert "allocated                   88.00 MiB    88.50 MiB  +512.00 KiB" in out
    assert "peak allocated" not in out
    history = kinds.write(kinds.history_of_one_card(), Path("history.pickle"))
    mixed = vramfit("diff", before, history, "--device", 0).out
    assert "before.pickle is the state when dumped, without history, and no peak" in " ".join(mixed.split())
    assert "peak allocated" in mixed
    document = json.loads(vramfit("diff", before, history, "--device", 0, "--json", "-").out)
    (device,) = document["devices"]
    assert (device["before"]["is_state"], device["after"]["is_state"]) == (True, False)


def test_a_budget_on_a_state_says_that_it_is_no_peak(vramfit: Command) -> None:
    file = kinds.write(kinds.torch_26(), Path("state.pickle"))
    found = vramfit("check", file, "--budget", "1GiB")
    assert found.code == 0
    assert "a snapshot without history holds no peak: this is what was held when it was dumped" in " ".join(
        found.out.split()
    )


@pytest.mark.parametrize("name", ["expandable", "with_stacks", "torch_20_history_of_blocks"])
def test_exports_of_a_state_are_read_as_that_state(vramfit: Command, name: str) -> None:
    file = kinds.write(kinds.STATES[name](), Path("state.pickle"))
    forms = ("again.pickle", "again.vft", "page.html", "report.json", "t.svg", "t.csv", "t.perfetto.json")
    wanted = [part for form in forms for part in ("-o", form)]
    assert vramfit("export", file, *wanted).code == 0
    for again in ("again.pickle", "again.vft"):
        expected = vramfit("explain", file, "--fragmentation").out.replace("state.pickle", again)
        assert vramfit("explain", again, "--fragmentation").out == expected
    assert "so its figures are no peaks" in Path("page.html").read_text()


@pytest.mark.parametrize("form", ["s.json", "s.json.gz", "s.pickle.gz", "s.pickle"])
@pytest.mark.parametrize("make", [kinds.torch_26, kinds.bare_list, kinds.with_stacks])
def test_every_form_says_the_same(vramfit: Command, make: Callable[[], Any], form: str) -> None:
    plain = vramfit("explain", kinds.write(make(), Path("plain.pickle"))).out
    found = vramfit("explain", kinds.write(make(), Path(form)))
    assert found.out.replace(form, "plain.pickle") == plain


@pytest.mark.parametrize("form", ["s.json", "s.json.gz", "s.pickle.gz", "s.pickle"])
def test_a_truncated_file_is_refused(vramfit: Command, form: str) -> None:
    file = kinds.write(kinds.with_stacks(), Path(form))
    file.write_bytes(file.read_bytes()[:-40])
    for command in ("explain", "tune", "replay"):
        found = vramfit(command, file)
        assert (found.code, found.out) == (2, "")
        assert f"error: {form} is " in found.err
        assert "Traceback" not in found.err


class _Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def test_a_pickle_that_wants_code_is_refused(vramfit: Command) -> None:
    file = Path("foreign.pickle")
    file.write_bytes(pickle.dumps({**kinds.torch_26(), "more": _Foreign()}))
    found = vramfit("explain", file)
    assert (found.code, found.out) == (2, "")
    assert "is refused: its pickle instruction STACK_GLOBAL does more than hold plain data" in found.err
    assert "nothing in the file was executed" in found.err


def test_a_snapshot_of_nothing(vramfit: Command) -> None:
    file = kinds.write({"segments": [], "device_traces": [[], []]}, Path("empty.pickle"))
    found = vramfit("tune", file)
    assert found.code == 2
    assert "the trace holds no requests" in found.err
