"""Readings as numbers by name, for the writers that people have: TensorBoard's, wandb's, MLflow's, or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vramfit.errors import UsageError
from vramfit.watching.outlooks import device_name
from vramfit.watching.watch_reading import WatchReading


def scalars_of(reading: WatchReading) -> dict[str, float]:
    """The numbers of a reading, in bytes, degrees Celsius, watts and seconds."""
    return dict(_scalars(reading))


def _scalars(reading: WatchReading) -> Iterator[tuple[str, float]]:
    several = len(reading.programs) > 1
    for program in reading.programs:
        for device in program.devices:
            name = device_name(device).replace(":", "")
            where = f"vram/{name}_{program.pid}" if several else f"vram/{name}"
            for what in ("allocated", "reserved", "free"):
                yield f"{where}/{what}", float(getattr(device, what))
            for category, held in device.categories.items():
                yield f"{where}/{category.replace(' ', '_')}", float(held)
    for card in reading.cards:
        where = f"vram/card{card.index}"
        yield f"{where}/used", float(card.used)
        known = {"own": card.own, "temperature": card.temperature, "watts": card.watts}
        for what, value in known.items():
            if value is not None:
                yield f"{where}/{what}", float(value)
        yield f"{where}/neighbours", float(sum(one.used or 0 for one in card.neighbours))
    if reading.host is not None:
        yield "host/resident", float(reading.host.resident)
        yield "host/available", float(reading.host.available)
    for outlook in reading.outlooks:
        if outlook.seconds is not None:
            where = outlook.what.replace(" ", "_").replace(":", "")
            yield f"outlook/{where}/seconds_to_limit", outlook.seconds


class MetricWriter:
    """Hands numbers to a writer of the user's.

    Args:
        writer: one with ``add_scalar(name, value, step)`` (TensorBoard), with ``log_metric(name, value, step=)``
            (MLflow: the module or a run of a client), with ``log(values)`` (wandb: the module or a run), or a function
            of the dictionary.

    Raises:
        UsageError: it is none of these.
    """

    def __init__(self, writer: Any) -> None:
        self._hand_over = _handed(writer)

    def take(self, reading: WatchReading) -> None:
        """Hand the numbers over; the step is the optimizer's, or the seconds of the watch where none has stepped."""
        steps = max((program.steps for program in reading.programs), default=0)
        self._hand_over(scalars_of(reading), steps or round(reading.elapsed))

    def close(self) -> None:
        """Leave the writer open: it is the user's."""


def _handed(writer: Any) -> Callable[[dict[str, float], int], object]:
    if callable(getattr(writer, "add_scalar", None)):
        return lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()]
    if callable(getattr(writer, "log_metric", None)):
        return lambda values, step: [
            writer.log_metric(name, value, step=step) for name, value in values.items()
        ]
    if callable(getattr(writer, "log", None)):
        # Without a step: wandb's own counts the training's calls, and it refuses one that goes back.
        return lambda values, step: writer.log({**values, "vram/step": float(step)})
    if callable(writer):
        return lambda values, _step: writer(values)
    raise UsageError(
        f"{type(writer).__name__} is no writer of metrics",
        "Give TensorBoard's SummaryWriter, wandb's run, the module mlflow, or a function of a dictionary",
    )
