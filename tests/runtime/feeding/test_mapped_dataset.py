"""Data sets in mapped files, beside NumPy: values, files, workers, the page cache, and writers that are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import vramfit
from vramfit.errors import UsageError, WriteError
from vramfit.runtime.feeding import page_cache
from vramfit.runtime.feeding.page_cache import CacheSource, PageCache, page_runs

PAGE = os.sysconf("SC_PAGE_SIZE")


def written(folder: Path, length: int = 40) -> tuple[vramfit.MappedDataset, np.ndarray[Any, Any]]:
    values = np.arange(length * 6, dtype=np.float32).reshape(length, 2, 3)
    return vramfit.MappedDataset.write(folder, {"x": values, "y": torch.arange(length)}), values


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_indexing_is_numpys(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "indexing"
    if not folder.exists():
        written(folder)
    found = vramfit.MappedDataset(folder)
    values = np.load(folder / "x.npy")
    kind = data.draw(st.sampled_from(["int", "slice", "list", "tensor"]))
    number = st.integers(-40, 39)
    index: Any
    if kind == "int":
        index = data.draw(number)
    elif kind == "slice":
        bound = st.none() | st.integers(-50, 50)
        index = slice(
            data.draw(bound), data.draw(bound), data.draw(st.none() | st.sampled_from([1, 2, 7, -1, -3]))
        )
    else:
        index = data.draw(st.lists(number, max_size=12))
    expected = values[np.asarray(index, dtype=np.int64) if isinstance(index, list) else index]
    given_index = torch.tensor(index, dtype=torch.int64) if kind == "tensor" else index
    assert np.array_equal(found[given_index]["x"].numpy(), expected)
    if isinstance(index, list):
        rows = found.__getitems__(index)
        assert [row["x"].tolist() for row in rows] == expected.tolist()
        assert [row["y"].tolist() for row in rows] == [one % 40 for one in index]


def test_files_are_numpys_and_dtypes_come_back(tmp_path: Path) -> None:
    fields = {
        "bool": torch.tensor([True, False]),
        "bf16": torch.randn(2, 3, dtype=torch.bfloat16),
        "f8": torch.randn(2, 3).to(torch.float8_e4m3fn),
        "c64": torch.randn(2, dtype=torch.complex64),
        "u16": torch.tensor([1, 2], dtype=torch.uint16),
        "big": np.array([1.0, 2.0], dtype=">f4"),
        "strided": torch.arange(12).reshape(2, 6)[:, ::2],
        "empty": torch.zeros(2, 0),
    }
    found = vramfit.MappedDataset.write(tmp_path / "set", fields)
    for name, values in fields.items():
        plain = values if isinstance(values, torch.Tensor) else torch.from_numpy(values.astype("=f4"))
        came = found[:][name]
        assert came.dtype == plain.dtype and came.shape == plain.shape, name
        assert (
            came.contiguous().view(torch.uint8).equal(plain.contiguous().view(torch.uint8))
            if came.numel()
            else True
        )
        assert len(np.load(tmp_path / "set" / f"{name}.npy")) == 2
    assert np.array_equal(np.load(tmp_path / "set" / "strided.npy"), [[0, 2, 4], [6, 8, 10]])
    bits = fields["bf16"].view(torch.uint16).numpy()
    assert np.array_equal(np.load(tmp_path / "set" / "bf16.npy"), bits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "set").stat().st_mode & 0o777 == 0o777 & ~mask


def test_samples_of_unknown_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.runtime.feeding.dataset_files._AT_ONCE", 100)  # written in several pieces

    def samples() -> Iterator[dict[str, Any]]:
        buffer = torch.zeros(3)
        for number in range(37):
            yield {"x": buffer.fill_(number), "y": number, "z": np.float32(number / 2)}

    found = vramfit.MappedDataset.write_samples(tmp_path / "set", samples())
    assert len(found) == 37
    assert found[36]["x"].tolist() == [36.0] * 3
    assert found[36]["y"] == torch.tensor(36) and found[36]["z"] == torch.tensor(18.0)
    assert np.array_equal(np.load(tmp_path / "set" / "y.npy"), np.arange(37))


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "there are no samples"),
        (
            [{"x": torch.zeros(2)}, {"x": torch.zeros(3)}],
            r"x of sample 1 is float32 of shape \(3,\).*no place",
        ),
        ([{"x": 1}, {"x": 1.0}], "x of sample 1 is float64"),
        ([{"x": 1}, {"y": 1}], "sample 1 has the fields y, those before x"),
        ([torch.zeros(2)], "has no names for its fields"),
        ([{"x": "text"}], "x of sample 0 is no array of numbers"),
        ([{"a/b": 1}], "no name for a field"),
    ],
)
def test_samples_that_cannot_be_written_leave_nothing(tmp_path: Path, samples: list[Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        vramfit.MappedDataset.write_samples(tmp_path / "set", samples)
    assert not list(tmp_path.iterdir())


def test_arrays_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    write = vramfit.MappedDataset.write
    for fields, said in (
        ({}, "there are none"),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, "x has 2, y has 3"),
        ({"x": np.array(["a", "b"])}, "no dtype"),
        ({"x": 3}, "no array of numbers"),
        (3, "no names"),
    ):
        with pytest.raises(UsageError, match=said):
            write(tmp_path / "set", fields)  # type: ignore[arg-type]
    with pytest.raises(WriteError):
        write(tmp_path / "no" / "set", {"x": torch.zeros(2)})
    assert not list(tmp_path.iterdir())
    written(tmp_path / "set")
    with pytest.raises(UsageError, match="something at"):
        written(tmp_path / "set")

    def broken() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        raise OSError(5, "of the source")

    with pytest.raises(OSError, match="of the source"):
        vramfit.MappedDataset.write_samples(tmp_path / "other", broken())
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_set_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no data set"):
        vramfit.MappedDataset(tmp_path / "set")
    written(tmp_path / "set")
    with pytest.raises(UsageError, match="has no field 'z'"):
        vramfit.MappedDataset(tmp_path / "set", fields=["z"])
    with pytest.raises(UsageError, match="order='so'"):
        vramfit.MappedDataset(tmp_path / "set", order="so")
    assert list(vramfit.MappedDataset(tmp_path / "set", fields=["y"])[0]) == ["y"]
    file, description = tmp_path / "set" / "x.npy", tmp_path / "set" / "dataset.json"
    whole, told = file.read_bytes(), description.read_text()
    for damaged in (whole[:-1], whole + b"x", b"", whole.replace(b"<f4", b"<i4")):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match="cut off or replaced"):
            vramfit.MappedDataset(tmp_path / "set")
    file.write_bytes(whole)
    for text, said in (
        ("{", "cannot be read"),
        ("[]", "describes no data set"),
        (json.dumps({**json.loads(told), "format": "other/1"}), "format 'other/1'"),
        (told.replace("float32", "float3"), "no dtype float3"),
    ):
        description.write_text(text)
        with pytest.raises(UsageError, match=said):
            vramfit.MappedDataset(tmp_path / "set")
    description.unlink()
    with pytest.raises(UsageError, match="not written to its end"):
        vramfit.MappedDataset(tmp_path / "set")


@pytest.mark.parametrize("wrong", [40, -41, [40], [0.5], "x", [[1]], [True]])
def test_wrong_indices(tmp_path: Path, wrong: Any) -> None:
    found, _ = written(tmp_path / "set")
    with pytest.raises((IndexError, TypeError)):
        found[wrong]


def test_what_is_given_out_is_a_copy(tmp_path: Path) -> None:
    found, values = written(tmp_path / "set")
    for index in (3, [3], slice(3, 4)):
        found[index]["x"].zero_()
        assert np.array_equal(found[3]["x"].numpy(), values[3])


def test_workers_get_the_path_alone_and_all_samples(tmp_path: Path) -> None:
    values = torch.randn(64, 4096)
    found = vramfit.MappedDataset.write(tmp_path / "set", {"x": values, "y": torch.arange(64)})
    assert len(pickle.dumps(found)) < 1000
    sent = pickle.loads(pickle.dumps(found))
    assert torch.equal(sent[5]["x"], values[5])
    by_items = DataLoader(found, batch_size=8, num_workers=1, shuffle=True)
    by_batches = DataLoader(
        found, batch_size=None, num_workers=1, sampler=BatchSampler(RandomSampler(found), 8, drop_last=False)
    )
    for loader in (by_items, by_batches):
        seen = []
        for batch in loader:
            assert torch.equal(batch["x"], values[batch["y"]])
            seen += batch["y"].tolist()
        assert sorted(seen) == list(range(64))
    other = tmp_path / "other"
    vramfit.MappedDataset.write(other, {"x": values[:3], "y": torch.arange(3)})
    state = pickle.dumps(found)
    (tmp_path / "set").rename(tmp_path / "old")
    other.rename(tmp_path / "set")
    with pytest.raises(UsageError, match="another than it was"):
        pickle.loads(state)


def mapped_private_bytes(folder: Path) -> int:
    """What this process has of a folder's files for itself, by the kernel."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = str(folder) in line
        elif inside and line.startswith("Private_Dirty"):
            total += int(line.split()[1]) << 10
    return total


