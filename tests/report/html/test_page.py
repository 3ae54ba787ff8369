"""What the file says, without a browser: its policy, its words, what it leaves out."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tests import snapshot_kinds

from analysis.synthetic import Recorder, fitting_run, oom_run
from report.html.pages import EVIL, evil, leaking, recording, simple, two_cards
from report.html.test_packing import unpack
from vramfit.analysis import lifetimes, peak, verdict
from vramfit.analysis.recorded_run import run_from_trace
from vramfit.errors import TraceFormatError
from vramfit.report import render_html, render_trace_html, write_page
from vramfit.report.html import columns
from vramfit.report.html.markup import Html, tag
from vramfit.trace import Category, EventKind, MemoryTrace, Run, TraceBuilder, trace_from_snapshot
from vramfit.units import MIB, format_bytes


class Document(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, list[str]] = {}
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        while self.open and self.open.pop() != name:
            pass

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        self.content.setdefault(inside, []).append(data)
        if inside not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def data(self, name: str) -> str:
        identifiers = [found.get("id") for kind, found in self.elements if kind == "script"]
        return self.content["script"][identifiers.index(name)]


def page_of(run: Run) -> Document:
    return Document(render_html(run, verdict(run)))


def test_the_policy_allows_its_own_script_and_style_and_no_network() -> None:
    document = page_of(fitting_run())
    (policy,) = (
        found["content"] or ""
        for kind, found in document.elements
        if kind == "meta" and "http-equiv" in found
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert not rules.keys() & {"connect-src", "font-src", "frame-src", "object-src", "media-src"}
    for kind, rule in (("script", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(document.content[kind][-1].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_nothing_is_taken_from_elsewhere() -> None:
    document = page_of(fitting_run())
    for kind, attributes in document.elements:
        assert kind not in ("link", "iframe", "img", "object", "embed", "form")
        assert "src" not in attributes
        assert "style" not in attributes, "the policy forbids it"
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")


def test_identifiers_are_used_once_and_links_lead_somewhere() -> None:
    run = two_cards()
    document = page_of(run)
    found = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(found) == len(set(found))
    for kind, attributes in document.elements:
        for name in ("href", "for", "aria-labelledby", "aria-describedby"):
            if attributes.get(name):
                assert (attributes[name] or "").removeprefix("#") in found, (kind, name)


def test_scripts_ask_only_for_elements_that_are_there() -> None:
    document = page_of(two_cards())
    found = {attributes["id"] for _, attributes in document.elements if "id" in attributes}
    asked = set(re.findall(r'(?:\$|fresh)\("([a-z-]+)"\)', document.content["script"][-1]))
    assert len(asked) > 25
    of_ranks = {"data-ranks", "ranks-legend"}  # on pages of several ranks alone: test_ranks_page.py
    assert asked - of_ranks <= found


def test_names_are_text_wherever_they_stand() -> None:
    text = render_html(evil(), verdict(evil()), root=Path("/home/ada"))
    assert "<img" not in text
    document = Document(text)
    assert document.text.count(EVIL) > 10
    kinds = [kind for kind, _ in document.elements]
    assert kinds.count("script") == 3
    assert kinds.count("title") == 1 + 3


@pytest.mark.parametrize("run", [fitting_run(), oom_run()], ids=["fits", "oom"])
def test_the_words_hold_the_facts_of_the_pictures(run: Run) -> None:
    text = page_of(run).text
    judged = verdict(run)
    found = judged.device.breakdown
    for amount in (
        judged.device.peak_allocated,
        judged.device.peak_reserved,
        found.fragmentation.inactive_split,
        *(amount for amount in found.categories.values() if amount),
        *(group.total_bytes for group in found.tensors[:20]),
    ):
        assert format_bytes(amount) in text
    assert judged.device.gpu in text
    for line in (*judged.why, *judged.advice):
        assert line in text
    for warning in run.warnings:
        assert warning.message in text
    if judged.oom is not None:
        assert "What would have served the request that failed" in text


def test_a_recording_says_that_its_card_is_not_known() -> None:
    trace = recording("eor-nn")
    text = Document(render_trace_html(trace, title="eor-nn.json.gz")).text
    assert "eor-nn.json.gz" in text
    assert "does not say how large the card is" in text
    assert format_bytes(peak(trace).allocated) in text


def test_advice_is_on_the_page() -> None:
    text = Document(render_trace_html(recording("expandable-3gpu-oom"))).text
    assert "live memory fills the card" in text
    assert "move layers to the cards that hold less" not in text  # nobody tried
    assert "Would the request of 4.94 GiB have fitted? Not at all: what is alive" in text


def test_a_state_is_shown_as_one() -> None:
    text = Document(render_trace_html(trace_from_snapshot(snapshot_kinds.torch_26()))).text
    assert text.count("When the snapshot was dumped") == 2
    assert "When it was dumped, GPU 0 had" in text
    assert "no timeline can be drawn" in text
    for word in (
        "fullest moment",
        "peak allocated",
        "its peak",
        "event -1",
        "The timeline as a table",
        "Leaks",
    ):
        assert word not in text


def test_a_leak_is_on_the_page() -> None:
    text = Document(render_trace_html(leaking())).text
    assert "Memory grows from step to step" in text
    assert "1.00 MiB per step" in text


def bars(document: Document) -> list[dict[str, float]]:
    """The widths of the parts of each card's bar, of 1,000; and how long the bar is in all."""
    found: list[dict[str, float]] = []
    for kind, attributes in document.elements:
        if kind == "div" and "bar-card" in (attributes.get("class") or "").split():
            found.append({})
        elif kind == "rect":
            found[-1][attributes["class"] or ""] = float(attributes["width"] or 0)
    return found


