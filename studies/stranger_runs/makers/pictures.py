"""Pictures: MNIST and CIFAR in their files, folders by class, COCO, YOLO and VOC layouts with their annotations."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np

_SEED = 20


def _noise(height: int, width: int, number: int) -> Any:
    """A picture that compresses like a photograph: a few smooth waves and some noise."""
    random = np.random.default_rng(_SEED + number)
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [
        np.sin(random.uniform(2, 20) * x + random.uniform(2, 20) * y + random.uniform(0, 6)) for _ in range(3)
    ]
    picture = 128 + 90 * np.stack(waves, axis=-1) + random.normal(0, 8, (height, width, 3))
    return np.clip(picture, 0, 255).astype(np.uint8)


def _write(path: Path, height: int, width: int, number: int) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(_noise(height, width, number)).save(path)


def mnist(folder: Path, train: str = "6000", test: str = "1000") -> None:
    """MNIST, FashionMNIST and QMNIST's shape: IDX files of 28 x 28 bytes, fewer than the real ones."""
    random = np.random.default_rng(_SEED)
    for name in ("MNIST", "FashionMNIST"):
        raw = folder / name / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", int(train)), ("t10k", int(test))):
            images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = (np.arange(count) % 10).astype(np.uint8)
            header = np.array([2051, count, 28, 28], dtype=">i4").tobytes()
            (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
            header = np.array([2049, count], dtype=">i4").tobytes()
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def keras_mnist(path: Path, train: str = "6000", test: str = "1000") -> None:
    """MNIST as Keras keeps it: one archive of four arrays, fewer pictures than the real ones."""
    random = np.random.default_rng(_SEED)
    arrays = {}
    for part, count in (("train", int(train)), ("test", int(test))):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"y_{part}"] = (np.arange(count) % 10).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # an open file, since a name would be given an ending
        np.savez(file, **arrays)


def cifar10(folder: Path, count: str = "1000") -> None:
    """CIFAR-10: five batches and a test batch, of fewer pictures than the real ones."""
    base = folder / "cifar-10-batches-py"
    base.mkdir(parents=True)
    random = np.random.default_rng(_SEED)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        entry = {"data": random.integers(0, 256, (int(count), 3072), dtype=np.uint8)}
        (base / name).write_bytes(
            pickle.dumps({**entry, "labels": [index % 10 for index in range(int(count))]})
        )
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))


