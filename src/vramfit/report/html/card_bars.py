"""The figures of each card, and its memory as a bar with a legend."""

from __future__ import annotations

from collections.abc import Sequence

from vramfit.analysis import DeviceVerdict
from vramfit.report.html.markup import Html, figures, join, tag
from vramfit.units import format_bytes

_OPEN = 1.5
"""A bar of a card of unknown size goes on for half as much again, so that it does not look full."""


def bars_scale(devices: Sequence[DeviceVerdict]) -> float:
    """Bytes that the width of the bars stands for: the same for all cards, so that they can be compared."""
    return max(
        (device.total if _known(device) else _OPEN * _held(device) for device in devices),
        default=1,
    )


def device_figures(device: DeviceVerdict, *, several: bool, scale: float) -> Html:
    """The bar, its legend and the figures of a card.

    Args:
        device: what the verdict says about it.
        several: whether there are others, so that it needs its number.
        scale: bytes of the whole width, of `bars_scale`.
    """
    if device.index < 0:
        return Html()
    pairs = [
        ("card", f"{device.gpu}" if not several else f"GPU {device.index} {device.gpu}"),
        ("peak allocated", format_bytes(device.peak_allocated)),
        ("peak reserved", format_bytes(device.peak_reserved)),
    ]
    if device.total:
        pairs.append(("memory of the card", format_bytes(device.total)))
        pairs.append(("CUDA context", format_bytes(device.context)))
        pairs.append(("free at the peak", format_bytes(max(0, device.headroom))))
    for name, above, below in (
        ("allocated, estimated", device.error_above, device.error_below),
        ("reserved, estimated", device.reserved_bar.above, device.reserved_bar.below),
    ):
        if above or below:
            pairs.append((name, f"+{format_bytes(above)} −{format_bytes(below)}"))
    return join([_bar(device, scale), figures(pairs)])


def _parts(device: DeviceVerdict) -> list[tuple[str, int]]:
    cached = max(0, device.peak_reserved - device.peak_allocated)
    return [("allocated", device.peak_allocated), ("cached", cached), ("context", device.context)]


def _held(device: DeviceVerdict) -> int:
    return sum(amount for _, amount in _parts(device))


def _known(device: DeviceVerdict) -> bool:
    return device.total >= max(1, _held(device))


def _bar(device: DeviceVerdict, scale: float) -> Html:
    """What the program held, and what of the card was left; hatched where nobody knows how much that is."""
    parts, scale = _parts(device), max(1.0, scale, device.total, _held(device))
    at, rects = 0.0, []
    for name, amount in parts:
        width = 1000 * amount / scale
        title = tag("title", f"{name} {format_bytes(amount)}")
        rects.append(
            tag("rect", title, x=f"{at:.2f}", y=0, width=f"{width:.2f}", height=10, class_=f"of-{name}")
        )
        at += width
    whole = 1000 * device.total / scale if device.total else 1000.0
    entries = [(name, f"{name} {format_bytes(amount)}") for name, amount in parts if amount]
    if device.total:
        rects.append(
            tag("rect", x=f"{at:.2f}", y=0, width=f"{max(0.0, whole - at):.2f}", height=10, class_="of-free")
        )
        entries.append(("free", f"free {format_bytes(max(0, device.headroom))}"))
    else:
        entries.append(("unknown", "the rest of the card, of unknown size"))
    words = ", ".join(text for _, text in entries)
    label = f"{words}, of {format_bytes(device.total)}" if device.total else words
    picture = tag(
        "svg", *rects, viewBox="0 0 1000 10", preserveAspectRatio="none", role="img", aria_label=label
    )
    legend = tag(
        "ul",
        *(tag("li", tag("span", "", class_=f"swatch of-{kind}"), text) for kind, text in entries),
        tag("li", f"of {format_bytes(device.total)}", class_="quiet") if device.total else None,
        class_="legend",
    )
    kind = "bar-card" if device.total else "bar-card of-unknown"
    return join([tag("div", picture, class_=kind), legend])
