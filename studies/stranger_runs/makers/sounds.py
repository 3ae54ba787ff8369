"""Sounds: mono 16-bit WAV files of a few tones, alone and in the layout of LJSpeech."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from stranger_runs.makers.texts import prose


def _write(path: Path, seconds: float, rate: int, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    time = np.arange(int(seconds * rate)) / rate
    draw = np.random.default_rng(number)
    tones = sum(np.sin(2 * np.pi * draw.uniform(80, 900) * time) for _ in range(4))
    samples = (0.2 * tones * 32767 / 2 + draw.normal(0, 200, len(time))).clip(-32768, 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


def wav(path: Path, seconds: str = "8", rate: str = "16000") -> None:
    """One sound."""
    _write(path, float(seconds), int(rate), 1)


def ljspeech(folder: Path, count: str = "24") -> None:
    """LJSpeech: ``wavs``, ``metadata.csv``; ``training.txt`` and ``validation.txt`` with ``name|text|text``."""
    rows = []
    for number in range(int(count)):
        name = f"LJ001-{number + 1:04d}"
        _write(folder / "wavs" / f"{name}.wav", 1.2 + 0.1 * (number % 8), 22050, number)
        said = " ".join(prose(60, number).replace(":", "").split())
        rows.append(f"{name}|{said}|{said}")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "training.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "validation.txt").write_text("\n".join(rows[:4]) + "\n", encoding="utf-8")


MAKERS = (wav, ljspeech)
