"""The page in a real Chromium. Every test also checks (see ``show``) that the console stays silent and that nothing
but the file itself is asked for."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests import snapshot_kinds

from analysis.synthetic import oom_run
from report.html.browser import Opened
from report.html.conftest import Open
from report.html.pages import EVIL, recording, simple, training, two_cards, waiting
from report.html.pages import evil as evil_run
from vramfit.analysis import fragmentation, lifetimes, peak, verdict
from vramfit.report.html import advice, write_page
from vramfit.report.html import page as page_module
from vramfit.trace import EventKind, MemoryTrace, Run, TraceBuilder, trace_from_snapshot
from vramfit.units import MIB, format_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # The search for settings takes longer than all else, and the pictures do not show it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "TUNE_EVENTS", 0)
        patch.setattr(advice, "PROVE_EVENTS", 0)
        yield tmp_path_factory.mktemp("pages")


def written(folder: Path, source: Run | MemoryTrace, name: str) -> Path:
    path = folder / f"{name}.html"
    if not path.exists():
        write_page(path, source, verdict(source) if isinstance(source, Run) else None, title=name)
    return path


def wanted_figures(trace: MemoryTrace, row: int, device: int = 0) -> dict[str, int]:
    lives = lifetimes(trace, device)
    found = fragmentation(trace, lives, row)
    return {
        "allocated": int(lives.block[lives.alive(row)].sum()),
        "reserved": found.reserved,
        "occupied": found.occupied,
        "inactive": found.inactive_split,
        "releasable": found.releasable,
        "largest": found.largest_free,
        "slack": found.slack,
    }


def shown_figures(opened: Opened) -> dict[str, int]:
    names = ("allocated", "reserved", "occupied", "inactive", "releasable", "largest", "slack")
    return {name: opened.figure(name) for name in names}


@pytest.mark.parametrize(
    "name", ["gpt-2.7b-ctx128-train", "expandable-3gpu-oom", "select-n-b", "finetune-course"]
)
def test_any_moment_of_a_recording_has_the_figures_of_the_analysis(
    folder: Path, show: Open, name: str
) -> None:
    trace = recording(name)
    opened = show(written(folder, trace, name))
    device = int(opened.page.evaluate("document.documentElement.dataset.ready"))
    begun = opened.moment()
    assert begun == peak(trace, device).moment.row or "oom" in name
    for row in (begun, -1, 0, len(trace) // 3, len(trace) * 2 // 3, len(trace) - 1):
        opened.set_moment(row)
        assert shown_figures(opened) == wanted_figures(trace, row, device), row
        segments = fragmentation(trace, lifetimes(trace, device), row).segments
        assert opened.page.text_content("#moment-segments") == f"{segments:,}"


def test_the_ribbon_has_room_for_every_reserved_byte(folder: Path, show: Open) -> None:
    trace = recording("expandable-3gpu-oom")
    opened = show(written(folder, trace, "expandable-3gpu-oom"))
    cells = opened.page.evaluate(
        "vramfit.current.segments.cells.map(cell => [cell.at, cell.size, cell.state])"
    )
    assert sum(size for _, size, _ in cells) == opened.figure("reserved")
    assert sum(size for _, size, state in cells if state < 2) == opened.figure("occupied")
    assert [at for at, _, _ in cells] == np.cumsum([0, *(size for _, size, _ in cells[:-1])]).tolist()


def test_the_states_of_the_segments_map(folder: Path, show: Open) -> None:
    trace = waiting()
    opened = show(written(folder, trace, "waiting"))
    opened.set_moment(len(trace) - 1)
    assert shown_figures(opened) == wanted_figures(trace, len(trace) - 1)
    cells = opened.page.evaluate(
        "vramfit.current.segments.cells.map(cell => [cell.segment, cell.state, cell.size])"
    )
    live, pending, inactive, cached = range(4)
    assert cells == [
        [0, live, 4 * MIB],
        [0, inactive, 4 * MIB],
        [0, pending, 4 * MIB],
        [0, inactive, 8 * MIB],
        [1, cached, 20 * MIB],
    ]
    segments = opened.page.locator("#segments")
    segments.focus()
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
    assert "a stream still uses it" in opened.page.text_content("#segments-cursor")
    opened.page.keyboard.press("Enter")
    assert "stream 7" in opened.page.text_content("#chosen-block")
    opened.page.keyboard.press("Escape")
    assert opened.page.is_hidden("#chosen")


def test_pointing_at_a_block_tells_its_stack(folder: Path, show: Open) -> None:
    opened = show(written(folder, simple(), "simple"))
    model = "vramfit.current.model"
    for chart in ("address", "stacked"):
        for block in range(3):
            x, y = opened.page.evaluate(
                f"""([chart, block]) => {{
                const {{ plot }} = vramfit.current[chart], view = vramfit.current.view;
                const middle = (Math.max(0, {model}.born[block]) + {model}.freed[block]) / 2;
                const column = Math.floor(view.x(middle));
                for (let y = 9; y < plot.height - 25; y++)
                  if (plot.ownerAt(column, y) === block) return [column + 76, y + 3];
                return [-1, -1]; }}""",
                [chart, block],
            )
            assert y > 0, (chart, block)
            opened.page.mouse.move(*opened.place(f"#{chart}", x, y))
            said = opened.page.text_content("#tooltip")
            assert f"train.py:{10 + block} function_{block}" in said, (chart, said)
            assert f"Net.layer{block}" in said
            assert format_bytes((8 - 2 * block) * MIB) in said


def test_choosing_a_block_keeps_its_whole_stack(folder: Path, show: Open) -> None:
    opened = show(written(folder, simple(), "simple"))
    assert opened.page.is_hidden("#chosen")
    opened.page.evaluate("vramfit.current.choose(1, 5)")
    opened.settle()
    said = opened.page.text_content("#chosen-block")
    assert "/home/ada/project/train.py:11 function_1" in said
    assert "torch/nn/functional.py:1001 linear" in said
    assert opened.moment() == 5
    opened.page.click("#chosen-block >> text=Zoom to its life")
    opened.settle()
    low, high = opened.events()
    born, freed = opened.page.evaluate("[vramfit.current.model.born[1], vramfit.current.model.freed[1]]")
    assert low <= born < freed <= high
    opened.page.click("#chosen-block >> text=Close")
    assert opened.page.is_hidden("#chosen")


def test_drag_wheel_keys_and_buttons_zoom(folder: Path, show: Open) -> None:
    trace = recording("gpt-2.7b-ctx128-train")
    opened = show(written(folder, trace, "gpt-2.7b-ctx128-train"))
    page, mouse = opened.page, opened.page.mouse
    everything = (0, len(trace))
    assert opened.events() == everything
    mouse.move(*opened.place("#timeline", 300, 100))
    mouse.down()
    mouse.move(*opened.place("#timeline", 500, 120))
    mouse.up()
    opened.settle()
    low, high = opened.events()
    width = page.evaluate("vramfit.current.view.width")
    assert low == pytest.approx((300 - 76) / width * len(trace), rel=0.02)
    assert high == pytest.approx((500 - 76) / width * len(trace), rel=0.02)
    page.focus("#timeline")
    mouse.wheel(0, -200)
    opened.settle()
    page.wait_for_function("high => vramfit.current.view.highRow < high", arg=high)
    page.keyboard.press("0")
    opened.settle()
    assert opened.events() == everything
    page.keyboard.press("+")
    opened.settle()
    assert opened.events()[1] - opened.events()[0] == pytest.approx(len(trace) / 1.25**2, abs=2)
    page.evaluate("vramfit.current.view.showRows(5000, 5001)")
    opened.settle()
    low, high = opened.events()
    assert high - low == 4
    assert "each drawn by itself" in page.text_content("#timeline-note")
    page.keyboard.press("ArrowLeft")
    assert opened.events()[0] < low
    page.click("#reset-zoom")
    assert opened.events() == everything
    page.click("#zoom-in")
    assert opened.events()[1] - opened.events()[0] == pytest.approx(len(trace) / 2, abs=2)


def test_rectangles_zoom_in_both_directions(folder: Path, show: Open) -> None:
    opened = show(written(folder, recording("gpt-2.7b-ctx128-train"), "gpt-2.7b-ctx128-train"))
    assert "thinner than a pixel" in opened.page.text_content("#address-note")
    mouse = opened.page.mouse
    mouse.move(*opened.place("#address", 400, 100))
    mouse.down()
    mouse.move(*opened.place("#address", 402, 101))
    mouse.move(*opened.place("#address", 420, 110))
    mouse.up()
    opened.settle()
    low, high = opened.page.evaluate("vramfit.current.address.plot.range")
    whole = opened.page.evaluate("vramfit.current.model.arenaTotal")
    assert 0 < low < high < whole
    assert high - low == pytest.approx(whole * 10 / (360 - 8 - 24), rel=0.01)
    opened.page.focus("#address")
    opened.page.keyboard.press("ArrowUp")
    opened.settle()
    assert opened.page.evaluate("vramfit.current.address.plot.range")[0] > low
    opened.page.keyboard.press("Home")
    opened.settle()
    assert opened.page.evaluate("vramfit.current.address.plot.range") == [0, whole]


def test_every_pixel_belongs_to_a_block_that_lies_there(folder: Path, show: Open) -> None:
    opened = show(written(folder, recording("finetune-course"), "finetune-course"))
    wrong = opened.page.evaluate(
        """() => {
        const { model, view, address } = vramfit.current, { plot } = address;
        let wrong = 0, seen = 0;
        for (let line = 0; line < plot.lines; line += 3) for (let column = 0; column < plot.columns; column += 5) {
          const owner = plot.owners[line * plot.columns + column];
          if (owner < 0) continue;
          seen++;
          const first = view.row((column - 1) / plot.scale), last = view.row((column + 2) / plot.scale);
          const perLine = (plot.range[1] - plot.range[0]) / plot.lines;
          const high = plot.range[1] - (line - 1) * perLine, low = high - 3 * perLine;
          if (model.freed[owner] < first || model.born[owner] > last) wrong++;
          else if (model.position[owner] > high || model.position[owner] + model.block[owner] < low) wrong++;
        }
        return [wrong, seen]; }"""
    )
    assert wrong[0] == 0
    assert wrong[1] > 1000


def test_the_timeline_has_the_sums_of_the_analysis(folder: Path, show: Open) -> None:
    run = training()
    opened = show(written(folder, run, "training"))
    from vramfit.analysis import timeline

    over = timeline(run.trace)
    sampled = opened.page.evaluate(
        """() => { const { sample } = vramfit.current.timeline;
        return { rows: sample.rows, categories: sample.categories, reserved: sample.reserved }; }"""
    )
    rows = np.array(sampled["rows"])
    assert (np.array(sampled["categories"]) == over.categories[:, rows]).all()
    assert over.allocated[rows].max() == over.allocated.max()
    opened.page.mouse.move(*opened.place("#timeline", 600, 150))
    assert "allocated" in opened.page.text_content("#tooltip")


def test_the_keyboard_alone_reaches_everything(folder: Path, show: Open) -> None:
    opened = show(written(folder, training(), "training"))
    page = opened.page
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 20)")
        )
    assert {"theme", "timeline", "moment-slider", "segments", "address", "stacked", "own-frames"} <= reached
    outline = page.evaluate("() => { document.getElementById('segments').focus(); return 1; }")
    assert outline
    page.keyboard.press("ArrowRight")
    style = page.evaluate("getComputedStyle(document.getElementById('segments')).outlineStyle")
    assert style == "solid"
    assert "MiB" in page.text_content("#segments-cursor")
    before = opened.moment()
    page.focus("#timeline")
    page.keyboard.press(",")
    opened.settle()
    assert opened.moment() == before - 1


def test_a_click_into_a_flame_graph_zooms_and_escape_goes_back(folder: Path, show: Open) -> None:
    opened = show(written(folder, training(), "training"))
    page = opened.page
    cells = page.locator("#flame-modules button")
    names = [text.split(":")[0] for text in cells.evaluate_all("cells => cells.map(c => c.ariaLabel)")]
    assert names[0] == "all"
    assert "mlp" in names
    inner = page.locator("#flame-modules button[aria-label^='mlp:']").first
    narrow = inner.bounding_box()["width"]
    inner.click()
    assert cells.first.get_attribute("aria-label").startswith("mlp:")
    assert cells.first.bounding_box()["width"] > 1000 > narrow
    trail = page.locator("#flame-modules-trail button").all_text_contents()
    assert trail[0] == "all"
    assert trail[-1] == "mlp"
    cells.first.focus()
    page.keyboard.press("Escape")
    assert not cells.first.get_attribute("aria-label").startswith("mlp:")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.classList.contains('flame-cell')")


def test_the_flames_sum_to_what_is_allocated(folder: Path, show: Open) -> None:
    run = training()
    opened = show(written(folder, run, "training"))
    found = peak(run.trace)
    for name in ("modules", "stacks"):
        assert opened.page.evaluate(f"vramfit.current.{name}.root.bytes") == found.allocated
    root = found.modules.children[0]
    assert opened.page.evaluate(
        "name => vramfit.current.modules.root.children.get(name).bytes", root.name
    ) == (root.total_bytes)


def test_dark_and_light(folder: Path, show: Open) -> None:
    path = written(folder, training(), "training")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = show(path, color_scheme="light")
    dark = show(path, color_scheme="dark")
    assert light.page.evaluate(ground) == "rgb(255, 255, 255)"
    assert dark.page.evaluate(ground) == "rgb(21, 24, 28)"
    corner = "vramfit.current.address.plot.words[0]"
    before = light.page.evaluate(corner)
    light.page.click("#theme")
    light.settle()
    assert light.page.evaluate(ground) == "rgb(21, 24, 28)"
    assert light.page.text_content("#theme") == "Light"
    assert light.page.evaluate(corner) != before
    assert light.page.evaluate(corner) == dark.page.evaluate(corner)


def test_the_choice_of_a_device_shows_its_pictures_and_tables(folder: Path, show: Open) -> None:
    run = two_cards()
    opened = show(written(folder, run, "two"))
    assert opened.figure("allocated") == peak(run.trace, 1).allocated
    assert opened.page.locator("#s-tensors > [data-device='1']").is_visible()
    opened.page.select_option("#device-choice", "0")
    opened.page.wait_for_selector("html[data-ready='0']")
    opened.settle()
    assert opened.figure("allocated") == peak(run.trace, 0).allocated
    assert opened.page.locator("#s-tensors > [data-device='0']").is_visible()
    assert opened.page.locator("#s-tensors > [data-device='1']").is_hidden()
    opened.page.focus("#timeline")
    before = opened.moment()
    opened.page.keyboard.press(".")
    opened.settle()
    assert opened.moment() == min(before + 1, len(run.trace) - 1)


def test_a_run_that_ran_out(folder: Path, show: Open) -> None:
    run = oom_run()
    opened = show(written(folder, run, "oom"))
    row = int(np.flatnonzero(run.trace.kind == EventKind.OOM)[0])
    assert opened.moment() == row
    assert opened.page.text_content("h1").startswith("✗ does not fit")
    opened.page.click("#to-end")
    opened.settle()
    opened.page.click("#to-oom")
    opened.settle()
    assert opened.moment() == row


def test_a_narrow_window(folder: Path, show: Open) -> None:
    opened = show(written(folder, two_cards(), "two"), viewport={"width": 360, "height": 700})
    room = "document.documentElement.scrollWidth <= window.innerWidth"
    assert opened.page.evaluate(room)
    assert opened.page.locator("#timeline").bounding_box()["width"] <= 340
    opened.page.set_viewport_size({"width": 900, "height": 700})
    opened.settle()
    opened.settle()
    assert opened.page.evaluate("vramfit.current.view.width") == pytest.approx(900 - 40 - 90, abs=20)


def test_a_snapshot_without_history_is_one_moment(folder: Path, show: Open) -> None:
    opened = show(written(folder, trace_from_snapshot(snapshot_kinds.torch_26()), "dump"))
    visible = {
        name: opened.page.locator(f"#s-{name}").is_visible() for name in ("timeline", "moment", "blocks")
    }
    assert visible == {"timeline": False, "moment": True, "blocks": False}
    assert opened.page.text_content("#h-flames") == "Where the memory belongs, at the time of the dump"
    assert opened.page.locator("nav a").all_text_contents()[0] == "At one moment"


@pytest.mark.parametrize("source", [TraceBuilder().finish(), evil_run()], ids=["empty", "evil"])
def test_pages_of_odd_traces(folder: Path, show: Open, source: Run | MemoryTrace) -> None:
    empty = isinstance(source, MemoryTrace)
    opened = show(written(folder, source, "empty" if empty else "evil"))
    assert opened.page.locator("img").count() == 0
    if empty:
        assert "holds no events" in opened.page.text_content("main")
        return
    assert EVIL in opened.page.text_content("main")
    opened.page.click("summary >> text=What is alive")
    assert EVIL in opened.page.text_content("#alive-rows")
    opened.page.locator("#flame-stacks button").nth(1).hover()
    opened.page.evaluate("vramfit.current.choose(0, 3)")
    assert EVIL in opened.page.text_content("#chosen-block")
    assert opened.page.locator("img").count() == 0


def test_a_page_without_room_for_all_blocks_says_so(
    folder: Path, show: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recording("gpt-2.7b-ctx128-train")
    monkeypatch.setattr(page_module, "DATA_BUDGET", 25_000)
    opened = show(written(folder, trace, "crowded"))
    assert "are left out of this page" in opened.page.text_content("#stacked-note")
    assert "at most this much" in opened.page.text_content("#segments-note")
    held = opened.page.evaluate("vramfit.current.model.length")
    assert 0 < held < len(lifetimes(trace).born)
    found = peak(trace)
    assert opened.figure("allocated") == found.allocated
    assert opened.figure("reserved") == found.reserved


def test_time_instead_of_events(folder: Path, show: Open) -> None:
    run = training()
    opened = show(written(folder, run, "training"))
    opened.page.check("#by-time")
    opened.settle()
    low, high = opened.page.evaluate("[vramfit.current.view.low, vramfit.current.view.high]")
    span = int(run.trace.time_us[-1] - run.trace.time_us[0])
    assert low == 0
    assert high == pytest.approx(span, rel=0.01)
    opened.page.click("#zoom-in")
    opened.settle()
    opened.page.uncheck("#by-time")
    low, high = opened.events()
    assert high - low == pytest.approx(len(run.trace) / 2, rel=0.02)


def test_without_scripts_the_words_remain(folder: Path, browser: object) -> None:
    run = training()
    path = written(folder, run, "training")
    context = browser.new_context(java_script_enabled=False)  # type: ignore[attr-defined]
    page = context.new_page()
    page.goto(path.as_uri())
    assert "need JavaScript" in page.text_content("body")
    assert page.is_visible("text=Largest tensors")
    context.close()