def cifar100(folder: Path, count: str = "2000") -> None:
    """CIFAR-100: one train and one test batch, of fewer pictures than the real ones."""
    base = folder / "cifar-100-python"
    base.mkdir(parents=True)
    random = np.random.default_rng(_SEED)
    for name in ("train", "test"):
        data = random.integers(0, 256, (int(count), 3072), dtype=np.uint8)
        labels = [index % 100 for index in range(int(count))]
        entry = {"data": data, "fine_labels": labels, "coarse_labels": [label // 5 for label in labels]}
        (base / name).write_bytes(pickle.dumps(entry))
    names = {"fine_label_names": [f"class{index}" for index in range(100)]}
    (base / "meta").write_bytes(pickle.dumps(names))


def image_folder(folder: Path, count: str = "24", side: str = "256", classes: str = "2") -> None:
    """``train`` and ``val``, each with a folder of pictures for every class."""
    for part, share in (("train", 1), ("val", 2)):
        for label in range(int(classes)):
            for number in range(max(2, int(count) // share)):
                _write(
                    folder / part / f"class{label}" / f"{number}.jpg",
                    int(side),
                    int(side),
                    100 * label + number,
                )


def flat_pictures(
    folder: Path, count: str = "24", height: str = "256", width: str = "256", ending: str = "png"
) -> None:
    """Pictures with numbers for names in one folder."""
    for number in range(int(count)):
        _write(folder / f"{number:04d}.{ending}", int(height), int(width), number)


def picture(path: Path, height: str = "320", width: str = "480") -> None:
    """One JPEG picture."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(_noise(int(height), int(width), 7)).save(path, format="JPEG")


def font(path: Path) -> None:
    """A font in place of Arial, which YOLO would download: the one that matplotlib brings."""
    from matplotlib import get_data_path

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf").read_bytes())


def masks(folder: Path, count: str = "8", height: str = "320", width: str = "480") -> None:
    """``imgs`` and ``masks`` of the same names: a disc to be found in each picture."""
    from PIL import Image

    for number in range(int(count)):
        _write(folder / "imgs" / f"{number:04d}.jpg", int(height), int(width), number)
        (folder / "masks").mkdir(exist_ok=True)
        Image.fromarray(_disc(int(height), int(width), number) * 255).save(
            folder / "masks" / f"{number:04d}.gif"
        )


def _disc(height: int, width: int, number: int) -> Any:
    y, x = np.mgrid[0:height, 0:width]
    centre = (height / 2 + 11 * (number % 5), width / 2 - 13 * (number % 3))
    return (((y - centre[0]) ** 2 + (x - centre[1]) ** 2) < (min(height, width) / 4) ** 2).astype(np.uint8)


def _boxes(number: int, height: int, width: int) -> list[tuple[int, list[float]]]:
    """Two to five boxes of a picture as category and x, y, width, height."""
    random = np.random.default_rng(_SEED + number)
    found = []
    for _ in range(2 + number % 4):
        w, h = random.uniform(0.1, 0.5) * width, random.uniform(0.1, 0.5) * height
        box = [random.uniform(0, width - w), random.uniform(0, height - h), w, h]
        found.append((int(random.integers(0, 80)), [round(float(value), 1) for value in box]))
    return found


def coco(folder: Path, count: str = "8") -> None:
    """COCO 2017: ``train2017``, ``val2017`` and their instances with boxes and polygons; 80 categories."""
    (folder / "annotations").mkdir(parents=True)
    categories = [{"id": index + 1, "name": f"thing{index}", "supercategory": "thing"} for index in range(80)]
    for part in ("train2017", "val2017"):
        images, annotations = [], []
        for number in range(int(count)):
            height, width = (480, 640) if number % 3 else (640, 427)
            name = f"{number + 1:012d}.jpg"
            _write(folder / part / name, height, width, number)
            images.append({"id": number + 1, "file_name": name, "height": height, "width": width})
            for category, (x, y, w, h) in _boxes(number, height, width):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number + 1,
                        "category_id": category + 1,
                        "bbox": [x, y, w, h],
                        "area": w * h,
                        "iscrowd": 0,
                        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
                    }
                )
        content = {
            "info": {},
            "licenses": [],
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(content), encoding="utf-8")


def captioned_pictures(folder: Path, count: str = "12") -> None:
    """Pictures with a caption each in ``metadata.jsonl``, as ``imagefolder`` reads them."""
    flat_pictures(folder, count)
    rows = [
        {"file_name": f"{number:04d}.png", "text": f"picture number {number}"} for number in range(int(count))
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def captioned_csv(folder: Path, count: str = "32") -> None:
    """Pictures and ``pairs.csv`` with the columns ``filepath`` and ``title``; paths from the folder above."""
    flat_pictures(folder, count)
    lines = ["filepath,title", *(f"pairs/{number:04d}.png,picture {number}" for number in range(int(count)))]
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def pets(folder: Path, count: str = "12") -> None:
    """Pictures named for the breed, as the Oxford pets are: ``breed_number.jpg``."""
    for number in range(int(count)):
        _write(folder / f"{'beagle' if number % 2 else 'bengal'}_{number}.jpg", 260, 300, number)


def yolo(folder: Path, place: str = "", task: str = "detect") -> None:
    """COCO8 as YOLO wants it: pictures, text files of labels, ``data.yaml``; boxes, or polygons for ``segment``."""
    for part, count in (("train", 8), ("val", 4)):
        for number in range(count):
            height, width = (480, 640) if number % 3 else (640, 427)
            _write(folder / "images" / part / f"{number:06d}.jpg", height, width, number)
            lines = []
            for category, (x, y, w, h) in _boxes(number, height, width):
                if task == "segment":
                    corners = (x, y, x + w, y, x + w, y + h, x, y + h)
                    values = [value / (height if index % 2 else width) for index, value in enumerate(corners)]
                else:
                    values = [(x + w / 2) / width, (y + h / 2) / height, w / width, h / height]
                lines.append(" ".join([str(category), *(f"{value:.5f}" for value in values)]))
            labels = folder / "labels" / part / f"{number:06d}.txt"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text("\n".join(lines) + "\n", encoding="utf-8")
    head = f"path: {place}\n" if place else ""
    names = "".join(f"  {index}: thing{index}\n" for index in range(80))
    (folder / "data.yaml").write_text(
        f"{head}train: images/train\nval: images/val\nnames:\n{names}", encoding="utf-8"
    )


def voc(folder: Path, count: str = "8") -> None:
    """VOC 2012 for segmentation: pictures, masks with palette colours 0 to 20, lists."""
    from PIL import Image

    root = folder / "VOCdevkit" / "VOC2012"
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (root / "SegmentationClass").mkdir()
    names = [f"2012_{number:06d}" for number in range(int(count))]
    for number, name in enumerate(names):
        _write(root / "JPEGImages" / f"{name}.jpg", 375, 500, number)
        labels = _disc(375, 500, number) * np.uint8(1 + number % 20)
        mask = Image.fromarray(labels, mode="P")
        mask.putpalette([value for index in range(256) for value in (index, 255 - index, index // 2)])
        mask.save(root / "SegmentationClass" / f"{name}.png")
    for part in ("train", "val", "trainval"):
        (lists / f"{part}.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def blender_scene(folder: Path, side: str = "100") -> None:
    """A scene of pictures with camera poses as NeRF's Blender sets have them."""
    from PIL import Image

    for part, count in (("train", 4), ("val", 2), ("test", 2)):
        frames = []
        for number in range(count):
            picture_ = np.concatenate(
                [_noise(int(side), int(side), number), np.full((int(side), int(side), 1), 255, np.uint8)],
                axis=-1,
            )
            path = folder / part / f"r_{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture_).save(path)
            angle = 2 * np.pi * number / count
            pose = np.eye(4)
            pose[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
            pose[:3, 3] = 4 * pose[:3, 2]
            frames.append(
                {"file_path": f"./{part}/r_{number}", "rotation": 0.1, "transform_matrix": pose.tolist()}
            )
        content = {"camera_angle_x": 0.69, "frames": frames}
        (folder / f"transforms_{part}.json").write_text(json.dumps(content), encoding="utf-8")


MAKERS = (
    mnist,
    keras_mnist,
    cifar10,
    cifar100,
    image_folder,
    flat_pictures,
    picture,
    font,
    masks,
    coco,
    captioned_pictures,
    captioned_csv,
    pets,
    yolo,
    voc,
    blender_scene,
)
