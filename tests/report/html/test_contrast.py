"""Text can be read on whatever it stands on: contrast of WCAG 2.2, level AA, in both themes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.synthetic import oom_run
from report.html.conftest import Open
from report.html.pages import leaking, recording, training, two_cards
from vramfit.analysis import verdict
from vramfit.report.html import advice, write_page
from vramfit.report.html import page as page_module
from vramfit.trace import Category, MemoryTrace, Run

TEXT, GRAPHIC = 4.5, 3.0
"""Least contrast of text of any size, and of strokes that mean something (1.4.3 and 1.4.11)."""

INKS = ("text", "text-quiet", "good", "bad", "link", "mark")
GROUNDS = ("surface", "raised", "plot")
BANDS = ("phase-even", "phase-odd", "flame-even", "flame-odd")
STROKES = ("focus", "reserved", "moment", "mark", "bad", "warn")
BARS = ("of-allocated", "of-cached", "of-context")


def tokens() -> dict[str, tuple[str, str]]:
    """The colours of the style sheet by name: in the light theme, in the dark one."""
    css = page_module._asset("page.css")
    found = re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", css)
    assert len(found) > 20
    return {name: (light, dark) for name, light, dark in found}


def channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def luminance(colour: tuple[int, int, int]) -> float:
    parts = [part / 255 for part in colour]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((0x76, 0x76, 0x76), (255, 255, 255)) == pytest.approx(4.54, abs=0.005)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_pair_of_colours_can_be_read(theme: int) -> None:
    known = {name: channels(pair[theme]) for name, pair in tokens().items()}
    pairs = [
        *((ink, ground, TEXT) for ink, ground in itertools.product(INKS, GROUNDS)),
        *(("text", band, TEXT) for band in BANDS),
        *((stroke, ground, GRAPHIC) for stroke, ground in itertools.product(STROKES, GROUNDS)),
        *((bar, "surface", GRAPHIC) for bar in BARS),
    ]
    found = {(ink, ground): contrast(known[ink], known[ground]) for ink, ground, _ in pairs}
    low = {pair: round(found[pair[:2]], 2) for pair in pairs if found[pair[:2]] < pair[2]}
    assert low == {}


def test_the_bar_of_a_card_has_colours_of_its_own() -> None:
    palette = re.search(r"const PALETTE = \[([^\]]+)\]", page_module._asset("dom.js"))
    assert palette is not None
    categories = [channels(colour) for colour in re.findall(r"#[0-9a-f]{6}", palette[1])]
    assert len(categories) == len(Category)
    for name in BARS:
        for colour in map(channels, tokens()[name]):
            nearest = min(sum((a - b) ** 2 for a, b in zip(colour, one, strict=True)) for one in categories)
            assert nearest > 40**2, name


READ = """() => {
  const seen = [];
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const [red, green, blue, alpha = 1] = numbers(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return [red, green, blue];
      if (alpha > 0) throw new Error(`half transparent ground of ${at.className}`);
    }
    throw new Error("no ground");
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, style")) continue;
    const text = walker.currentNode.data.trim().slice(0, 40);
    seen.push([text, element.className, numbers(getComputedStyle(element).color).slice(0, 3), ground(element)]);
  }
  return seen; }"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "TUNE_EVENTS", 0)
        patch.setattr(advice, "PROVE_EVENTS", 0)
        yield tmp_path_factory.mktemp("contrast")


@pytest.mark.parametrize("name", ["fits", "oom", "leak", "cards", "recording"])
def test_whatever_text_is_on_the_page_can_be_read(folder: Path, show: Open, name: str) -> None:
    source: Run | MemoryTrace = {
        "fits": training,
        "oom": oom_run,
        "leak": leaking,
        "cards": two_cards,
        "recording": lambda: recording("eor-nn"),
    }[name]()
    path = folder / f"{name}.html"
    write_page(path, source, verdict(source) if isinstance(source, Run) else None)
    opened = show(path, color_scheme="light")
    opened.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    opened.page.evaluate("vramfit.current.choose(0, vramfit.current.view.moment)")
    opened.page.locator("#legend button").first.click()
    grounds = {}
    for theme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=theme)
        opened.settle()
        texts = opened.page.evaluate(READ)
        assert len(texts) > 100
        low = {
            (text, kind): (ink, ground)
            for text, kind, ink, ground in texts
            if contrast(tuple(ink), tuple(ground)) < TEXT
        }
        assert low == {}, theme
        grounds[theme] = {tuple(ground) for *_, ground in texts}
    assert grounds["light"] != grounds["dark"], "the page stayed in its theme"