def test_a_card_of_unknown_size_is_not_drawn_as_full() -> None:
    (bar,) = bars(Document(render_trace_html(recording("eor-nn"))))
    assert sum(bar.values()) == pytest.approx(1000 / 1.5, abs=0.02)
    assert "of-free" not in bar
    document = Document(render_trace_html(recording("expandable-3gpu-oom")))
    first, second, third = bars(document)
    judged = verdict(run_from_trace(recording("expandable-3gpu-oom")))
    total = judged.devices[1].total
    assert sum(second.values()) == pytest.approx(1000, abs=0.03)
    for bar, device in ((first, judged.devices[0]), (third, judged.devices[2])):
        assert device.total == 0
        assert sum(bar.values()) == pytest.approx(1000 * device.peak_reserved / total, abs=0.02)
    assert document.text.count("the rest of the card, of unknown size") == 2


def test_the_bar_of_a_card_has_a_legend() -> None:
    run = fitting_run()
    document = page_of(run)
    device = verdict(run).device
    (bar,) = bars(document)
    assert list(bar) == ["of-allocated", "of-cached", "of-context", "of-free"]
    assert sum(bar.values()) == pytest.approx(1000, abs=0.03)
    swatches = [
        attributes["class"] or ""
        for kind, attributes in document.elements
        if kind == "span" and "of-" in (attributes.get("class") or "")
    ]
    assert swatches == ["swatch of-allocated", "swatch of-cached", "swatch of-context", "swatch of-free"]
    for name, amount in (
        ("allocated", device.peak_allocated),
        ("cached", device.peak_reserved - device.peak_allocated),
        ("context", device.context),
        ("free", device.headroom),
    ):
        assert f"{name} {format_bytes(amount)}" in document.text


def test_what_grows_on_a_card_that_is_not_chosen_is_told_too() -> None:
    recorder = Recorder(devices=2)
    for step in range(14):
        recorder.phase(f"step {step}/forward")
        recorder.alloc("float32[262144]", MIB, Category.ACTIVATIONS, module="Net.memory", device=1)
        recorder.free(recorder.alloc("float32[524288]", 90 * MIB, Category.TEMPORARIES, device=0))
    text = render_trace_html(recorder.finish())
    found = Document(text)
    assert text.index('id="s-leaks"') < text.index('id="s-timeline"')
    assert dict(found.elements[0][1])["data-first"] == "0"
    assert (
        "GPU 1" in found.text[: found.text.index("Memory over time", found.text.index("1.00 MiB per step"))]
    )


