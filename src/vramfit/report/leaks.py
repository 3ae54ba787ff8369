"""What grows from step to step, in the terminal and as JSON: how fast, who allocates it, who holds it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from rich.text import Text

from vramfit.analysis import (
    NAMES,
    GrowingStack,
    LeakPlace,
    LeakReport,
    LeakVerdict,
    Release,
    StepSource,
    short_location,
)
from vramfit.holders.chains import Root
from vramfit.report.folding import NARROW
from vramfit.report.json_report import frame_to_json
from vramfit.report.rendering import json_values, printed_as_page
from vramfit.report.sections import SIZE, STYLES, Sections
from vramfit.report.text import elide_left, short_op
from vramfit.units import counted, format_bytes

_GROWING, _SETTLED, _SAWTEETH = 12, 3, 3
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


def per_step(report: LeakReport, amount: float) -> str:
    """``4.00 MiB per step``."""
    return f"{format_bytes(amount)} per {report.steps.unit}"


@printed_as_page(LeakReport)
class LeakLines(Sections):
    """The parts of the report for one width."""

    def lines(self, report: LeakReport) -> Iterator[Text]:
        """All lines of the report."""
        yield from self.headline(report)
        if report.growing:
            yield Text()
            yield from self.growing(report)
        if report.settled:
            yield Text()
            yield from self.settled(report)
        if report.sawteeth:
            yield Text()
            yield from self.sawteeth(report)

    def headline(self, report: LeakReport) -> Iterator[Text]:
        """The answer, and what it rests on."""
        count, unit = max(0, len(report.steps) - 1), report.steps.unit
        speed = per_step(report, report.bytes_per_step)
        if report.verdict is LeakVerdict.GROWING:
            spread = "" if report.growing else ", spread over many lines: none of them stands out"
            yield from self.wrapped(Text.assemble(("! memory grows", "bold red"), f" by {speed}{spread}"))
        elif report.verdict is LeakVerdict.SUSPECTED:
            text = (
                f" by {speed}. The steps are guessed, and a sequence being generated looks alike: set marks"
            )
            yield from self.wrapped(Text.assemble(("? memory grows", "bold yellow"), text))
        elif report.verdict is LeakVerdict.NO_STEPS:
            text = (
                " repeats in this trace, so that a leak cannot be told from a program that builds something"
            )
            yield from self.wrapped(Text.assemble(("? nothing", "bold yellow"), text))
        elif report.verdict is LeakVerdict.STEADY:
            rounds = (
                count - 1 if report.steps.source is StepSource.GIVEN else count
            )  # the end has a level of its own
            noun = unit.partition(" ")[0]
            text = f" from {noun} to {noun} beyond chance in {rounds} {_plural(unit)}"
            yield from self.wrapped(Text.assemble(("✓ no memory grows", "bold green"), text))
            rises, falls = _moves(report.levels[report.warmup :])
            if rises > 1 and not falls:
                text = f"  yet it rose in {rises} of them and never fell: more of them would tell"
                yield from self.wrapped(Text(text, style="yellow"))
        else:
            more = f": {count} seen, {report.least_steps} needed to tell growth from chance"
            if report.steps.source is StepSource.GIVEN:
                more = f": {count - 1 - report.warmup} after the warm-up; 5 are needed to tell growth from chance"
            yield from self.wrapped(Text.assemble(("? too few steps", "bold yellow"), more))
        if report.levels:
            found = (
                "given"
                if report.steps.source is StepSource.GIVEN
                else f"found by {report.steps.source.value}"
            )
            text = (
                f"  {counted(count, 'level')}, {found}, the first {report.warmup} left out as warm-up; "
                f"p = {report.p_value:.2g}, {counted(report.tested, 'stack')} tested at {report.alpha:g}"
            )
            yield from self.wrapped(Text(text, style="bright_black"))
            ends = f" {format_bytes(min(report.levels))} to {format_bytes(max(report.levels))}"
            sparks = _spark(report.levels, min(_SPARK_WIDTH, self.width - 2))
            yield Text.assemble("  ", (sparks, "cyan"), ends)

    def growing(self, report: LeakReport) -> Iterator[Text]:
        """Each stack that grows, with its owners."""
        title = "What grows" if report.verdict is not LeakVerdict.TOO_FEW_STEPS else "What grew in every step"
        unit = "step" if report.steps.source is not StepSource.GIVEN else "round"
        heads = f"{f'per {unit}':>{SIZE}}{'in all':>{SIZE + 2}}"
        yield self.heading(title, heads if self.width >= NARROW else "")
        for stack in report.growing[:_GROWING]:
            yield from self.stack(stack, _since(report, stack.first_step), unit)
        if (more := len(report.growing) - _GROWING) > 0:
            rest = sum(stack.bytes_per_step for stack in report.growing[_GROWING:])
            yield Text(f"  {counted(more, 'stack')} more: {format_bytes(rest)} in all", style="bright_black")

    def stack(self, stack: GrowingStack, since: str, unit: str) -> Iterator[Text]:
        """One stack, what its bytes are, and who holds them."""
        speed, grown = format_bytes(stack.bytes_per_step), format_bytes(stack.grown_bytes)
        where = self.where(stack.place)
        if self.width < NARROW:
            rates = Text.assemble(f"  {speed} per {unit}, {grown} in all: ", (where, "bold"))
            yield from self.wrapped(rates, indent=4)
        else:
            head = f"  {speed:>{SIZE}}{grown:>{SIZE + 2}}  "
            yield Text.assemble(head, (elide_left(where, self.width - len(head)), "bold"))
        p = f"p = {stack.p_value:.2g}" + (
            f" ({stack.adjusted_p:.2g} of all)" if stack.adjusted_p > stack.p_value else ""
        )
        evenly = f", every {stack.every} {unit}s" if stack.every > 1 else ""
        facts = f"{self.what(stack.place)}; {since}{evenly}, {counted(stack.blocks, 'block')}, {p}"
        yield from self.wrapped(Text(f"      {facts}", style=STYLES[stack.place.category]), indent=6)
        if stack.release is Release.COLLECTOR:
            text = "      dead: nothing reaches it, only the garbage collector frees it (reference cycles)"
            yield Text(text, style="yellow")
        for owner in stack.owners:
            told = owner.cycle or not owner.links or owner.root is Root.HIDDEN  # says itself who holds it
            said = owner.text if told else f"held by {owner.text}"
            through = ", ".join(sorted(kind.value for kind in owner.through))
            yield from self.wrapped(Text(f"      {said}" + (f"  ({through})" if through else "")), indent=8)

    def settled(self, report: LeakReport) -> Iterator[Text]:
        """What grew and stopped."""
        yield self.heading("Grew and stopped", "no leak: caches that filled")
        for one in report.settled[:_SETTLED]:
            text = (
                f"  {format_bytes(one.grown_bytes):>{SIZE}}  {self.where(one.place)}, until {one.last_step}"
            )
            yield Text(text, style="bright_black")

    def sawteeth(self, report: LeakReport) -> Iterator[Text]:
        """What is freed all at once."""
        yield self.heading(
            "Freed at one blow", "no leak: reference cycles until they are collected, lists emptied"
        )
        for one in report.sawteeth[:_SAWTEETH]:
            text = (
                f"  {format_bytes(one.most_bytes):>{SIZE}}  {self.where(one.place)}, "
                f"{counted(one.times, 'time')}, up to {one.steps} steps at once"
            )
            yield Text(text, style="bright_black")

    def where(self, place: LeakPlace) -> str:
        """The user's line, else a library's, else the module."""
        line = short_location(place.line or place.library_line, root=self.root)
        return line or place.module or "no stack recorded"

    def what(self, place: LeakPlace) -> str:
        """Tensor, operator, category and module."""
        parts = [
            place.tensor.replace(", ", ","),
            short_op(place.op),
            NAMES[place.category],
            f"in {place.module}" if place.module else "",
        ]
        text = " ".join(part for part in parts if part)
        return text if place.kinds == 1 else f"{text} and {counted(place.kinds - 1, 'other kind')}"


def _since(report: LeakReport, step: int) -> str:
    """``since step 3``; rounds are counted from 1, the warm-up's among them."""
    return f"since {report.steps.unit.partition(' ')[0]} {step}"


