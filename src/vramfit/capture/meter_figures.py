"""What a meter's devices hold now, for who watches the process: a virtual GPU's, or the metered CPU's.

It only looks: what waits to be given back is given back by the program's own thread, so that a watch changes nothing of
the order in which memory is taken and returned.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vramfit.capture.storages import StorageMeter
from vramfit.trace import Category
from vramfit.watching.torch_figures import HeldBytes
from vramfit.watching.watch_reading import DeviceUse

REST = "workspaces and rounding"


class MeterFigures:
    """The figures of the devices of a meter.

    Args:
        meter: of this process.
        kind: ``virtual`` or ``metered``.
        total: bytes of the device, where its specification says none that counts.
    """

    def __init__(self, meter: StorageMeter[Any], kind: str, total: int | None = None) -> None:
        self._meter, self._kind, self._total = meter, kind, total

    def held(self) -> dict[int, HeldBytes]:
        """What each device that is in use holds."""
        if threading.current_thread() is threading.main_thread():  # the program's own
            self._meter.collect()
        return {
            device.index: HeldBytes(
                device.allocator.figures()[0],
                device.allocator.peak_allocated_bytes,
                device.allocator.inactive_split_bytes,
            )
            for device in self._used()
        }

    def devices(self, *, categories: bool) -> Iterable[DeviceUse]:
        """The figures of each device whose allocator has been used."""
        sums = self._sums() if categories else {}
        for device in self._used():
            allocated, _, reserved = device.allocator.figures()
            total = device.spec.total_bytes if self._total is None else self._total
            free = max(0, total - reserved) if self._total is not None else device.driver.free_bytes
            known = dict(sums.get(device.index, {}))
            if known:  # libraries' workspaces have no storages, and blocks are rounded
                known[REST] = max(0, allocated - sum(known.values()))
            yield DeviceUse(
                index=device.index,
                name=device.spec.name,
                kind=self._kind,
                allocated=allocated,
                reserved=reserved,
                peak=device.allocator.peak_allocated_bytes,
                free=free,
                total=total,
                split=device.allocator.inactive_split_bytes,
                categories=known,
            )

    def _used(self) -> list[Any]:
        return [one for one in self._meter.machine.devices if getattr(one, "allocator_used", True)]

    def _sums(self) -> dict[int, Counter[str]]:
        """Bytes by device and category."""
        sums: dict[int, Counter[str]] = {}
        with contextlib.suppress(RuntimeError), self._meter.lock:  # the program made storages meanwhile
            for record in list(self._meter._records.values()):
                if record.address and record.row >= 0:
                    name = Category(record.category).name.lower().replace("_", " ")
                    sums.setdefault(record.device, Counter())[name] += record.nbytes
        return sums
