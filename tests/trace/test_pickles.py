"""Pickles that want more than to be read. None of them may get anywhere."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.errors import TraceFormatError
from vramfit.trace import load_snapshot, read_any
from vramfit.trace import snapshot_reading as snapshot_module
from vramfit.trace.pickles import _is_simple, load_plain

SENTINEL = "owned"


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (self.command,))


def touch(path: Path) -> str:
    return f"touch {path}"


def attacks(path: Path) -> dict[str, bytes]:
    """One pickle for each way there is to get hold of something to call, or to have it called."""
    command = touch(path).encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    short = b"\x8c" + bytes([len(command)]) + command
    return {
        "GLOBAL": b"\x80\x02cos\nsystem\n" + text + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + short + b"\x85R.",
        "INST": b"(S'" + command + b"'\nios\nsystem\n.",
        "OBJ": b"\x80\x02(cos\nsystem\n" + text + b"o.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + text + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93" + short + b"\x85}\x92.",
        "BUILD": b"\x80\x02}cos\nsystem\nb.",
        "EXT1": b"\x80\x02\x82\x01" + text + b"\x85R.",
        "EXT2": b"\x80\x02\x83\x01\x00" + text + b"\x85R.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00" + text + b"\x85R.",
        "PERSID": b"Pos.system\n.",
        "BINPERSID": b"\x80\x02" + text + b"Q.",
        "REDUCE on data": b"\x80\x02" + text + b"\x85\x85R.",
        "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "FROZENSET": b"\x80\x04(K\x01\x91.",
    }


@pytest.mark.parametrize("name", sorted(attacks(Path("x"))))
@pytest.mark.parametrize("zipped", [False, True])
def test_attacks_are_refused_and_nothing_runs(tmp_path: Path, name: str, zipped: bool) -> None:
    mark = tmp_path / SENTINEL
    data = attacks(mark)[name]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(gzip.compress(data) if zipped else data)
    with pytest.raises(TraceFormatError, match="refused") as caught:
        read_any(path)
    assert "nothing in the file was executed" in caught.value.hint
    assert not mark.exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["alone", "in a segment", "as an address", "in an event", "beside"])
def test_reduce_hidden_in_a_snapshot(tmp_path: Path, protocol: int, place: str) -> None:
    mark = tmp_path / SENTINEL
    evil = Evil(touch(mark))
    value: Any = {
        "alone": evil,
        "in a segment": {"segments": [evil], "device_traces": []},
        "as an address": {"segments": [], "device_traces": [[{"action": "alloc", "addr": evil, "size": 1}]]},
        "in an event": {"segments": [], "device_traces": [[evil]]},
        "beside": {"segments": [], "device_traces": [], "other": evil},
    }[place]
    data = pickle.dumps(value, protocol=protocol)
    with pytest.raises(TraceFormatError, match="refused"):
        load_snapshot(data)
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists()  # the attack itself works: it was the reader that stopped it


def test_nested_tuples_as_keys_neither_hang_nor_crash() -> None:
    # Hashing either of these takes 2**60 steps, or a C stack that is deeper than there is.
    doubling = b"\x80\x02}K\x01K\x02\x86" + b"q\x00h\x00\x86" * 60 + b"K\x01s."
    deep = b"\x80\x02}K\x01" + b"\x85" * 1_000_000 + b"K\x01s."
    for data in (doubling, deep):
        began = time.monotonic()
        with pytest.raises(TraceFormatError, match="key that is a tuple"):
            load_plain(data, "bomb")
        assert time.monotonic() - began < 20


def test_memo_index_does_not_allocate() -> None:
    # Python's unpickler would make an array of 2**32 entries for this.
    data = b"\x80\x02]r\xff\xff\xff\xff."
    assert not _is_simple(data)
    assert load_plain(data, "bomb") == []
    large = b"\x80\x02]" + b"r\x00\x00\x00\x01" + b"." + b"\x00" * 70_000
    assert not _is_simple(large)


def test_shared_lists_do_not_multiply() -> None:
    event = b"}(X\x06\x00\x00\x00actionX\x05\x00\x00\x00allocu"
    inner = b"](" + b"h\x01" * 1000 + b"e"
    outer = b"](" + b"h\x02" * 1000 + b"e"
    data = (
        b"\x80\x02}(X\x01\x00\x00\x00x" + event + b"q\x01X\x01\x00\x00\x00y" + inner + b"q\x02"
        b"X\x0d\x00\x00\x00device_traces" + outer + b"X\x08\x00\x00\x00segments]u."
    )
    assert len(load_plain(data, "bomb")["device_traces"]) == 1000  # a million events in five kilobytes
    with pytest.raises(TraceFormatError, match="repeats itself"):
        load_snapshot(data)


def test_gzip_bomb_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(TraceFormatError, match="unpacks to more"):
        load_snapshot(gzip.compress(b" " * (8 << 20)))


def test_gzip_that_grows_as_no_snapshot_does_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pickle.gz"
    member = gzip.compress(b"]" * (8 << 20), 1)
    path.write_bytes(member * 64)  # 512 MiB
    tracemalloc.start()
    try:
        with pytest.raises(TraceFormatError, match="more than 200 times its size"):
            read_any(path)
        assert tracemalloc.get_traced_memory()[1] < 160 << 20
    finally:
        tracemalloc.stop()


def test_gzip_of_something_else_is_not_unpacked() -> None:
    with pytest.raises(TraceFormatError, match="no known kind of recording inside"):
        load_snapshot(gzip.compress(b"\0" * (8 << 20)))


def test_gzip_of_many_members_and_padding() -> None:
    text = b'{"segments": [], "device_traces": [[]]}'
    members = b"".join(gzip.compress(text[at : at + 1]) + b"\0" * at for at in range(len(text)))
    empty = gzip.compress(b"")
    assert load_snapshot(empty + members + empty) == {"segments": [], "device_traces": [[]]}
    with pytest.raises(TraceFormatError, match="truncated"):
        load_snapshot(members + gzip.compress(b" ")[:-4])
    with pytest.raises(TraceFormatError, match="is empty"):
        load_snapshot(empty)


def test_numbers_without_end() -> None:
    for data in (
        b"\x80\x02\x8b" + struct.pack("<I", 1000) + b"\1" * 1000 + b".",
        b"I" + b"9" * 5000 + b"\n.",
    ):
        with pytest.raises(TraceFormatError, match=r"refused|digits"):
            load_plain(data, "bomb")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=5)
    ),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PLAIN, st.integers(0, 5))
def test_plain_data_reads_as_python_reads_it(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    assert load_plain(data, "value") == value


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.binary(max_size=60), st.integers(0, 5))
def test_junk_fails_with_a_reason(junk: bytes, protocol: int) -> None:
    for data in (junk, b"\x80" + bytes([protocol]) + junk, pickle.dumps([1, "two"], protocol)[:-1] + junk):
        try:
            load_plain(data, "junk")
        except TraceFormatError as error:
            assert error.message.startswith("junk ")


def test_every_truncation_of_a_snapshot_fails() -> None:
    snapshot = {"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 7, "stream": 0}]]}
    for protocol in range(6):
        data = pickle.dumps(snapshot, protocol=protocol)
        for length in range(1, len(data)):
            with pytest.raises(TraceFormatError):
                load_snapshot(data[:length])
        assert load_snapshot(data) == snapshot


def test_shared_lists_stay_shared() -> None:
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    value = load_plain(pickle.dumps([frames, frames], protocol=4), "value")
    assert value[0] is value[1]