def read_all(folder: Path, told: Any) -> None:
    found = vramfit.MappedDataset(folder)
    sum(float(found[at : at + 16]["x"].sum()) for at in range(0, 64, 16))
    told.put(mapped_private_bytes(folder))


def test_no_process_has_pages_of_its_own(tmp_path: Path) -> None:
    vramfit.MappedDataset.write(tmp_path / "set", {"x": torch.randn(64, 4096)})
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    child = context.Process(target=read_all, args=(tmp_path / "set", told))
    child.start()
    assert told.get(timeout=30) == 0
    child.join()


def test_the_page_cache_is_told_by_two_system_calls(tmp_path: Path) -> None:
    values = torch.zeros(64, 4 * PAGE, dtype=torch.uint8)
    found = vramfit.MappedDataset.write(tmp_path / "set", {"x": values})
    pages = 64 * 4 + 1  # with the header's
    whole = found.cached()
    assert whole is not None
    assert (whole.pages, whole.cached, whole.hit_rate) == (pages, pages, 1.0)
    for source in CacheSource:
        told = found.cached(source=source)
        if told is None:
            continue  # an older kernel
        assert (told.pages, told.cached, told.source) == (pages, pages, source)
        some = found.cached([3, 4, 20], source=source)
        assert some is not None and (some.pages, some.cached) == (4 * 3 + 2, 4 * 3 + 2)
    number = os.open(tmp_path / "set" / "x.npy", os.O_RDONLY)
    del found  # what is mapped stays
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(number)
    cold = vramfit.MappedDataset(tmp_path / "set", order="random")
    before = cold.cached()
    assert before is not None
    if before.cached == pages:
        pytest.skip("this file system keeps its pages")
    assert before.cached <= 1 + 32  # the header was read, and what the kernel reads with it
    cold.read_ahead([40, 50])
    until = time.perf_counter() + 10
    while (now := cold.cached([40, 50])) is not None and now.hit_rate < 1 and time.perf_counter() < until:
        time.sleep(0.01)
    assert now is not None and now.hit_rate == 1.0
    there = cold.cached()
    assert there is not None and there.cached < pages / 2
    # cachestat counts pages that are still being read, mincore those that are there: in the end they are the same.
    while time.perf_counter() < until:
        told_both = [cold.cached(source=source) for source in CacheSource]
        if told_both[0] is None or told_both[0].cached == told_both[1].cached:
            break
        time.sleep(0.01)
    else:
        pytest.fail(f"{told_both}")


