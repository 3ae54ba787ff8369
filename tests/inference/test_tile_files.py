"""Results in files, and runs that break off."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.inference.networks import numbers, plain, whole
from torch import nn

import vramfit
from vramfit.errors import UsageError, VramfitError, WriteError
from vramfit.inference import tile_runner
from vramfit.inference.arrays import NpyFile, create_npy

X = numbers(2, 61, 47)
EXACT: dict[str, Any] = {"tile": 16, "halo": 3}
BLENDED: dict[str, Any] = {"tile": 16, "overlap": 0.4, "blend": "gaussian", "tile_batch": 2}


@pytest.fixture
def model() -> nn.Module:
    return plain(2)


@pytest.fixture(autouse=True)
def _flush_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_runner, "FLUSH_BYTES", 1)


def breaks_off(at: int) -> Any:
    """A progress that interrupts the run after some tiles."""

    def progress(done: int, total: int) -> None:
        if done >= at:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("settings", [EXACT, BLENDED], ids=["exact", "blended"])
def test_from_file_to_file(tmp_path: Path, model: nn.Module, settings: dict[str, Any]) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    found = vramfit.tiled(model, tmp_path / "x.npy", out=tmp_path / "y.npy", **settings)
    assert isinstance(found, np.memmap)
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "y.npy")), vramfit.tiled(model, X, **settings))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "y.npy"]


@pytest.mark.parametrize("settings", [EXACT, BLENDED], ids=["exact", "blended"])
@pytest.mark.parametrize("at", [1, 5, 11, 24])
def test_a_run_that_broke_off_goes_on(
    tmp_path: Path, model: nn.Module, settings: dict[str, Any], at: int
) -> None:
    where: dict[str, Any] = {"out": tmp_path / "y.npy", "journal": True}
    with pytest.raises(KeyboardInterrupt):
        vramfit.tiled(model, X, progress=breaks_off(at), **where, **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["y.npy.journal", "y.npy.partial"]
    calls = []
    counted = plain(2)
    counted.register_forward_hook(lambda *_: calls.append(1))
    vramfit.tiled(counted, X, **where, **settings)
    vramfit.tiled(plain(2), X, out=tmp_path / "plain.npy", **settings)
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "plain.npy").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.npy", "y.npy"]
    if at == 24 and settings is EXACT:
        assert len(calls) < 12


def test_what_a_kill_leaves_between_any_two_writes(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal and the file as they stood after each line: a run from there ends in the same bytes."""
    expected = vramfit.tiled(model, X, **EXACT)
    states: list[tuple[bytes, bytes]] = []
    note = vramfit.inference.tile_journal.TileJournal._write

    def noted(self: Any, entry: Any) -> None:
        note(self, entry)
        partial = tmp_path / "y.npy.partial"
        states.append((self.path.read_bytes(), partial.read_bytes() if partial.exists() else b""))

    monkeypatch.setattr(vramfit.inference.tile_journal.TileJournal, "_write", noted)
    vramfit.tiled(model, X, out=tmp_path / "y.npy", journal=True, **EXACT)
    monkeypatch.undo()
    assert len(states) > 5
    for journal, partial in (*states[:: max(1, len(states) // 6)], states[-1]):
        (tmp_path / "y.npy").unlink(missing_ok=True)
        (tmp_path / "y.npy.journal").write_bytes(journal[:-3])  # torn
        if partial:
            (tmp_path / "y.npy.partial").write_bytes(partial)
        found = vramfit.tiled(model, X, out=tmp_path / "y.npy", journal=True, **EXACT)
        assert torch.equal(torch.from_numpy(np.array(found)), expected)
        assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


def test_a_kill_between_the_last_line_and_the_name(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(KeyboardInterrupt):
        vramfit.tiled(model, X, out=tmp_path / "y.npy", journal=True, progress=breaks_off(7), **EXACT)
    import zlib

    text = b'{"complete":true}'
    with (tmp_path / "y.npy.journal").open("ab") as stream:
        stream.write(b"%08x %s\n" % (zlib.crc32(text), text))
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    found = vramfit.tiled(model, X, out=tmp_path / "y.npy", journal=True, **EXACT)
    assert found.shape == (3, 61, 47) and not calls
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


def test_a_journal_of_another_run_is_refused(tmp_path: Path, model: nn.Module) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    where: dict[str, Any] = {"out": tmp_path / "y.npy", "journal": tmp_path / "j"}
    with pytest.raises(KeyboardInterrupt):
        vramfit.tiled(model, tmp_path / "x.npy", progress=breaks_off(3), **where, **EXACT)
    other = plain(2)
    with torch.no_grad():
        other[0].weight[0, 0, 0, 0] += 1e-6
    changed = X.clone()
    changed[0, 0, 0] += 1
    np.save(tmp_path / "x2.npy", changed.numpy())
    tries: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("another model", other, tmp_path / "x.npy", EXACT),
        ("another input", model, tmp_path / "x2.npy", EXACT),
        ("another shape of the input", model, X[:, :50], EXACT),
        ("another settings", model, tmp_path / "x.npy", {**EXACT, "halo": 4}),
        ("another settings", model, tmp_path / "x.npy", {**EXACT, "reduce": "argmax"}),
        ("another settings", model, tmp_path / "x.npy", {**EXACT, "prepare": lambda tiles: tiles * 2}),
    ]
    before = (tmp_path / "j").read_bytes()
    for said, with_model, x, settings in tries:
        with pytest.raises(UsageError, match=said) as told:
            vramfit.tiled(with_model, x, **where, **settings)
        assert "\n" not in str(told.value)
    assert (tmp_path / "j").read_bytes() == before
    vramfit.tiled(model, tmp_path / "x.npy", **where, **EXACT)


def test_a_file_that_is_gone_is_missed(tmp_path: Path, model: nn.Module) -> None:
    where: dict[str, Any] = {"out": tmp_path / "y.npy", "journal": True}
    with pytest.raises(KeyboardInterrupt):
        vramfit.tiled(model, X, progress=breaks_off(9), **where, **EXACT)
    (tmp_path / "y.npy.partial").unlink()
    with pytest.raises(UsageError, match="which the journal goes on with, is gone"):
        vramfit.tiled(model, X, **where, **EXACT)


def test_files_are_closed(tmp_path: Path, model: nn.Module) -> None:
    opened = Path("/proc/self/fd")
    if not opened.exists():
        pytest.skip("no /proc")
    np.save(tmp_path / "x.npy", X.numpy())
    vramfit.tiled(model, tmp_path / "x.npy", out=tmp_path / "y.npy", journal=True, **EXACT)
    before = len(list(opened.iterdir()))
    for _ in range(3):
        vramfit.tiled(model, tmp_path / "x.npy", out=tmp_path / "y.npy", journal=True, **EXACT)
        with pytest.raises(KeyboardInterrupt):
            vramfit.tiled(model, tmp_path / "x.npy", out=tmp_path / "y.npy", progress=breaks_off(3), **EXACT)
    assert len(list(opened.iterdir())) <= before


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, model: nn.Module) -> None:
    for content in (b"notes\n", json.dumps({"a": 1}).encode(), bytes(range(256))):
        (tmp_path / "j").write_bytes(content)
        with pytest.raises(UsageError, match="no journal of tiles"):
            vramfit.tiled(model, X, out=tmp_path / "y.npy", journal=tmp_path / "j", **EXACT)
        assert (tmp_path / "j").read_bytes() == content


def test_nothing_is_left_of_a_run_that_fails(tmp_path: Path, model: nn.Module) -> None:
    for wrong in (
        {"reduce": lambda block: block[..., :2]},
        {"reduce": lambda block: 1 / 0},
        {"out": np.zeros((3, 61, 48))},
        {"out": np.zeros((3, 61, 47), np.int32)},
        {"out": (tmp_path / "a.npy", tmp_path / "b.npy")},
        {"out": tmp_path / "no" / "such.npy"},
        {"out": tmp_path / "y.tif"},
        {"progress": breaks_off(5)},
    ):
        with pytest.raises((VramfitError, ZeroDivisionError, KeyboardInterrupt)) as told:
            vramfit.tiled(model, X, **{"out": tmp_path / "y.npy", **EXACT, **wrong})
        assert "\n" not in str(told.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_of_others_are_filled(tmp_path: Path, model: nn.Module, dtype: Any) -> None:
    expected = whole(model, X)
    given = [np.zeros((3, 61, 47), dtype), torch.zeros(3, 61, 47, dtype=torch.float64)]
    given.append(np.lib.format.open_memmap(tmp_path / "m.npy", "w+", dtype, (3, 61, 47)))
    for out in given:
        assert vramfit.tiled(model, X, out=out, **EXACT) is out
        torch.testing.assert_close(torch.as_tensor(out).float(), expected, rtol=1e-5, atol=1e-6)


def test_arrays_that_cannot_be_written(tmp_path: Path, model: nn.Module) -> None:
    np.save(tmp_path / "m.npy", np.zeros((3, 61, 47), np.float32))
    locked = np.zeros((3, 61, 47), np.float32)
    locked.flags.writeable = False

    class ReadOnly:
        shape, dtype, read_only = (3, 61, 47), np.float32, True

        def __setitem__(self, key: Any, value: Any) -> None:
            raise AssertionError

    class Narrow(ReadOnly):
        read_only = False

        def __setitem__(self, key: Any, value: Any) -> None:
            raise ValueError("no slices here")

    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    wrong: list[Any] = [np.load(tmp_path / "m.npy", mmap_mode="r"), locked, ReadOnly(), (1, 2), 7]
    for out in (*wrong, torch.zeros(3, 61, 47, requires_grad=True)):
        with pytest.raises(UsageError, match="cannot be written") as told:
            vramfit.tiled(model, X, out=out, **EXACT)
        assert "\n" not in str(told.value)
    assert not calls
    with pytest.raises(WriteError, match="no slices here"):
        vramfit.tiled(model, X, out=Narrow(), **EXACT)

    with pytest.raises(UsageError, match="cannot be written"):
        vramfit.tiled(model, X, out=torch.zeros(1, 1, 1).expand(3, 61, 47), **EXACT)


REDUCTIONS: list[tuple[Any, Any]] = [
    ("threshold=0.1", "threshold=0.3"),
    (("threshold=0.1",), ("threshold=0.3",)),
    (lambda block: block > at(0.1), lambda block: block > at(0.3)),
    (functools.partial(torch.gt, other=0.1), functools.partial(torch.gt, other=0.3)),
    (lambda block: block.amax(1), lambda block: block.amin(1)),
]


def at(value: float) -> float:
    return value


@pytest.mark.parametrize(("first", "second"), REDUCTIONS)
def test_a_journal_of_another_reduction_is_refused(
    tmp_path: Path, model: nn.Module, first: Any, second: Any
) -> None:
    where: dict[str, Any] = {"out": tmp_path / "y.npy", "journal": True}
    with pytest.raises(KeyboardInterrupt):
        vramfit.tiled(model, X, progress=breaks_off(3), reduce=first, **where, **EXACT)
    with pytest.raises(UsageError, match="another settings"):
        vramfit.tiled(model, X, reduce=second, **where, **EXACT)
    changed = X.clone()
    changed[0, 30, 20] += 1  # in the middle, which neither the first nor the last tile holds
    with pytest.raises(UsageError, match="another input"):
        vramfit.tiled(model, changed, reduce=first, **where, **EXACT)
    found = vramfit.tiled(model, X, reduce=first, **where, **EXACT)
    expected = vramfit.tiled(model, X, reduce=first, **EXACT)
    found, expected = (one[0] if isinstance(one, tuple) else one for one in (found, expected))
    assert torch.equal(torch.from_numpy(np.array(found)), expected)


def test_what_is_written_into_a_private_map_stays(tmp_path: Path, model: nn.Module) -> None:
    for name, values in (("x.npy", X.numpy()), ("y.npy", np.zeros((3, 61, 47), np.float32))):
        np.save(tmp_path / name, values)
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed += 1
    expected = vramfit.tiled(model, X + 1, **EXACT)
    assert torch.equal(vramfit.tiled(model, changed, **EXACT), expected)
    assert np.array_equal(changed, X.numpy() + 1)
    private = np.load(tmp_path / "y.npy", mmap_mode="c")
    vramfit.tiled(model, X, out=private, **EXACT)
    assert np.array_equal(private, vramfit.tiled(model, X, **EXACT).numpy())
    with pytest.raises(UsageError, match="outlive the process"):
        vramfit.tiled(model, X, out=private, journal=tmp_path / "j", **EXACT)


def test_a_result_over_the_input_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, values = nn.Conv2d(2, 2, 3, padding=1).eval(), X.numpy().copy()
    expected = vramfit.tiled(model, X, tile=16, halo=1)
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r+")
    tensor = torch.from_numpy(values)
    shared: list[tuple[Any, Any]] = [
        (values, values),
        (tensor, values),
        (values[None], tensor[None]),
        (mapped, mapped),
        (tmp_path / "x.npy", mapped),
        (np.load(tmp_path / "x.npy", mmap_mode="r"), mapped),
    ]
    for x, out in shared:
        with pytest.raises(UsageError, match="input's own memory"):
            vramfit.tiled(model, x, tile=16, halo=1, out=out)
    assert np.array_equal(values, X.numpy()) and np.array_equal(mapped, X.numpy())
    del mapped
    # Side by side in one tensor there is nothing in common; and a file is written beside its name.
    both = torch.cat([X, torch.zeros_like(X)])
    vramfit.tiled(model, both[:2], tile=16, halo=1, out=both[2:])
    assert torch.equal(both[2:], expected)
    vramfit.tiled(model, tmp_path / "x.npy", tile=16, halo=1, out=tmp_path / "x.npy")
    assert np.array_equal(np.load(tmp_path / "x.npy"), expected.numpy())


def test_results_have_places_of_their_own_by_their_names(tmp_path: Path, model: nn.Module) -> None:
    def two(tiles: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"one": model(tiles), "two": 2 * model(tiles)}

    how: dict[str, Any] = {**EXACT, "dims": 2}
    first, second = tmp_path / "one.npy", tmp_path / "two.npy"
    vramfit.tiled(two, X, out={"two": second, "one": first}, **how)
    assert np.array_equal(np.load(second), 2 * np.load(first))
    with pytest.raises(UsageError, match="out is for one, three, and the results are one, two"):
        vramfit.tiled(two, X, out={"one": first, "three": second}, **how)
    same = np.zeros((3, 61, 47), np.float32)
    for out in ({"one": first, "two": tmp_path / "." / "one.npy"}, {"one": same, "two": same}):
        with pytest.raises(UsageError, match="same place for two results"):
            vramfit.tiled(two, X, out=out, **how)
    with pytest.raises(UsageError, match="is the file of a result"):
        vramfit.tiled(model, X, out=first, journal=first, **EXACT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.npy", "two.npy"]


def test_a_journal_needs_what_outlives_the_process(tmp_path: Path, model: nn.Module) -> None:
    for out in (None, np.zeros((3, 61, 47), np.float32), torch.zeros(3, 61, 47)):
        with pytest.raises(UsageError, match="outlive the process"):
            vramfit.tiled(model, X, out=out, journal=tmp_path / "j", **EXACT)
    with pytest.raises(UsageError, match="journal=True"):
        vramfit.tiled(model, X, journal=True, **EXACT)


class Sharded:
    """An array that is written shard by shard, as zarr's are, and notes what is written."""

    def __init__(self, shape: tuple[int, ...], shards: tuple[int, ...]) -> None:
        self.values = np.full(shape, np.nan, np.float32)
        self.shape, self.shards, self.dtype = shape, shards, self.values.dtype
        self.written: list[tuple[int, ...]] = []

    def __setitem__(self, key: tuple[Any, ...], value: Any) -> None:
        for part, shard, size in zip(key, self.shards, self.shape, strict=True):
            start, stop, _ = part.indices(size)
            assert start % shard == 0 and (stop == size or stop % shard == 0)
        self.written.append(tuple(part.indices(size)[0] for part, size in zip(key, self.shape, strict=True)))
        self.values[key] = value


@pytest.mark.parametrize("settings", [EXACT, BLENDED], ids=["exact", "blended"])
@pytest.mark.parametrize("shards", [(3, 20, 20), (1, 7, 47), (3, 61, 5)])
def test_each_shard_is_written_once_and_whole(
    model: nn.Module, settings: dict[str, Any], shards: tuple[int, ...]
) -> None:
    out = Sharded((3, 61, 47), shards)
    vramfit.tiled(model, X, out=out, **settings)
    assert torch.equal(torch.from_numpy(out.values), vramfit.tiled(model, X, **settings))
    assert len(set(out.written)) == len(out.written)


@pytest.mark.parametrize("settings", [EXACT, BLENDED], ids=["exact", "blended"])
def test_shards_of_several_items(model: nn.Module, settings: dict[str, Any]) -> None:
    x = numbers(3, 2, 30, 30)
    out = Sharded((3, 3, 30, 30), (2, 3, 20, 20))
    vramfit.tiled(model, x, out=out, **settings)
    assert torch.equal(torch.from_numpy(out.values), vramfit.tiled(model, x, **settings))
    assert len(set(out.written)) == len(out.written) == 8


@pytest.mark.parametrize("settings", [EXACT, BLENDED], ids=["exact", "blended"])
def test_shards_go_on_after_a_break(tmp_path: Path, model: nn.Module, settings: dict[str, Any]) -> None:
    out = Sharded((3, 61, 47), (3, 20, 20))
    for at in (6, 15, 22):
        with pytest.raises(KeyboardInterrupt):
            vramfit.tiled(model, X, out=out, journal=tmp_path / "j", progress=breaks_off(at), **settings)
    vramfit.tiled(model, X, out=out, journal=tmp_path / "j", **settings)
    assert torch.equal(torch.from_numpy(out.values), vramfit.tiled(model, X, **settings))
    assert len(set(out.written)) == len(out.written)


def test_zarr(tmp_path: Path, model: nn.Module) -> None:
    zarr = pytest.importorskip("zarr")
    source = zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(2, 16, 16), dtype="float32")
    source[:] = X.numpy()
    out = zarr.create_array(
        tmp_path / "y.zarr", shape=(3, 61, 47), chunks=(3, 10, 10), shards=(3, 20, 20), dtype="float32"
    )
    with pytest.raises(KeyboardInterrupt):
        vramfit.tiled(model, source, out=out, journal=tmp_path / "j", progress=breaks_off(9), **EXACT)
    vramfit.tiled(model, source, out=out, journal=tmp_path / "j", **EXACT)
    assert torch.equal(torch.from_numpy(out[:]), vramfit.tiled(model, X, **EXACT))
    locked = zarr.open_array(tmp_path / "y.zarr", mode="r")
    with pytest.raises(UsageError, match="cannot be written"):
        vramfit.tiled(model, source, out=locked, **EXACT)


def test_other_byte_orders_and_layouts(tmp_path: Path, model: nn.Module) -> None:
    expected = vramfit.tiled(model, X, **EXACT)
    np.save(tmp_path / "big.npy", X.numpy().astype(">f4"))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(X.numpy()))
    for given in (
        tmp_path / "big.npy",
        tmp_path / "fortran.npy",
        np.load(tmp_path / "fortran.npy", mmap_mode="r"),
        X.numpy()[:, ::-1][:, ::-1],
    ):
        assert torch.equal(vramfit.tiled(model, given, **EXACT), expected)


def test_files_that_cannot_be_read(tmp_path: Path, model: nn.Module) -> None:
    (tmp_path / "x.npy").write_bytes(b"no array")
    with pytest.raises(UsageError, match=r"no \.npy file") as told:
        vramfit.tiled(model, tmp_path / "x.npy", **EXACT)
    assert "\n" not in str(told.value)
    with pytest.raises(UsageError, match="there is no file"):
        vramfit.tiled(model, tmp_path / "none.npy", **EXACT)
    np.save(tmp_path / "o.npy", np.array([None]), allow_pickle=True)
    with pytest.raises(UsageError, match="Python objects"):
        vramfit.tiled(model, tmp_path / "o.npy", **EXACT)


def test_pages_of_a_file_do_not_stay_resident(tmp_path: Path) -> None:
    made = create_npy(tmp_path / "a.npy", (64, 1024, 512), np.dtype(np.float32))
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc")

    def mapped() -> int:
        text = status.read_text(encoding="ascii")
        return int(text.split("RssFile:")[1].split()[0]) << 10

    before, most = mapped(), 0
    for row in range(64):
        made[row] = np.full((1024, 512), row, np.float32)
        most = max(most, mapped() - before)
    made.flush()
    made.close()
    assert most < 48 << 20  # of 128 MiB
    found = NpyFile(tmp_path / "a.npy")
    assert all((found[row] == row).all() for row in range(64))
    assert mapped() - before < 48 << 20
