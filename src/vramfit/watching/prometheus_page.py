"""Readings as metrics of Prometheus over HTTP, by prometheus-client.

Names and units follow prometheus.io/docs/practices/naming.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from vramfit.errors import UsageError
from vramfit.watching.outlooks import device_name
from vramfit.watching.watch_reading import WatchReading

HOST = "127.0.0.1"
"""Where it listens unless another address is given: this machine alone."""

_DEVICE = ("allocated", "reserved", "peak", "free", "total")
_LABELS = {
    "device": ("pid", "device", "name"),
    "category": ("pid", "device", "name", "category"),
    "card": ("card", "name"),
    "neighbour": ("card", "name", "pid", "process"),
    "outlook": ("figure",),
}


class PrometheusPage:
    """Serves the latest reading until it is closed.

    Args:
        port: to listen on; 0 takes a free one.
        host: the address.

    Attributes:
        port: that it listens on.

    Raises:
        UsageError: prometheus-client is not installed, or the port is taken.
    """

    def __init__(self, port: int, host: str = HOST) -> None:
        try:
            self._client = importlib.import_module("prometheus_client")
            self._core = importlib.import_module("prometheus_client.core")
        except ImportError:
            raise UsageError(
                "metrics for Prometheus need prometheus-client, which is not installed",
                "Install it: pip install 'vramfit[watch]'",
            ) from None
        self._last: WatchReading | None = None
        registry = self._client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = self._client.start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"cannot listen on {host}:{port}: {reason}", "Choose another port, or 0 for a free one"
            ) from error
        self.port: int = self._server.server_port

    def take(self, reading: WatchReading) -> None:
        """Serve this one from now on."""
        self._last = reading

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def describe(self) -> list[Any]:
        """Nothing: which metrics there are depends on the program."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics of the latest reading, as prometheus-client asks for them."""
        reading = self._last
        if reading is None:
            return
        yield from self._of_programs(reading)
        yield from self._of_cards(reading)
        if (host := reading.host) is not None:
            for what, value in (
                ("resident", host.resident),
                ("available", host.available),
                ("group_limit", host.limit),
                ("group_used", host.limit_used),
            ):
                if value is not None:
                    yield self._gauge(f"vramfit_host_{what}_bytes", "Memory of the host.", (), [((), value)])
        rows = [((one.what,), one.per_second) for one in reading.outlooks if one.trend != "unknown"]
        yield self._gauge("vramfit_growth_bytes_per_second", "Slope of a figure.", _LABELS["outlook"], rows)
        ends = [((one.what,), one.seconds) for one in reading.outlooks if one.seconds is not None]
        yield self._gauge(
            "vramfit_time_to_limit_seconds", "Until a figure reaches its limit.", _LABELS["outlook"], ends
        )

    def _of_programs(self, reading: WatchReading) -> Iterator[Any]:
        devices = [(program, device) for program in reading.programs for device in program.devices]
        for what in _DEVICE:
            rows = [
                ((str(program.pid), device_name(device), device.name), getattr(device, what))
                for program, device in devices
            ]
            yield self._gauge(
                f"vramfit_{what}_bytes", f"{what} bytes of torch's allocator.", _LABELS["device"], rows
            )
        purposes = [
            ((str(program.pid), device_name(device), device.name, category), held)
            for program, device in devices
            for category, held in device.categories.items()
        ]
        yield self._gauge(
            "vramfit_category_bytes", "Allocated bytes by purpose.", _LABELS["category"], purposes
        )
        steps = self._core.CounterMetricFamily("vramfit_steps", "Steps of the optimizer.", labels=("pid",))
        for program in reading.programs:
            steps.add_metric((str(program.pid),), program.steps)
        yield steps

    def _of_cards(self, reading: WatchReading) -> Iterator[Any]:
        for name, field, text in (
            ("vramfit_card_used_bytes", "used", "Bytes of a card in use, by the driver."),
            ("vramfit_card_own_bytes", "own", "Bytes of the watched process on a card, by the driver."),
            ("vramfit_card_temperature_celsius", "temperature", "Temperature of a card."),
            ("vramfit_card_power_watts", "watts", "Power that a card draws."),
        ):
            rows = [
                ((str(card.index), card.name), value)
                for card in reading.cards
                if (value := getattr(card, field)) is not None
            ]
            yield self._gauge(name, text, _LABELS["card"], rows)
        others = [
            ((str(card.index), card.name, str(other.pid), other.name), other.used)
            for card in reading.cards
            for other in card.neighbours
            if other.used is not None
        ]
        yield self._gauge(
            "vramfit_neighbour_bytes", "Bytes of other processes.", _LABELS["neighbour"], others
        )

    def _gauge(self, name: str, text: str, labels: tuple[str, ...], rows: list[Any]) -> Any:
        family = self._core.GaugeMetricFamily(name, text, labels=labels)
        for values, value in rows:
            family.add_metric(values, value)
        return family
