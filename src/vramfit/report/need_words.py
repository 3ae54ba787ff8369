"""What a program needs that ran out, and the error bar of a peak, in the words that all reports share."""

from __future__ import annotations

from vramfit.analysis import Outcome, Verdict
from vramfit.trace import Run, Source
from vramfit.units import format_bytes


def need_words(run: Run, verdict: Verdict) -> str:
    """What a program needs that does not fit, and the smallest card that has it where that is known."""
    need, card = verdict.need, verdict.smallest_gpu
    if run.source is Source.CPU:  # what kernels of a card would take beside is not among the bytes
        return f"It needs at least {format_bytes(verdict.needed)}. A larger budget shows how much in all."
    if need is not None and not need.whole:
        least = f"It needs at least {format_bytes(need.bytes)}."
        return f"{least} How much in all is not known: {need.why_not}." if need.why_not else least
    collected = need is not None and need.collected
    how = " where garbage is collected in time" if collected else ""
    text = f"It needs {format_bytes(verdict.needed)} in all{how}"
    if need is not None and need.above:
        text += f", or up to {format_bytes(need.most)}, since {verdict.bar_cause}"
    if collected and need is not None and need.most <= verdict.device.total:
        return f"{text}."
    if card is None:
        return f"{text}. No card of the catalogue has that."
    size = format_bytes(card.total_bytes)
    if need is not None and card.total_bytes < need.most:  # each card is counted with a context of its own
        size += ", with a smaller CUDA context"
    return f"{text}. The smallest card that has it is {card.name} ({size})."


def bar_words(verdict: Verdict) -> str:
    """How far the peak may be off, why, and whether that could change the answer; empty without an error bar."""
    device = verdict.device
    if verdict.outcome is Outcome.DOES_NOT_FIT:
        if not device.reserved_bar.serves:
            return ""
        return f"This request may be served on the card, since {verdict.bar_cause}."
    sides = ((device.above, "higher"), (device.below, "lower"))
    off = " or ".join(f"{format_bytes(amount)} {side}" for amount, side in sides if amount)
    if not off:
        return ""
    text = f"The peak may be up to {off}: {verdict.bar_cause}."
    return text if verdict.within_bar else f"{text} At the upper end it does not fit."