def _plural(unit: str) -> str:
    """``steps``, ``repeats of train.py:12``."""
    noun, _, rest = unit.partition(" ")
    return f"{noun}s {rest}".rstrip()


def _moves(levels: tuple[int, ...]) -> tuple[int, int]:
    """How often a series rises and falls."""
    steps = [after - before for before, after in pairwise(levels)]
    return sum(step > 0 for step in steps), sum(step < 0 for step in steps)


def _spark(levels: tuple[int, ...], most: int) -> str:
    """The levels as a line of bars from the lowest to the highest, at most ``most`` of them."""
    step = -(-len(levels) // most)
    shown = levels[::step]
    least, most = min(shown), max(shown)
    return "".join(_SPARKS[round((level - least) * 7 / max(most - least, 1))] for level in shown)


@json_values.register(LeakReport)
def _json_values(report: LeakReport) -> dict[str, Any]:
    """What grows as values that `json` can write. Sizes are bytes."""
    return {
        "device": report.device,
        "verdict": report.verdict.name.lower(),
        "leaks": report.leaks,
        "steps": {
            "source": report.steps.source.value,
            "unit": report.steps.unit,
            "count": max(0, len(report.steps) - 1),
            "warmup": report.warmup,
            "least": report.least_steps,
        },
        "alpha": report.alpha,
        "p_value": report.p_value,
        "stacks_tested": report.tested,
        "bytes_per_step": report.bytes_per_step,
        "levels": list(report.levels),
        "growing": [_growing_json(stack) for stack in report.growing],
        "settled": [
            {**_place_json(one.place), "grown_bytes": one.grown_bytes, "last_step": one.last_step}
            for one in report.settled
        ],
        "sawteeth": [
            {**_place_json(one.place), "most_bytes": one.most_bytes, "times": one.times, "steps": one.steps}
            for one in report.sawteeth
        ],
    }


def _growing_json(stack: GrowingStack) -> dict[str, Any]:
    return {
        **_place_json(stack.place),
        "bytes_per_step": stack.bytes_per_step,
        "requested_per_step": stack.requested_per_step,
        "grown_bytes": stack.grown_bytes,
        "blocks": stack.blocks,
        "first_step": stack.first_step,
        "every_steps": stack.every,
        "p_value": stack.p_value,
        "adjusted_p": stack.adjusted_p,
        "release": stack.release.name.lower(),
        "owners": [
            {
                "root": owner.root.value,
                "text": owner.text,
                "through": sorted(kind.value for kind in owner.through),
                "cycle": list(owner.cycle),
            }
            for owner in stack.owners
        ],
    }


def _place_json(place: LeakPlace) -> dict[str, Any]:
    return {
        "line": frame_to_json(place.line),
        "library_line": frame_to_json(place.library_line),
        "stack": [frame_to_json(frame) for frame in place.frames],
        "category": place.category.name.lower(),
        "op": place.op or None,
        "module": place.module or None,
        "tensor": place.tensor or None,
    }
