"""Readings of this process and its cards, and who hears of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vramfit
from vramfit.capture.meter_figures import MeterFigures
from vramfit.errors import UsageError, WriteError
from vramfit.record.cpu_recorder import CpuRecorder
from vramfit.units import GIB, MIB
from vramfit.watching import reported_files
from vramfit.watching.card_probe import CardProbe
from vramfit.watching.host_memory import HostProbe, check_process
from vramfit.watching.metric_writers import MetricWriter, scalars_of
from vramfit.watching.process_reporter import OwnReadings, ProcessReporter, report_as_asked
from vramfit.watching.prometheus_page import PrometheusPage
from vramfit.watching.reported_files import ReportedFiles, watched_environment
from vramfit.watching.watch_files import WatchLines, WatchLog
from vramfit.watching.watch_reading import WatchReading
from vramfit.watching.watcher import ProcessWatcher
from watching.fake_nvml import FakeNvml


def own_readings(gpu: vramfit.VirtualGPU) -> OwnReadings:
    return OwnReadings(MeterFigures(gpu.meter, "virtual"))


def trained(steps: int = 2) -> tuple[Any, Any]:
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
    return model, optimizer


def test_figures_of_a_virtual_gpu_are_torchs_own() -> None:
    with vramfit.VirtualGPU("RTX 4090") as gpu:
        readings = own_readings(gpu)
        assert readings.now() is None  # nothing is used
        kept = trained()
        reading = readings.now()
        assert reading is not None and reading.steps == 2 and reading.pid == os.getpid()
        (device,) = reading.devices
        assert device.allocated == torch.cuda.memory_allocated()
        assert device.reserved == torch.cuda.memory_reserved()
        assert device.peak == torch.cuda.max_memory_allocated()
        assert (device.free, device.total) == torch.cuda.mem_get_info()
        assert (device.kind, device.name) == ("virtual", "RTX 4090")
        weights = 4 * (1024 * 1024 + 1024)
        assert device.categories["parameters"] == weights
        assert device.categories["gradients"] == weights
        assert device.categories["optimizer state"] == 2 * weights
        assert sum(device.categories.values()) == device.allocated
        assert device.after_step is not None and 0 < device.after_step <= device.peak
        readings.close()
        del kept


def test_figures_of_the_metered_cpu() -> None:
    recorder = CpuRecorder(budget=GIB)
    recorder.start()
    kept = torch.ones(1024, 1024) + 1
    now = recorder.figures()  # what is dead is given back
    (device,) = recorder.watched_figures().devices(categories=True)
    recorder.stop()
    assert (device.allocated, device.reserved) == (now.allocated, now.reserved)
    assert device.allocated >= kept.nbytes and device.total == GIB and device.free == GIB - device.reserved
    assert device.kind == "metered" and sum(device.categories.values()) == device.allocated


def test_hooks_are_gone_after_a_watch() -> None:
    from torch.optim import optimizer as module

    before = dict(module._global_optimizer_post_hooks)
    with vramfit.watch(every=0.05):
        assert len(module._global_optimizer_post_hooks) == len(before) + 1
    assert dict(module._global_optimizer_post_hooks) == before


def test_categories_of_plain_torch_are_sums_of_what_optimizers_know() -> None:
    from vramfit.watching.torch_figures import REST, StepEnds, TorchFigures

    with vramfit.VirtualGPU("RTX 4090"):
        source = TorchFigures()
        source.ends = StepEnds(source.held)
        kept = trained()
        more = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        (device,) = source.devices(categories=True)
        source.ends.close()
        weights = 4 * (1024 * 1024 + 1024)
        assert device.categories["parameters"] == weights
        assert device.categories["optimizer state"] == 2 * weights
        assert sum(device.categories.values()) == device.allocated == torch.cuda.memory_allocated()
        assert device.categories[REST] >= more.nbytes
        assert source.ends.steps == 2 and set(source.ends.after) == {0}
        del kept


def test_a_reporter_writes_whole_lines_and_stops(tmp_path: Path) -> None:
    with vramfit.VirtualGPU("8GiB", writes="real") as gpu:
        reporter = ProcessReporter(tmp_path, 0.02, MeterFigures(gpu.meter, "virtual")).start()
        kept = trained()
        reporter.stop()
        del kept
    files = ReportedFiles(tmp_path)
    (reading,) = files.latest()
    assert reading.steps == 2 and reading.devices[0].allocated > 16 * MIB
    with open(tmp_path / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as stream:
        stream.write('{"time": 1')  # killed in the middle of a line
    assert files.latest() == (reading,)
    (tmp_path / "4000000.jsonl").write_text(
        json.dumps({"time": 1.0, "pid": 4_000_000, "steps": 1, "devices": []}) + "\n"
    )
    assert files.latest() == (reading,)  # that process has ended
    assert [one.pid for one in files.last()] == sorted([os.getpid(), 4_000_000])


def test_a_file_of_readings_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported_files, "_LARGE", 1000)
    path, files = tmp_path / f"{os.getpid()}.jsonl", ReportedFiles(tmp_path)
    with open(path, "a", encoding="utf-8") as stream:  # as the reporter has it open
        for step in range(100):
            line = json.dumps({"time": float(step), "pid": os.getpid(), "steps": step, "devices": []})
            stream.write(line + "\n" + line[: 10 * (step % 2)])
            stream.flush()
            (reading,) = files.latest()
            assert reading.steps == step
            if step % 2:
                stream.write(line[10:] + "\n")
                stream.flush()
            assert path.stat().st_size < 1300


def test_a_look_that_fails_is_left_out_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    watcher = ProcessWatcher(os.getpid(), programs=lambda: [1 / 0])  # type: ignore[list-item]
    for _ in range(2):
        found = watcher.look()
        assert found is not None and found.programs == () and found.host is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_program_does_not_notice_that_a_look_fails(tmp_path: Path) -> None:
    class Broken:
        def held(self) -> dict[int, tuple[int, int]]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def devices(self, *, categories: bool) -> Any:
            return self.held()

    readings = OwnReadings(Broken())
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=1.0).step()
    assert float(weight.detach()) == -1.0
    readings.close()
    reporter = ProcessReporter(tmp_path, 0.01, Broken()).start()
    reporter.stop()
    assert reporter.count == 0 and not reporter._thread.is_alive()


def test_a_command_finds_its_reporter_and_its_own_sitecustomize(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.own_site = 5\n")
    folder = tmp_path / "watch"
    folder.mkdir()
    paths = os.pathsep.join([str(own), os.environ.get("PYTHONPATH", "")])
    environ = watched_environment(folder, 0.1, {**os.environ, "PYTHONPATH": paths})
    line = "import threading; print(own_site, [t.name for t in threading.enumerate()])"
    out = subprocess.run(
        [sys.executable, "-c", line], env=environ, capture_output=True, text=True, check=True
    )
    assert out.stdout == "5 ['MainThread', 'vramfit-watch']\n" and out.stderr == ""
    alone = subprocess.run(
        [sys.executable, "-I", "-c", "print(1)"], env=environ, capture_output=True, text=True, check=True
    )
    assert (alone.stdout, alone.stderr) == ("1\n", "")


def test_a_card_its_process_and_its_neighbours() -> None:
    probe = CardProbe(FakeNvml(os.getpid()))
    (card,) = probe.look([os.getpid()])
    assert (card.total, card.used, card.free, card.own) == (80 * GIB, 30 * GIB, 50 * GIB, 10 * GIB)
    assert (card.temperature, card.watts, card.watts_limit) == (61, 312.5, 700.0)
    (other,) = card.neighbours
    assert (other.pid, other.used, other.name) == (4_000_000, 19 * GIB, "/usr/bin/other")


def test_a_card_that_tells_little() -> None:
    (card,) = CardProbe(FakeNvml(os.getpid(), hidden=True, sensors=False)).look([os.getpid()])
    assert card.own is None and card.temperature is None and card.watts is None


def test_host_memory_of_a_process_and_its_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(64 << 20); input()"], stdin=subprocess.PIPE
    ) as child:
        probe = HostProbe(os.getpid())
        use = probe.look()
        while use is None or child.pid not in set(probe.family()):
            use = probe.look()
        use = probe.look()
        assert use is not None and use.processes >= 2
        assert 0 < use.resident < use.total and 0 < use.available <= use.total
        assert "python" in check_process(child.pid)
        assert child.stdin is not None
        child.stdin.close()
    assert HostProbe(child.pid).look() is None
    with pytest.raises(UsageError, match=f"there is no process {child.pid}"):
        check_process(child.pid)


class FakePsutil:
    """psutil where a process has two children, of which one has just ended."""

    class Error(Exception):
        pass

    class NoSuchProcess(Error):
        pass

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid
            if pid == 404:
                raise FakePsutil.NoSuchProcess

        def children(self, *, recursive: bool) -> list[Any]:
            return [FakePsutil.Process(self.pid + 1), FakePsutil.Process(self.pid + 2)]

        def memory_info(self) -> Any:
            if self.pid == 12:
                raise FakePsutil.NoSuchProcess
            return SimpleNamespace(rss=100 * self.pid)

    @staticmethod
    def virtual_memory() -> Any:
        return SimpleNamespace(available=5, total=9)


def test_without_proc_a_child_that_ends_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", FakePsutil)
    use = HostProbe(10, tmp_path).look()
    assert use is not None and (use.resident, use.processes, use.available) == (1000 + 1100, 2, 5)
    assert HostProbe(404, tmp_path).look() is None


def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(UsageError, match="there is no process"):
        check_process(child.pid)
    assert HostProbe(child.pid).look() is None
    child.communicate()


def full_reading(share: float = 0.5) -> WatchReading:
    watcher = ProcessWatcher(os.getpid(), cards=CardProbe(FakeNvml(os.getpid())))
    with vramfit.VirtualGPU("8GiB") as gpu:
        readings = own_readings(gpu)
        kept = trained()
        program = readings.now()
        readings.close()
        del kept
    assert program is not None
    watcher._programs = lambda: (program,)
    found = watcher.look()
    watcher.close()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def reading() -> WatchReading:
    return full_reading()


def test_thresholds_call_once_until_the_share_has_fallen(caplog: pytest.LogCaptureFixture) -> None:
    watcher, heard = ProcessWatcher(os.getpid()), []
    watcher.on_threshold(0.5, heard.append)
    watcher.on_threshold(0.9, lambda _: 1 / 0)
    shares = [0.4, 0.5, 0.7, 0.49, 0.51, 0.95, 0.96, 0.2, 0.6]
    for share in shares:
        watcher._check(SimpleNamespace(share=share))  # type: ignore[arg-type]
    assert [one.share for one in heard] == [0.5, 0.6]
    assert caplog.text.count("a callback of the threshold 90 % failed") == 1


def test_a_sink_that_fails_is_left_out_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []
    watcher = ProcessWatcher(os.getpid(), sinks=[MetricWriter(lambda _: 1 / 0), MetricWriter(heard.append)])
    assert watcher.look() is not None and watcher.look() is not None
    watcher.close()
    assert len(heard) == 2 and caplog.text.count("is told no more") == 1


def test_children_of_ours_start_their_own_reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAMFIT_WATCH_FOLDER", str(tmp_path))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-P", "-m", "vramfit.virtual.virtual_child", "job"])
    assert report_as_asked() is None
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    reporter = report_as_asked()
    assert reporter is not None
    reporter.stop()
    monkeypatch.setenv("VRAMFIT_WATCH_FOLDER", str(tmp_path / "gone"))
    assert report_as_asked() is None


def test_json_lines_are_whole_documents(tmp_path: Path, reading: WatchReading) -> None:
    sink = WatchLines(tmp_path / "watch.jsonl")
    sink.take(reading)
    sink.take(reading)
    sink.close()
    one, two = (json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines())
    assert one == two and one["schema"] == "vramfit.watch/1"
    assert one["programs"][0]["devices"][0]["allocated"] == reading.programs[0].devices[0].allocated
    assert one["cards"][0]["neighbours"][0]["used"] == 19 * GIB
    assert one["share"] == reading.share == pytest.approx(max(30 / 80, reading.share))


def test_a_log_has_lines_and_summaries(tmp_path: Path, reading: WatchReading) -> None:
    from dataclasses import replace

    log = WatchLog(tmp_path / "log", line_every=10, summary_every=60)
    for second in range(0, 100, 5):
        log.take(replace(reading, elapsed=float(second)))
    log.close()
    text = (tmp_path / "log").read_text()
    assert text.count("summary of process") == 3  # at 0, at 60, and at the end
    assert text.count("cuda:0 32.27 MiB allocated, 62.00 MiB reserved of 8.00 GiB  host") == 8, text
    assert (
        "card 0 (NVIDIA H100 80GB HBM3): 30.00 GiB of 80.00 GiB used, 10.00 GiB of the process, 61 °C, 312 of 700 W"
        in text
    )
    assert "19.00 GiB of process 4000000 (/usr/bin/other)" in text
    assert text.endswith("the watch has ended\n")


def test_a_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(WriteError):
        WatchLog(tmp_path / "none" / "log")


def test_prometheus_own_parser_reads_the_metrics(reading: WatchReading) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    page = PrometheusPage(0)
    try:
        page.take(reading)
        address = f"http://127.0.0.1:{page.port}/metrics"
        text = urllib.request.urlopen(address, timeout=10).read().decode()
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{page.port}"):
            PrometheusPage(page.port)
    finally:
        page.close()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    (device,) = reading.programs[0].devices
    (sample,) = families["vramfit_allocated_bytes"].samples
    assert sample.value == device.allocated
    assert sample.labels == {"pid": str(os.getpid()), "device": "cuda:0", "name": device.name}
    assert families["vramfit_steps"].type == "counter" and families["vramfit_steps"].samples[0].value == 2
    sums = {one.labels["category"]: one.value for one in families["vramfit_category_bytes"].samples}
    assert sums == device.categories
    assert families["vramfit_card_temperature_celsius"].samples[0].value == 61
    assert families["vramfit_card_power_watts"].samples[0].value == 312.5
    assert families["vramfit_neighbour_bytes"].samples[0].value == 19 * GIB
    assert families["vramfit_host_resident_bytes"].samples[0].value == reading.host.resident


def test_without_prometheus_client_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"pip install 'vramfit\[watch\]'"):
        PrometheusPage(0)


class Writer:
    """Hears as TensorBoard's, MLflow's or wandb's do."""

    def __init__(self, name: str) -> None:
        self.heard: list[Any] = []
        setattr(self, name, lambda *given, **named: self.heard.append((given, named)))


