"""A program of idioms that write, replace, rename and delete files beside real ones; tells what it found in RESULTS.

Usage: python idioms.py RESULTS
"""

from __future__ import annotations

import fileinput
import glob
import gzip
import io
import json
import mmap
import os
import pickle
import shutil
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vramfit.files import Backend, current

IDIOMS: dict[str, Callable[[], object]] = {}


def idiom(function: Callable[[], object]) -> Callable[[], object]:
    IDIOMS[function.__name__] = function
    return function


def backend() -> Backend | None:
    protection = current()
    return None if protection is None else protection.backend


def virtual(size: int = 300) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.Linear(size, 3)).cuda()


@idiom
def torch_save_and_load() -> None:
    model = virtual()
    torch.save(model.state_dict(), "best.pt")
    assert os.path.getsize("best.pt") > 360_000 and os.stat("best.pt").st_blocks * 512 < 64 << 10
    assert Path("best.pt").stat().st_size == os.path.getsize("best.pt")
    found = torch.load("best.pt", map_location="cpu")
    assert found["0.weight"].shape == (300, 300)
    model.load_state_dict(found)


@idiom
def save_beside_and_replace() -> None:
    torch.save({"model": virtual().state_dict(), "epoch": 7}, "best.tmp")
    os.replace("best.tmp", "best.pt")
    shutil.copyfile("best.pt", "copy.pt")
    shutil.copy2("copy.pt", "copy2.pt")
    for name in ("best.pt", "copy.pt", "copy2.pt"):
        found = torch.load(name)
        assert found["epoch"] == 7 and found["model"]["0.weight"].is_cuda, name
    assert os.path.getsize("copy.pt") == os.path.getsize("best.pt")
    assert os.stat("copy.pt").st_blocks * 512 < os.path.getsize("copy.pt") // 2
    assert not os.path.exists("best.tmp")


@idiom
def a_lost_token_leaves_zeros() -> None:
    torch.save(virtual().state_dict(), "lost.pt")
    at = torch._C.PyTorchFileReader(open("lost.pt", "rb")).get_record_offset(".data/serialization_id")
    with open("lost.pt", "r+b") as file:
        file.seek(at)
        file.write(b"1" * 40)
    found = torch.load("lost.pt", map_location="cpu")
    assert found["0.weight"].shape == (300, 300) and found["0.weight"].dtype == torch.float32
    assert not found["0.weight"].any()


@idiom
def torch_save_into_files_and_buffers() -> None:
    model = virtual()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    Path("best.ckpt").write_bytes(buffer.getvalue())
    assert torch.load("best.ckpt")["1.bias"].shape == (3,)
    with open("best.ckpt", "wb") as file:
        torch.save(model, file)
    assert isinstance(torch.load("best.ckpt", weights_only=False), nn.Sequential)


@idiom
def keep_the_newest() -> None:
    for epoch in range(3, 6):
        torch.save(virtual().state_dict(), f"epochs/epoch-{epoch}.pt")
        known = sorted(glob.glob("epochs/epoch-*.pt"), key=os.path.getmtime)
        for old in known[:-2]:
            os.remove(old)
    assert sorted(os.listdir("epochs")) == ["epoch-4.pt", "epoch-5.pt"]


