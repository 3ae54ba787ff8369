"""Numbers in files: time series, point clouds, pairs of small and large pictures in HDF5."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def electricity(folder: Path, rows: str = "2000") -> None:
    """``ETTh1.csv``: a date and seven columns for every hour."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(1)
    values = np.cumsum(draw.normal(0, 0.1, (14400 if rows == "all" else int(rows), 7)), axis=0)
    start = np.datetime64("2016-07-01T00")
    lines = ["date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"]
    for hour, row in enumerate(values):
        stamp = str(start + np.timedelta64(hour, "h")).replace("T", " ") + ":00:00"
        lines.append(",".join([stamp, *(f"{value:.3f}" for value in row)]))
    (folder / "ETTh1.csv").write_text("\n".join(lines) + "\n")


def shapenet_points(folder: Path, count: str = "12") -> None:
    """Point clouds with a label for every point, in the layout of ShapeNet's part benchmark."""
    draw = np.random.default_rng(1)
    categories = {"Airplane": "02691156", "Chair": "03001627"}
    files: dict[str, list[str]] = {"train": [], "test": [], "val": []}
    for category in categories.values():
        for number in range(int(count)):
            for part in ("points", "points_label"):
                (folder / category / part).mkdir(parents=True, exist_ok=True)
            points = draw.normal(0, 1, (600, 3))
            np.savetxt(folder / category / "points" / f"{number}.pts", points, fmt="%.5f")
            labels = 1 + draw.integers(0, 4, 600)
            np.savetxt(folder / category / "points_label" / f"{number}.seg", labels, fmt="%d")
            files["train" if number % 3 else "test"].append(f"shape_data/{category}/{number}")
    (folder / "synsetoffset2category.txt").write_text(
        "".join(f"{name}\t{key}\n" for name, key in categories.items())
    )
    (folder / "train_test_split").mkdir()
    for part, names in files.items():
        (folder / "train_test_split" / f"shuffled_{part}_file_list.json").write_text(json.dumps(names))


def modelnet_points(folder: Path, count: str = "8") -> None:
    """Point clouds with normals as text, in the layout of ModelNet40 resampled: ten classes."""
    draw = np.random.default_rng(1)
    folder.mkdir(parents=True)
    names = [f"shape{index}" for index in range(10)]
    (folder / "modelnet10_shape_names.txt").write_text("\n".join(names) + "\n")
    ids = []
    for name in names:
        (folder / name).mkdir()
        for number in range(int(count)):
            ids.append(f"{name}_{number:04d}")
            np.savetxt(
                folder / name / f"{ids[-1]}.txt", draw.normal(0, 1, (1100, 6)), fmt="%.4f", delimiter=","
            )
    for part, chosen in (("train", ids), ("test", ids[::4])):
        (folder / f"modelnet10_{part}.txt").write_text("\n".join(chosen) + "\n")


def super_resolution_h5(folder: Path, patches: str = "256") -> None:
    """``train.h5`` with patches ``lr`` and ``hr``, ``eval.h5`` with a few whole pictures."""
    import h5py

    folder.mkdir(parents=True)
    draw = np.random.default_rng(1)
    with h5py.File(folder / "train.h5", "w") as file:
        for name in ("lr", "hr"):
            file.create_dataset(name, data=draw.uniform(0, 255, (int(patches), 33, 33)).astype(np.float32))
    with h5py.File(folder / "eval.h5", "w") as file:
        for name in ("lr", "hr"):
            group = file.create_group(name)
            for number in range(3):
                group.create_dataset(str(number), data=draw.uniform(0, 255, (120, 180)).astype(np.float32))


MAKERS = (electricity, shapenet_points, modelnet_points, super_resolution_h5)