def test_writers_get_numbers_as_they_take_them(reading: WatchReading) -> None:
    values = scalars_of(reading)
    allocated = float(reading.programs[0].devices[0].allocated)
    assert values["vram/cuda0/allocated"] == allocated
    tensorboard, mlflow, wandb = Writer("add_scalar"), Writer("log_metric"), Writer("log")
    plain: list[dict[str, float]] = []
    for writer in (tensorboard, mlflow, wandb, plain.append):
        MetricWriter(writer).take(reading)
    assert (("vram/cuda0/allocated", allocated, 2), {}) in tensorboard.heard
    assert (("vram/cuda0/allocated", allocated), {"step": 2}) in mlflow.heard
    assert wandb.heard == [(({**values, "vram/step": 2.0},), {})]
    assert plain == [values]
    with pytest.raises(UsageError, match="int is no writer of metrics"):
        MetricWriter(3)


def test_tensorboards_own_writer_takes_them(tmp_path: Path, reading: WatchReading) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(tmp_path)
    MetricWriter(writer).take(reading)
    writer.close()
    assert list(tmp_path.iterdir())


def test_watch_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no process 4194305"):
        vramfit.watch(4_194_305)
    with pytest.raises(UsageError, match="thresholds="):
        vramfit.watch(thresholds={1.5: print})
    with pytest.raises(UsageError, match="is no writer"):
        vramfit.watch(log=tmp_path / "log", writer=3)
    assert not (tmp_path / "log").exists()