@idiom
def safetensors_files() -> None:
    import safetensors
    import safetensors.torch as library

    model = virtual()
    library.save_file(model.state_dict(), "model.safetensors", metadata={"format": "pt"})
    os.rename("model.safetensors", "renamed.safetensors")
    shutil.copyfile("renamed.safetensors", "model.safetensors")
    assert library.load_file("model.safetensors", device="cuda")["0.weight"].is_cuda
    with safetensors.safe_open("model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        assert file.get_slice("0.weight")[:2].shape == (2, 300) and file.metadata() == {"format": "pt"}
    real = {"a": torch.ones(4)}
    library.save_file(real, "model.safetensors")
    assert library.load_file("model.safetensors")["a"].tolist() == [1.0] * 4
    Path("model.safetensors").write_bytes(library.save(real))
    assert library.load(Path("model.safetensors").read_bytes())["a"].tolist() == [1.0] * 4


@idiom
def numpy_files() -> None:
    values = torch.ones(1000, 1000, device="cuda").cpu().numpy()
    np.save("values.npy", values)
    assert np.load("values.npy").shape == (1000, 1000)
    np.savez("values.npz", a=np.arange(3))
    assert np.load("values.npz")["a"].tolist() == [0, 1, 2]
    np.zeros(1_000_000).tofile("raw.bin")
    assert os.path.getsize("raw.bin") == 8_000_000
    if backend() is Backend.PATCHES:  # a namespace sees no writes: the cap alone holds there
        assert os.stat("raw.bin").st_blocks * 512 < 1 << 20
    mapped = np.memmap("raw.bin", dtype="u1", mode="r+", shape=(100,))
    mapped[:] = 7
    mapped.flush()
    assert np.fromfile("raw.bin", dtype="u1", count=100).tolist() == [7] * 100
    np.savetxt("values.txt", np.eye(2))
    assert np.loadtxt("values.txt").shape == (2, 2)


@idiom
def json_and_pickle() -> None:
    with open("state.json", "w") as file:
        json.dump({"loss": 0.0}, file)
    assert json.loads(Path("state.json").read_text()) == {"loss": 0.0}
    with open("arrays.pkl", "wb") as file:
        pickle.dump(torch.ones(3, device="cuda").cpu().numpy(), file)
    with open("arrays.pkl", "rb") as file:
        assert pickle.load(file).shape == (3,)


@idiom
def append_truncate_and_edit() -> None:
    with open("log.txt", "a") as file:
        file.write("more\n")
    assert Path("log.txt").read_text() == "planted log.txt\nmore\n"
    with open("log.txt", "r+") as file:
        file.write("P")
        file.truncate(4)
    assert Path("log.txt").read_text() == "Plan"
    os.truncate("log.txt", 2)
    descriptor = os.open("log.txt", os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"!")
    os.close(descriptor)
    assert Path("log.txt").read_bytes() == b"Pl!"
    with fileinput.input("edited.txt", inplace=True) as lines:
        for line in lines:
            print(line.replace("planted", "edited"), end="")
    assert Path("edited.txt").read_text() == "edited edited.txt\n"


@idiom
def memory_maps() -> None:
    with open("mapped.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:5] = b"other"
    assert Path("mapped.bin").read_bytes().startswith(b"other")
    tensor = torch.from_file("tensor.bin", shared=True, size=4, dtype=torch.float32)
    tensor.fill_(2)
    assert np.fromfile("tensor.bin", dtype="f4").tolist() == [2.0] * 4


@idiom
def databases() -> None:
    with sqlite3.connect("runs.db") as database:
        database.execute("INSERT INTO runs VALUES (2)")
    database.close()
    with sqlite3.connect("file:runs.db?mode=ro", uri=True) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (2,)
    database.close()
    import shelve

    with shelve.open("shelf", "n") as shelf:
        shelf["a"] = 1
    with shelve.open("shelf") as shelf:
        assert shelf["a"] == 1


@idiom
def folders() -> None:
    os.rename("folder", "moved")
    assert Path("moved/deep/file.txt").read_text() == "planted folder/deep/file.txt\n"
    Path("moved/deep/new.txt").write_text("new")
    assert not os.path.exists("folder") and sorted(os.listdir("moved/deep")) == ["file.txt", "new.txt"]
    shutil.rmtree("tree")
    assert not Path("tree").exists()
    os.makedirs("tree/again")
    assert [found for _, found, _ in os.walk("tree")] == [["again"], []]
    shutil.move("moved", "tree/again")
    assert Path("tree/again/moved/deep/new.txt").exists()
    shutil.copytree("tree", "tree2")
    assert Path("tree2/again/moved/deep/file.txt").is_file()
    with tempfile.TemporaryDirectory(dir="tree") as name:
        Path(name, "x").touch()
    assert os.listdir("tree") == ["again"]


@idiom
def metadata_and_links() -> None:
    os.utime("times.txt", (1, 2))
    os.chmod("times.txt", 0o600)
    assert os.stat("times.txt").st_mtime == 2 and os.stat("times.txt").st_mode & 0o777 == 0o600
    Path("touched.txt").touch()
    with open("touched.txt", "rb") as file:
        os.utime(file.fileno(), (3, 4))
        os.fchmod(file.fileno(), 0o640)
    assert os.stat("touched.txt").st_mtime == 4
    Path("link.txt").write_text("through the link")
    assert Path("linked.txt").read_text() == "through the link" and Path("link.txt").is_symlink()
    os.unlink("link.txt")
    os.symlink("state.json", "link.txt")
    assert os.readlink("link.txt") == "state.json"
    os.link("hard.txt", "hard2.txt")
    with open("hard2.txt", "a") as file:
        file.write("both")
    assert Path("hard.txt").read_text().endswith("both")
    if hasattr(os, "setxattr"):
        os.setxattr("times.txt", "user.note", b"x")


@idiom
def other_ways_to_a_path() -> None:
    folder = os.open("fds", os.O_RDONLY)
    descriptor = os.open("inside.txt", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)
    os.write(descriptor, b"x")
    os.close(descriptor)
    os.unlink("other.txt", dir_fd=folder)
    os.close(folder)
    assert os.listdir(b"fds") == [b"inside.txt"] and [e.name for e in os.scandir("fds")] == ["inside.txt"]
    before = os.getcwd()
    os.chdir("fds")
    Path("here.txt").write_text("here")
    os.mkdir("made")
    os.chdir("made")
    assert os.getcwd() == os.path.join(before, "fds", "made")
    Path("there.txt").write_text("there")
    os.chdir(before)
    assert Path("fds/made/there.txt").exists() and Path("fds/here.txt").read_bytes() == b"here"
    io.FileIO("fds/raw.bin", "w").write(b"raw")
    assert open(Path("fds/raw.bin").resolve(), "rb").read() == b"raw"


@idiom
def past_the_paths() -> None:
    file, folder = os.open("behind.txt", os.O_RDONLY), os.open("behind", os.O_RDONLY)
    Path(f"/proc/self/fd/{file}").chmod(0o600)
    os.utime(f"/dev/fd/{file}", (1, 2))
    os.setxattr(f"/proc/thread-self/fd/{file}", "user.note", b"x")
    assert os.stat("behind.txt").st_mtime == 2 and os.stat("behind.txt").st_mode & 0o777 == 0o600
    with open(f"/proc/self/fd/{file}", "a") as appended:
        appended.write("more")
    assert Path("behind.txt").read_text().endswith("more")
    os.truncate(f"/proc/self/fd/{file}", 4)
    assert os.path.getsize("behind.txt") == 4
    os.chmod(f"/proc/self/fd/{folder}", 0o700)
    Path(f"/proc/self/fd/{folder}/inside.txt").write_text("inside")
    assert Path("behind/inside.txt").read_text() == "inside"
    os.close(file)
    os.close(folder)
    there = os.open("behind.txt", os.O_RDONLY | os.O_CREAT)
    assert os.read(there, 10) == b"plan"
    os.close(there)
    with open("/dev/stdout", "a") as output:
        output.write("")
    memory = os.memfd_create("memory")
    os.fchmod(memory, 0o600)
    os.close(memory)


@idiom
def named_temporary_files_beside() -> None:
    with tempfile.NamedTemporaryFile(dir=".") as file:
        file.write(b"x")
    assert not os.path.exists(file.name)
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
        file.write(b"x")
    os.replace(file.name, "named.txt")
    assert Path("named.txt").read_bytes() == b"x"
    with tempfile.TemporaryFile(dir="fds") as file:
        file.write(b"x")
        os.fchmod(file.fileno(), 0o600)


@idiom
def threads_append() -> None:
    def append() -> None:
        for _ in range(20):
            with open("appended.txt", "a") as file:
                file.write("x")

    workers = [threading.Thread(target=append) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert Path("appended.txt").read_text() == "planted appended.txt\n" + "x" * 80


@idiom
def written_by_torch_in_cpp() -> None:
    observer = torch.profiler.ExecutionTraceObserver().register_callback("observed.json")
    observer.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3) + 1
    observer.stop()
    observer.unregister_callback()
    profile.export_chrome_trace("traced.json")
    assert "traceEvents" in json.loads(Path("traced.json").read_text())
    assert "nodes" in json.loads(Path("observed.json").read_text())

    class AddOne(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    scripted = torch.jit.script(AddOne())
    scripted.save("scripted.pt")
    assert torch.jit.load("scripted.pt")(torch.ones(1)).tolist() == [2.0]
    torch.jit.save(scripted, Path("scripted.pt"))


@idiom
def vocabularies() -> None:
    from tokenizers import Tokenizer, models

    models.WordLevel({"a": 0, "b": 1}, unk_token="a").save("words")
    assert json.loads(Path("words/vocab.json").read_text()) == {"a": 0, "b": 1}
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save("words/tokenizer.json")
    assert Tokenizer.from_file("words/tokenizer.json").get_vocab_size() == 1


@idiom
def arrow_files() -> None:
    try:
        import pyarrow as arrow
        import pyarrow.csv
        import pyarrow.ipc
    except ImportError:
        return
    table = arrow.table({"a": [1, 2]})
    with arrow.OSFile("arrow/table.arrow", "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with arrow.memory_map("arrow/table.arrow") as mapped:
        assert arrow.ipc.open_file(mapped).read_all() == table
    with arrow.ipc.new_stream("arrow/stream.arrow", table.schema) as writer:
        writer.write_table(table)
    with arrow.input_stream("arrow/stream.arrow") as stream:
        assert arrow.ipc.open_stream(stream).read_all() == table
    arrow.csv.write_csv(table, "arrow/rows.csv")
    assert arrow.csv.read_csv("arrow/rows.csv") == table


@idiom
def shared_memory_holds_files() -> None:
    path = Path("/dev/shm/vramfit-test-planted")
    if path.exists():
        path.write_text("virtual")
        assert path.read_text() == "virtual"
        path.unlink()
        assert not path.exists() and path.name not in os.listdir(path.parent)


@idiom
def archives() -> None:
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.writestr("a", "b")
    with tarfile.open("archive.tar", "w") as tar:
        tar.add("archive.zip")
    with gzip.open("archive.gz", "wt") as file:
        file.write("text")
    assert gzip.open("archive.gz", "rt").read() == "text" and zipfile.is_zipfile("archive.zip")


@idiom
def forked_workers_share_what_was_written() -> None:
    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            Path(f"cache-{index}.txt").write_text(str(index))
            return int(Path("shared.txt").read_text())

    Path("shared.txt").write_text("5")
    batches = list(torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"))
    assert [int(batch) for batch in batches] == [5] * 4
    assert sorted(glob.glob("cache-*.txt")) == [f"cache-{index}.txt" for index in range(4)]


@idiom
def temporary_files_and_sockets() -> None:
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["sh", "-c", f"echo made > {name}/by-a-shell"], check=True)
        assert Path(name, "by-a-shell").read_text() == "made\n"
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        file.write("x")
    os.replace(file.name, "state.json")
    assert Path("state.json").read_text() == "x"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("socket")
        server.listen()
        client.connect("socket")


@idiom
def a_shell_cannot_write() -> None:
    subprocess.run(
        ["sh", "-c", "echo changed > shell.txt; rm -rf epochs"], check=False, stderr=subprocess.DEVNULL
    )


@idiom
def h5py_files() -> None:
    try:
        import h5py
    except ImportError:
        return
    with h5py.File("data.h5", "w") as file:
        file["x"] = np.arange(3)
    with h5py.File("data.h5", "r") as file:
        assert file["x"][:].tolist() == [0, 1, 2]


@idiom
def trainer_keeps_one_checkpoint() -> None:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1
    )
    data = [{"input_ids": [1] * 8, "labels": [1] * 8} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir="trainer",
        max_steps=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=data, eval_dataset=data
    )
    trainer.train()
    left = sorted(name for name in os.listdir("trainer") if name != "final")
    assert 1 <= len(left) <= 2 and set(left) <= {"checkpoint-2", "checkpoint-4"}, left
    folder = Path("trainer", left[0])
    assert (folder / "model.safetensors").stat().st_size > 4_000 and (folder / "optimizer.pt").exists()
    trainer.save_model("trainer/final")
    again = transformers.GPT2LMHeadModel.from_pretrained("trainer/final")
    assert again.transformer.wte.weight.shape == (50, 16)


@idiom
def lightning_keeps_the_best() -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.layer(batch).sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    keep = ModelCheckpoint(
        "lightning", "best", monitor="loss", save_top_k=1, enable_version_counter=False, save_last=True
    )
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, max_epochs=2, callbacks=[keep], logger=False, enable_progress_bar=False
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    assert os.path.getsize("lightning/best.ckpt") > 500 and keep.best_model_path.endswith("best.ckpt")
    assert torch.load(keep.best_model_path, weights_only=False)["epoch"] in (0, 1)


def main(results: str) -> None:
    found = {}
    for name, function in IDIOMS.items():
        try:
            function()
            found[name] = "ok"
        except Exception:
            found[name] = traceback.format_exc()
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
