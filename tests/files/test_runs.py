"""Runs as users start them: what is kept, what is refused, and checkpoints of the size that a card's would have."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.files.planted import picture
from torch import nn

from vramfit.virtual.gpu import VirtualGPU

PROGRAM = """
import os, signal, torch
torch.save(torch.nn.Linear(64, 64).cuda().state_dict(), "best.pt")
os.makedirs("out")
os.rename("kept.txt", "out/renamed.txt")
open("through.txt", "w").write("real")
os.kill(os.getpid(), signal.SIGKILL)
"""


def cli(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vramfit", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_a_killed_run_keeps_what_it_wrote_and_tells(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for name in ("best.pt", "kept.txt"):
        (tmp_path / name).write_text("real")
    before = picture(tmp_path)
    options = ("--gpu", "24GiB", "--writes", "keep", "--writes-through", "through.txt", "--json", "-")
    done = cli("run", *options, "program.py", cwd=tmp_path)
    assert done.returncode == 137, done.stderr
    files = json.loads(done.stdout)["files"]
    kept = Path(files["kept_at"])
    assert kept.parent == tmp_path and files["writes"] == "keep"
    assert {(Path(c["path"]).name, c["change"]) for c in files["changes"]} == {
        ("best.pt", "replaced"),
        ("kept.txt", "deleted"),
        ("out", "folder"),
        ("renamed.txt", "written"),
    }
    saved = kept / (tmp_path / "best.pt").relative_to("/")
    assert saved.stat().st_size > 64 * 64 * 4
    assert torch.load(saved, map_location="cpu")["weight"].shape == (64, 64), "it loads without us, as zeros"
    after = picture(tmp_path)
    assert (tmp_path / "through.txt").read_text() == "real"
    assert all(after[name] == before[name] for name in before if name != "."), "real files are as before"


@pytest.mark.parametrize("option", [("--writes", "keep"), ("--writes-through", "x")])
@pytest.mark.parametrize("device", [("--device", "cpu"), ()])
def test_a_recording_refuses_them(option: tuple[str, ...], device: tuple[str, ...], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from vramfit.cli import app

    script = tmp_path / "script.py"
    script.write_text("pass")
    done = CliRunner().invoke(app, ["run", *option, *device, str(script)])
    assert done.exit_code == 2 or f"{option[0]} is for a virtual GPU" in str(done.exception)
    assert done.exception is not None


# -- sizes, beside torch's and safetensors' own on the CPU ---------------------------------------------------------


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets torch.save write tensors of the CPU with the location that those of a card have."""
    # A new text each time, as in torch/serialization.py (_backend_tag): pickle writes each anew.
    return lambda: monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:" + str(0))


def models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    yield "linear", lambda: nn.Linear(300, 200)
    yield "norm", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    yield "tied", tied
    yield "half", lambda: nn.Linear(33, 7).to(torch.bfloat16)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("name", "make"), list(models()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_checkpoint_has_the_size_that_it_would_have(
    name: str, make: Callable[[], nn.Module], tmp_path: Path, on_a_card: Callable[[], None]
) -> None:
    path = tmp_path / f"{name}.pt"
    sizes = {}
    with VirtualGPU("RTX 4090"):
        model = make().cuda()
        for what, obj in objects(model).items():
            torch.save(obj, path)
            buffer = io.BytesIO()
            torch.save(obj, buffer)
            sizes[what] = os.path.getsize(path), len(buffer.getvalue())
    assert not path.exists()
    on_a_card()
    for what, obj in objects(make()).items():
        torch.save(obj, path)
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        assert sizes[what] == (path.stat().st_size, len(buffer.getvalue())), what


def objects(model: nn.Module) -> dict[str, Any]:
    return {"state": model.state_dict(), "whole": model, "list": [*model.parameters(), 3, "text"]}


def test_a_safetensors_file_is_the_same_but_for_its_values(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    path = tmp_path / "m.safetensors"

    def tensors(device: str) -> dict[str, torch.Tensor]:
        types = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.uint8)
        return {f"t.{i}": torch.zeros(i + 2, 37, dtype=kind, device=device) for i, kind in enumerate(types)}

    with VirtualGPU("RTX 4090"):
        library.save_file(tensors("cuda"), path, metadata={"format": "pt"})
        written = path.read_bytes()
    library.save_file(tensors("cpu"), path, metadata={"format": "pt"})
    real = path.read_bytes()
    assert len(written) == len(real)
    differing = [i for i, (one, other) in enumerate(zip(written, real, strict=True)) if one != other]
    assert differing[-1] - differing[0] < 48, "nothing but the token"