def test_where_cachestat_finds_nothing_mincore_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlay's file has no pages of its own, and an older kernel has no such call."""
    found = vramfit.MappedDataset.write(tmp_path / "set", {"x": torch.zeros(4, PAGE, dtype=torch.uint8)})
    found[:]
    nothing = PageCache(pages=5, cached=0, dirty=0, source=CacheSource.CACHESTAT)
    for told in (nothing, None):
        monkeypatch.setattr(page_cache, "_by_cachestat", lambda *_, told=told: told)
        whole = found.cached()
        assert whole is not None
        assert (whole.source, whole.pages, whole.cached) == (CacheSource.MINCORE, 5, 5)
        assert found.cached(source=CacheSource.CACHESTAT) == told
        monkeypatch.setattr(page_cache, "_by_mincore", lambda *_: None)
        assert found.cached() == told
        monkeypatch.undo()


def test_runs_of_pages() -> None:
    assert page_runs([(0, 1), (PAGE, PAGE + 1)]) == [(0, 2 * PAGE)]
    assert page_runs([(3 * PAGE - 1, 3 * PAGE + 1), (5, 5), (0, 1)]) == [(0, PAGE), (2 * PAGE, 4 * PAGE)]


def write_slowly(folder: Path, ready: Any) -> None:
    def samples() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        ready.put(True)
        time.sleep(60)

    vramfit.MappedDataset.write_samples(folder, samples())


def test_a_writer_that_is_killed_leaves_no_set_and_its_remains_go_with_the_next(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Queue()
    child = context.Process(target=write_slowly, args=(tmp_path / "set", ready))
    child.start()
    assert ready.get(timeout=30)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    (left,) = tmp_path.iterdir()
    assert left.name != "set"
    with pytest.raises(UsageError, match="not written to its end"):
        vramfit.MappedDataset(left)
    found, _ = written(tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert len(found) == 40


def test_tensors_that_stand_for_others_are_written_as_what_they_show(tmp_path: Path) -> None:
    values = torch.randn(4, 3, dtype=torch.complex64).conj()
    data = vramfit.MappedDataset.write(tmp_path / "one", {"x": values, "y": values.imag})
    assert torch.equal(data[:]["x"], values.resolve_conj()) and torch.equal(data[1]["y"], values[1].imag)
    data = vramfit.MappedDataset.write_samples(tmp_path / "two", ({"x": one} for one in values))
    assert torch.equal(data[:]["x"], values.resolve_conj())


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (torch.eye(3).to_sparse(), r"x is no plain tensor \(sparse_coo\)"),
        (torch.zeros(3, 2, device="meta"), "x is on the meta device, where tensors have no values"),
    ],
)
def test_tensors_without_values_in_one_piece_are_refused(
    tmp_path: Path, values: torch.Tensor, line: str
) -> None:
    with pytest.raises(UsageError, match=line):
        vramfit.MappedDataset.write(tmp_path / "data", {"x": values})
    with pytest.raises(UsageError, match=line.replace("x is", "x of sample 0 is")):
        vramfit.MappedDataset.write_samples(tmp_path / "data", [{"x": values}])
    assert list(tmp_path.iterdir()) == []


def test_large_unsigned_numbers_are_no_negative_ones(tmp_path: Path) -> None:
    data = vramfit.MappedDataset.write(tmp_path / "data", {"x": np.arange(3)})
    with pytest.raises(IndexError):
        data[np.array([2**64 - 1], dtype=np.uint64)]
    assert data[np.array([2], dtype=np.uint64)]["x"].tolist() == [2]