def test_the_blocks_of_the_page_are_those_of_the_analysis() -> None:
    trace = recording("select-n-b")
    document = Document(render_trace_html(trace))
    (device,) = (
        found["id"] for kind, found in document.elements if (found.get("id") or "").startswith("data-d")
    )
    packed, facts = unpack(base64.b64decode(document.data(device or "")))
    lives = lifetimes(trace, facts["index"])  # type: ignore[arg-type]
    assert facts["left_out"] == 0
    born = np.array(packed["born"]) - 1
    assert (born == np.sort(lives.born)).all()
    blocks = np.array(packed["block"])[packed["size_of"]]
    assert sorted(blocks.tolist()) == sorted(lives.block.tolist())
    life = np.array(packed["life"])
    freed = np.where(life > 0, born + life - 1, len(trace))
    assert sorted(zip(born.tolist(), freed.tolist(), strict=True)) == sorted(
        zip(lives.born.tolist(), lives.freed.tolist(), strict=True)
    )
    starts, sizes = np.array(packed["arena_start"]), np.array(packed["arena_size"])
    position = np.array(packed["position"])[packed["place"]] * facts["unit"]  # type: ignore[operator]
    before = np.cumsum(sizes) - sizes
    home = np.searchsorted(before, position, side="right") - 1
    assert sorted((starts[home] + position - before[home]).tolist()) == sorted(lives.address.tolist())


def test_marks_phases_and_times_are_on_the_page() -> None:
    builder = TraceBuilder()
    loading = builder.phase("loading")
    for number, tag_of in enumerate(("", "", EVIL)):
        builder.append(
            EventKind.MARKER if tag_of else EventKind.ALLOC,
            device=0,
            address=0 if tag_of else 4096 * number,
            size=0 if tag_of else 512,
            block=0 if tag_of else 512,
            op=builder.op(tag_of) if tag_of else -1,
            phase=loading if number else -1,
            time_us=1_700_000_000_000_000 + 250 * number,
        )
    document = Document(render_trace_html(builder.finish()))
    packed, facts = unpack(base64.b64decode(document.data("data-shared")))
    assert (packed["mark_row"], facts["marks"]) == ([2], [EVIL])
    assert (packed["phase_row"], packed["phase"], facts["phases"]) == ([0, 1], [0, 1], ["loading"])
    assert (packed["time_row"], packed["time_us"]) == ([0, 1, 2], [0, 250, 500])


def test_what_is_left_out_are_the_smallest_blocks() -> None:
    lives = lifetimes(simple())
    kept = columns.largest(lives, 2)
    assert sorted(lives.block[kept].tolist()) == [6 * MIB, 8 * MIB]
    assert len(columns.largest(lives, 99)) == 3
    assert len(columns.largest(lives, 0)) == 0


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with pytest.raises(ValueError, match="needs its verdict"):
        write_page(path, fitting_run())
    assert list(tmp_path.iterdir()) == []
    write_page(path, TraceBuilder().finish())
    assert path.read_text(encoding="utf-8").endswith("</html>\n")


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        (TraceBuilder().finish(), "holds no events"),
        (Recorder().finish(), "Over 0 events allocated memory reached 0 B"),
    ],
    ids=["nothing", "a device"],
)
def test_empty_traces(trace: MemoryTrace, told: str) -> None:
    assert told in Document(render_trace_html(trace)).text


def test_a_device_that_only_gives_back() -> None:
    builder = TraceBuilder()
    builder.append(EventKind.FREE_REQUESTED, device=3, address=512, size=512)
    builder.append(EventKind.FREE_COMPLETED, device=3, address=512, size=512)
    text = Document(render_trace_html(builder.finish())).text
    assert "No request of this device is in the recording" in text
    assert "512 B" in text


def test_addresses_that_no_gpu_has_are_refused() -> None:
    builder = TraceBuilder()
    builder.append(EventKind.ALLOC, device=0, address=1 << 60, size=512, block=512)
    with pytest.raises(TraceFormatError, match="cannot be drawn"):
        render_trace_html(builder.finish())


def test_markup_escapes_text_and_attributes() -> None:
    made = tag("p", "<b>", Html("<i>"), None, title='"', data_x=1, hidden=True, open_=False)
    assert made == '<p title="&quot;" data-x="1" hidden>&lt;b&gt;<i></p>'
