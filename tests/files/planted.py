"""Real files of every kind that programs overwrite, and a picture of a folder to compare with later."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

NAMES = (
    *("best.pt", "best.ckpt", "copy.pt", "epochs/epoch-1.pt", "epochs/epoch-2.pt", "epochs/epoch-3.pt"),
    *("model.safetensors", "values.npy", "values.npz", "values.txt", "raw.bin", "state.json", "arrays.pkl"),
    *("log.txt", "edited.txt", "mapped.bin", "folder/deep/file.txt", "tree/a/b.txt"),
    *("times.txt", "touched.txt", "linked.txt", "hard.txt", "fds/inside.txt", "fds/other.txt", "archive.zip"),
    *("archive.tar", "archive.gz", "shared.txt", "cache-1.txt", "shell.txt", "data.h5"),
    *("trainer/checkpoint-2/model.safetensors", "trainer/checkpoint-2/optimizer.pt"),
    *("trainer/checkpoint-2/trainer_state.json", "trainer/final/model.safetensors", "lightning/best.ckpt"),
    *("behind.txt", "behind/inside.txt", "appended.txt", "named.txt", "traced.json", "scripted.pt"),
    *("observed.json", "words/vocab.json", "arrow/table.arrow", "arrow/stream.arrow", "arrow/rows.csv"),
)
_LONG_AGO = 1_500_000_000_123_456_789


def plant(folder: Path) -> None:
    """Put files there, years old."""
    for position, name in enumerate(NAMES):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"planted {name}\n")
        file.chmod(0o644 if position % 2 else 0o664)
    (folder / "tensor.bin").write_bytes(bytes(range(16)))
    with sqlite3.connect(folder / "runs.db") as database:
        database.execute("CREATE TABLE runs (id)")
        database.execute("INSERT INTO runs VALUES (1)")
    database.close()
    (folder / "link.txt").symlink_to("linked.txt")
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, ns=(_LONG_AGO, _LONG_AGO), follow_symlinks=False)


def picture(folder: Path) -> dict[str, Any]:
    """Every path with its bytes, mode, owner, inode, number of names and modification time."""
    found: dict[str, Any] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        state = path.lstat()
        contents = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        facts = (state.st_mode, state.st_uid, state.st_ino, state.st_nlink, state.st_mtime_ns, contents)
        found[str(path.relative_to(folder))] = facts
    return found
