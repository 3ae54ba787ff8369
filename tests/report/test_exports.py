"""Files that other programs read: checked by what their formats say, and by the figures of the analysis."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from analysis.synthetic import Recorder, fitting_run, oom_run
from report.golden_files import check_golden
from vramfit.analysis import curves, lifetimes, peak, timeline, verdict
from vramfit.errors import EnvironmentUnfitError
from vramfit.report import perfetto
from vramfit.report.drawing import to_png, to_svg
from vramfit.report.html.page import run_summary, trace_summary
from vramfit.report.perfetto import write_perfetto
from vramfit.report.table_file import write_csv
from vramfit.report.timeline_picture import COLOURS, draw_timeline
from vramfit.trace import Category, EventKind, MemoryTrace, TraceBuilder, read_any
from vramfit.units import MIB

RECORDINGS = Path(__file__).parents[1] / "data/traces"
EVIL = "</script><img src=x onerror=alert(1)>"


def small() -> MemoryTrace:
    recorder = Recorder()
    recorder.phase("step 0/forward")
    kept = recorder.alloc("float32[1048576]", 4 * MIB, Category.PARAMETERS, module="Net.a")
    gone = recorder.alloc("float32[2097152]", 8 * MIB, Category.ACTIVATIONS, module="Net.b")
    recorder.phase("step 0/backward")
    recorder.free(gone)
    recorder.alloc("=1+1", 2 * MIB, Category.TEMPORARIES)
    recorder.oom(1 << 40)
    recorder.free(kept)
    return recorder.finish()


class TestPerfetto:
    """Against the document "Trace Event Format" of the Chromium project."""

    @staticmethod
    def written(trace: MemoryTrace, folder: Path) -> dict[str, Any]:
        path = folder / "trace.perfetto.json"
        write_perfetto(trace, path)
        found = json.loads(path.read_text())
        assert isinstance(found, dict)
        return found

    @pytest.mark.parametrize("name", ["expandable-3gpu-oom", "eor-nn"])
    def test_every_event_has_what_its_kind_needs(self, tmp_path: Path, name: str) -> None:
        found = self.written(read_any(RECORDINGS / f"{name}.json.gz"), tmp_path)
        assert found["displayTimeUnit"] in ("ms", "ns")
        needed = {
            "M": {"name", "pid", "args"},
            "C": {"name", "pid", "ts", "args"},
            "X": {"name", "pid", "tid", "ts", "dur"},
            "i": {"name", "pid", "tid", "ts", "s"},
            "b": {"name", "cat", "id", "pid", "ts"},
            "e": {"name", "cat", "id", "pid", "ts"},
        }
        for event in found["traceEvents"]:
            assert needed[event["ph"]] <= event.keys()
            assert event.get("ts", 0) >= 0
            assert event.get("dur", 0) >= 0
        kinds = Counter(event["ph"] for event in found["traceEvents"])
        assert kinds["b"] == kinds["e"] > 0

    def test_slices_begin_before_they_end_and_have_identifiers_of_their_own(self, tmp_path: Path) -> None:
        events = self.written(read_any(RECORDINGS / "expandable-3gpu-oom.json.gz"), tmp_path)["traceEvents"]
        begins = {event["id"]: event for event in events if event["ph"] == "b"}
        ends = {event["id"]: event for event in events if event["ph"] == "e"}
        assert begins.keys() == ends.keys()
        assert len(begins) == sum(event["ph"] == "b" for event in events)
        assert all(ends[name]["ts"] >= begins[name]["ts"] for name in begins)

    def test_counters_have_the_sums_of_the_analysis(self, tmp_path: Path) -> None:
        run = fitting_run()
        events = self.written(run.trace, tmp_path)["traceEvents"]
        counted = [event["args"] for event in events if event["name"] == "allocated bytes by category"]
        assert max(sum(args.values()) for args in counted) == peak(run.trace).allocated
        reserved = max(event["args"]["reserved"] for event in events if event["name"] == "reserved bytes")
        assert reserved == int(timeline(run.trace).reserved.max())

    def test_blocks_phases_and_failures(self, tmp_path: Path) -> None:
        events = self.written(small(), tmp_path)["traceEvents"]
        begins = [event for event in events if event["ph"] == "b"]
        assert [event["args"]["bytes"] for event in begins] == [4 * MIB, 8 * MIB, 2 * MIB]
        assert begins[1]["args"]["module"] == "Net.b"
        assert [event["name"] for event in events if event["ph"] == "X"] == [
            "step 0/forward",
            "step 0/backward",
        ]
        (failure,) = (event for event in events if event["ph"] == "i")
        assert failure["args"]["requested_bytes"] == 1 << 40
        assert begins[2]["args"]["never_freed"] is True

    def test_what_is_left_out_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(perfetto, "BLOCKS", 2)
        found = self.written(small(), tmp_path)
        assert found["otherData"]["blocks of GPU 0"] == "the 2 largest of 3"
        sizes = [event["args"]["bytes"] for event in found["traceEvents"] if event["ph"] == "b"]
        assert sizes == [4 * MIB, 8 * MIB]

    def test_an_empty_trace(self, tmp_path: Path) -> None:
        assert self.written(TraceBuilder().finish(), tmp_path)["traceEvents"] == []


class TestTable:
    @staticmethod
    def rows(trace: MemoryTrace, folder: Path) -> list[dict[str, str]]:
        path = folder / "trace.csv"
        write_csv(trace, path)
        return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))

    def test_there_is_a_line_for_each_event_with_the_figures_of_its_device(self, tmp_path: Path) -> None:
        trace = read_any(RECORDINGS / "expandable-3gpu-oom.json.gz")
        rows = self.rows(trace, tmp_path)
        assert len(rows) == len(trace)
        for device in (0, 1, 2):
            over = curves(trace, lifetimes(trace, device))
            mine = np.flatnonzero(trace.device == device)
            for name in ("allocated", "active", "reserved"):
                assert [int(rows[row][name]) for row in mine.tolist()] == getattr(over, name)[mine].tolist()

    def test_categories_sum_to_what_is_allocated(self, tmp_path: Path) -> None:
        rows = self.rows(small(), tmp_path)
        names = list(rows[0])[8:]
        assert len(names) == len(Category)
        for row in rows:
            assert sum(int(row[name]) for name in names) == int(row["allocated"])
        assert rows[-1]["kind"] == "free_completed"
        assert {row["phase"] for row in rows} == {"step 0/forward", "step 0/backward"}

    def test_names_stay_in_their_cells(self, tmp_path: Path) -> None:
        recorder = Recorder()
        for name in ('a,"b"\n', "=cmd()"):
            recorder.phase(name)
            recorder.alloc("float32[1]", 4, Category.OTHER)
        phases = {row["phase"] for row in self.rows(recorder.finish(), tmp_path)}
        assert phases == {'a,"b"\n', "'=cmd()"}


class TestPicture:
    def test_the_svg_is_always_the_same(self) -> None:
        run = fitting_run()
        check_golden("timeline.svg", to_svg(draw_timeline(run.trace, width=640, height=300)))

    @pytest.mark.parametrize("trace", [TraceBuilder().finish(), small(), oom_run().trace])
    def test_the_svg_is_well_formed_and_holds_nothing_from_elsewhere(self, trace: MemoryTrace) -> None:
        root = ElementTree.fromstring(to_svg(draw_timeline(trace, title=EVIL)))
        tags = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert tags <= {"svg", "title", "desc", "rect", "path", "text"}
        assert not any(name.endswith("href") for element in root.iter() for name in element.attrib)

    def test_the_peak_is_drawn_at_its_height(self) -> None:
        trace = small()
        drawing = draw_timeline(trace)
        tops = [
            y for shape in drawing.shapes if hasattr(shape, "rings") for ring in shape.rings for _, y in ring
        ]
        floor, ceiling = drawing.height - 40, 58
        most = int(curves(trace, lifetimes(trace)).reserved.max())
        wanted = floor - (floor - ceiling) * 12 * MIB / (most * 1.06)
        assert min(y for y in tops if y > ceiling) == pytest.approx(wanted)

    def test_the_png_has_the_colours_of_the_categories(self) -> None:
        image_module = pytest.importorskip("PIL.Image", reason="Pillow paints the PNG and is not installed")
        image = image_module.open(io.BytesIO(to_png(draw_timeline(fitting_run().trace))))
        assert image.size == (1720, 760)
        colours = {colour for _, colour in image.getcolors(maxcolors=1 << 20)}
        for category in (Category.PARAMETERS, Category.ACTIVATIONS, Category.GRADIENTS):
            value = COLOURS[category]
            assert tuple(int(value[at : at + 2], 16) for at in (1, 3, 5)) in colours

    def test_without_pillow_it_is_said_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "PIL", None)
        with pytest.raises(EnvironmentUnfitError, match="needs Pillow"):
            to_png(draw_timeline(small()))


class TestNotebook:
    @pytest.mark.parametrize("run", [fitting_run(), oom_run()], ids=["fits", "oom"])
    def test_a_run(self, run: Any) -> None:
        text = run_summary(run, verdict(run))
        assert ("fits" in text) or ("does not fit" in text)
        assert text.count("<svg") == 1
        assert "<script" not in text
        assert "style=" not in text

    def test_a_trace(self) -> None:
        assert trace_summary(small()).count("<svg") == 1
        assert "<svg" not in trace_summary(TraceBuilder().finish())

    def test_names_are_text(self) -> None:
        builder = TraceBuilder(meta={"program": EVIL})
        builder.append(EventKind.ALLOC, device=0, address=512, size=512, block=512)
        assert "<img" not in trace_summary(builder.finish())
