"""Reading the page in a browser: labels, legend, tables, folds, the address, leaks, cards of unknown size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report.html.browser import Opened
from report.html.conftest import Open
from report.html.pages import crowded, leaking, recording, simple, training, two_cards
from vramfit.analysis import peak, verdict
from vramfit.report.html import advice, write_page
from vramfit.trace import Category, MemoryTrace, Run
from vramfit.units import MIB

PHONE = {"width": 500, "height": 900}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "TUNE_EVENTS", 0)
        patch.setattr(advice, "PROVE_EVENTS", 0)
        yield tmp_path_factory.mktemp("reading")


def written(folder: Path, source: Run | MemoryTrace, name: str) -> Path:
    path = folder / f"{name}.html"
    if not path.exists():
        write_page(path, source, verdict(source) if isinstance(source, Run) else None, title=name)
    return path


def column(opened: Opened, table: str, at: int) -> list[str]:
    """The texts of a column, of the rows that are seen."""
    cells = opened.page.locator(f"{table} tbody tr:not([hidden]) td:nth-child({at + 1})")
    return [str(text).strip() for text in cells.all_text_contents()]


@pytest.mark.parametrize("viewport", [{"width": 1400, "height": 900}, PHONE], ids=["wide", "narrow"])
def test_labels_of_the_timeline_do_not_overprint(folder: Path, show: Open, viewport: dict[str, int]) -> None:
    opened = show(written(folder, crowded(), "crowded"), viewport=viewport, color_scheme="dark")
    placed = opened.page.evaluate("vramfit.current.timeline.labels.placed")
    texts = [label["text"] for label in placed if label["text"]]
    assert any(text.startswith("the card less its context") for text in texts)
    assert any(text.startswith("peak") for text in texts)
    assert any(text.startswith("out of memory") for text in texts)
    assert sum(text.startswith("mark number") for text in texts) == 6
    for one, other in itertools.combinations(placed, 2):
        apart = (
            one["x"] + one["width"] <= other["x"]
            or other["x"] + other["width"] <= one["x"]
            or one["y"] + one["height"] <= other["y"]
            or other["y"] + other["height"] <= one["y"]
        )
        assert apart, (one, other)
    left, top, width, height = opened.page.evaluate(
        "(({ left, top, width, height }) => [left, top, width, height])(vramfit.current.timeline.labels.box)"
    )
    for label in placed:
        if label["text"]:
            assert left <= label["x"] <= label["x"] + label["width"] <= left + width, label
            assert top <= label["y"] <= label["y"] + label["height"] <= top + height, label


def test_entries_of_the_legend_toggle(folder: Path, show: Open) -> None:
    run = training()
    opened = show(written(folder, run, "training"))
    page = opened.page
    found = peak(run.trace)
    names = page.locator("#legend button").all_text_contents()
    assert "activations" in names
    assert "inputs" not in names or found.categories[Category.INPUTS]
    chart = "vramfit.current.timeline.chart"
    top = f"Math.max(...{chart}.data[1])"
    before = page.evaluate(top)
    parameters = page.locator("#legend button", has_text="parameters")
    parameters.click()
    opened.settle()
    assert parameters.get_attribute("aria-pressed") == "false"
    assert page.evaluate(top) == before - found.categories[Category.PARAMETERS]
    assert "Hidden by the legend: parameters." in page.text_content("#timeline-note")
    assert "parameters" in page.text_content("#stacked-note")
    owners = "[...new Set(vramfit.current.stacked.plot.owners)].filter(owner => owner >= 0)"
    kinds = f"{owners}.map(owner => vramfit.current.model.category[owner])"
    assert int(Category.PARAMETERS) not in page.evaluate(kinds)
    page.locator("#legend button", has_text="reserved").click()
    opened.settle()
    assert page.evaluate(f"{chart}.data.at(-1).every(amount => amount === null)")
    for name in ("parameters", "reserved"):
        page.locator("#legend button", has_text=name).click()
    opened.settle()
    assert page.evaluate(top) == before
    assert int(Category.PARAMETERS) in page.evaluate(kinds)
    assert "Hidden" not in page.text_content("#timeline-note")


def test_a_recording_without_stacks_is_grouped_by_size(folder: Path, show: Open) -> None:
    trace = recording("eor-nn")
    opened = show(written(folder, trace, "eor-nn"))
    page = opened.page
    found = peak(trace)
    sizes: dict[int, int] = {}
    for group in found.tensors:
        sizes[group.block_bytes] = sizes.get(group.block_bytes, 0) + group.total_bytes
    for tree in ("modules", "stacks"):
        root = f"[...vramfit.current.{tree}.root.children.values()][0]"
        leaves = page.evaluate(f"[...{root}.children.values()].map(one => [one.name, one.bytes])")
        assert sorted(amount for _, amount in leaves) == sorted(sizes.values())
        assert ("7.50 MiB each", 9 * 7_864_320) in [tuple(leaf) for leaf in leaves]
    names = page.locator("#legend button").all_text_contents()
    assert names[-2:] == ["7.50 MiB each", "reserved"]
    assert len(names) == 12
    assert len(set(names)) == 12
    sums = page.evaluate("[...vramfit.current.model.categoriesAt(vramfit.current.model.facts.row)]")
    largest = sorted(sizes.values(), reverse=True)[:10]
    assert sorted(sums[1:], reverse=True) == largest
    assert sum(sums) == found.allocated
    assert "grouped by their sizes" in page.text_content("#timeline-note")
    assert "no line, 7.50 MiB each" in page.text_content("#s-tensors")


def test_sizes_that_read_alike_are_told_apart(folder: Path, show: Open) -> None:
    opened = show(written(folder, recording("expandable-3gpu-oom"), "three"))
    names = opened.page.locator("#legend button").all_text_contents()
    assert len(names) == len(set(names))
    assert sum(name.endswith(" B each") for name in names) >= 2


def test_every_byte_of_the_segments_map_is_painted(folder: Path, show: Open) -> None:
    opened = show(written(folder, recording("expandable-3gpu-oom"), "three"))
    missing = opened.page.evaluate(
        """() => { const { segments } = vramfit.current;
        let missing = 0;
        for (const cell of segments.cells) {
          let painted = 0;
          segments.eachPiece(cell, (x, y, width) => painted += width);
          missing = Math.max(missing, Math.abs(painted - (cell.size / segments.perLine) * segments.width));
        }
        return missing; }"""
    )
    assert missing < 0.01


def test_a_leak_stands_on_top(folder: Path, show: Open) -> None:
    opened = show(written(folder, leaking(), "leak"))
    page = opened.page
    places = [page.locator(f"#{name}").bounding_box()["y"] for name in ("s-leaks", "s-timeline", "s-tensors")]
    assert places == sorted(places)
    assert page.locator("nav a").first.text_content() == "Leaks"
    assert "1.00 MiB per step" in page.text_content("#s-leaks")
    steady = show(written(folder, training(), "training")).page
    assert steady.locator("nav a").nth(-1).text_content() == "Leaks"
    last, tensors = (steady.locator(name).bounding_box()["y"] for name in ("#s-leaks", "#s-tensors"))
    assert last > tensors


def test_tables_sort_and_filter(folder: Path, show: Open) -> None:
    opened = show(written(folder, training(), "training"))
    page = opened.page
    table = "#s-tensors > [data-device] > .scroll"
    heads = page.locator(f"{table} > table th")
    order = column(opened, table, 3)
    heads.nth(3).locator("button").click()
    assert heads.nth(3).get_attribute("aria-sort") == "ascending"
    words = column(opened, table, 3)
    assert sorted(words) != order
    assert sorted(words) == sorted(order)
    filled = [word for word in words if word]
    assert filled[0].startswith("bfloat16")
    assert filled[-1].startswith("int64[")
    heads.nth(3).locator("button").click()
    assert heads.nth(3).get_attribute("aria-sort") == "descending"
    heads.nth(3).locator("button").click()
    assert heads.nth(3).get_attribute("aria-sort") is None
    assert column(opened, table, 3) == order
    heads.nth(0).locator("button").click()
    heads.nth(0).locator("button").click()
    amounts = [_bytes(text) for text in column(opened, table, 0)]
    assert amounts[0] < amounts[-1]
    assert amounts == sorted(amounts)
    filter_box = page.locator("#s-tensors input.filter:visible").first
    filter_box.fill("optimizer  MLP.UP")
    assert set(column(opened, table, 2)) == {"optimizer state"}
    assert all("mlp.up" in module for module in column(opened, table, 5))
    assert f"of {len(order)} rows" in page.locator("#s-tensors [role=status]:visible").first.text_content()
    filter_box.fill("")
    assert len(column(opened, table, 3)) == len(order)


def _bytes(text: str) -> float:
    amount, unit = text.split()
    return float(amount) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


def test_the_order_of_a_table_outlives_the_moment(folder: Path, show: Open) -> None:
    run = training()
    opened = show(written(folder, run, "training"))
    page = opened.page
    page.click("summary >> text=What is alive")
    table = "details:has(#alive-rows)"
    page.click(f"{table} th:nth-child(3) button")
    page.locator(f"{table} input.filter").fill("a")
    opened.set_moment(len(run.trace) // 2)
    kinds = column(opened, table, 2)
    assert len(set(kinds)) > 1
    assert kinds == sorted(kinds)


def test_the_tree_of_modules_keeps_its_order(folder: Path, show: Open) -> None:
    page = show(written(folder, training(), "training")).page
    page.click("summary >> text=By module")
    assert page.locator("details:has-text('By module') th button").count() == 0


def test_the_address_holds_the_moment(folder: Path, show: Open) -> None:
    path = written(folder, two_cards(), "two")
    opened = show(path)
    page = opened.page
    assert page.evaluate("location.hash") == ""
    page.select_option("#device-choice", "0")
    page.wait_for_selector("html[data-ready='0']")
    opened.set_moment(2)
    page.wait_for_function("() => location.hash === '#event=2&gpu=0'")
    page.evaluate("vramfit.current.view.showRows(1, 6)")
    page.wait_for_function("() => location.hash === '#event=2&gpu=0&from=1&to=6'")
    page.click("nav a >> text=Fragmentation")
    opened.settle()
    assert page.evaluate("location.hash") == "#event=2&gpu=0&from=1&to=6"
    link = page.evaluate("location.href")
    page.goto("about:blank")
    opened.asked.clear()
    page.goto(link)
    page.wait_for_selector("html[data-ready='0']")
    page.wait_for_function("() => vramfit.current.view.moment === 2")
    assert page.input_value("#device-choice") == "0"
    assert opened.events() == (1, 6)
    opened.asked[:] = [address.split("#")[0] for address in opened.asked]
    page.evaluate("location.hash = '#event=4&gpu=1'")
    page.wait_for_selector("html[data-ready='1']")
    page.wait_for_function("() => vramfit.current.view.moment === 4")


@pytest.mark.parametrize("hash_", ["#event=999999999", "#event=x", "#event=3&gpu=77", "#event=3&from=9&to=1"])
def test_an_address_that_asks_too_much_does_no_harm(folder: Path, show: Open, hash_: str) -> None:
    run = training()
    opened = show(written(folder, run, "training"))
    before = opened.moment()
    opened.page.evaluate("hash => { location.hash = hash; }", hash_)
    opened.settle()
    opened.settle()
    wanted = {"#event=999999999": len(run.trace) - 1, "#event=x": before}.get(hash_, 3)
    assert opened.moment() == wanted
    assert opened.events() == (0, len(run.trace))


def test_sections_fold(folder: Path, show: Open) -> None:
    opened = show(written(folder, training(), "training"))
    page = opened.page
    fold = page.locator("#h-timeline button")
    width = page.evaluate("vramfit.current.view.width")
    fold.click()
    assert fold.get_attribute("aria-expanded") == "false"
    assert page.locator("#timeline").is_hidden()
    page.locator("#h-blocks button").click()
    opened.settle()
    opened.set_moment(5)
    page.set_viewport_size({"width": 800, "height": 700})
    opened.settle()
    page.set_viewport_size({"width": 1200, "height": 900})
    opened.settle()
    fold.focus()
    page.keyboard.press("Enter")
    opened.settle()
    opened.settle()
    assert page.locator("#timeline").is_visible()
    assert page.evaluate("vramfit.current.view.width") == width
    assert page.locator("#timeline canvas").bounding_box()["width"] == pytest.approx(width + 90, abs=1)
    page.click("nav a >> text=Every allocation")
    assert page.locator("#address").is_visible()


def test_a_stack_is_copied(folder: Path, show: Open) -> None:
    opened = show(written(folder, simple(), "simple"), permissions=["clipboard-read", "clipboard-write"])
    page = opened.page
    page.evaluate("vramfit.current.choose(1, 5)")
    copy = page.locator("#chosen-block button", has_text="Copy the stack")
    copy.click()
    page.wait_for_selector("#chosen-block >> text=Copied")
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.splitlines() == [
        f"6.00 MiB ({6 * MIB:,} B), activations, float32[1572864], aten.mm.default, Net.layer1",
        "  /venv/lib/python3.11/site-packages/torch/nn/functional.py:1001 linear",
        "  /home/ada/project/train.py:11 function_1",
    ]


def test_a_stack_is_copied_where_the_clipboard_is_kept_from_pages(folder: Path, show: Open) -> None:
    opened = show(written(folder, simple(), "simple"))
    page = opened.page
    page.evaluate(
        """() => { Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.addEventListener("copy", () => { window.copied = getSelection().toString()
          || document.activeElement.value; }); }"""
    )
    page.evaluate("vramfit.current.choose(1, 5)")
    page.locator("#chosen-block button", has_text="Copy the stack").click()
    page.wait_for_function("() => window.copied?.includes('train.py:11 function_1')")
    assert page.locator("textarea").count() == 0


@pytest.mark.parametrize("name", ["training", "three", "leak"])
def test_narrow_screens_scroll_tables(folder: Path, show: Open, name: str) -> None:
    source: dict[str, Any] = {
        "training": training,
        "three": lambda: recording("expandable-3gpu-oom"),
        "leak": leaking,
    }
    opened = show(written(folder, source[name](), name), viewport=PHONE)
    page = opened.page
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    opened.settle()
    assert page.evaluate("document.documentElement.scrollWidth") <= 500
    boxes = page.evaluate(
        """() => [...document.querySelectorAll("main table")].filter(one => one.checkVisibility()).map(table => {
          const box = table.parentElement;
          box.scrollLeft = 1e6;
          const beyond = box.scrollWidth - box.clientWidth;
          return [box.tabIndex, box.clientWidth, beyond, box.scrollLeft]; })"""
    )
    assert len(boxes) > 5
    assert any(beyond > 20 for _, _, beyond, _ in boxes)
    for focus, width, beyond, moved in boxes:
        assert focus == 0
        assert width <= 480
        assert moved == pytest.approx(beyond, abs=1)
