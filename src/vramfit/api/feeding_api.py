"""Batches brought ahead of their steps, from Python."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from vramfit.arguments import shown, size_argument, whole_argument
from vramfit.errors import UsageError
from vramfit.runtime.feeding.batch_feed import FedBatches
from vramfit.runtime.feeding.depth_rule import DepthRule
from vramfit.runtime.feeding.free_memory import free_for_batches
from vramfit.workload.given_device import device_or_default


def prefetch(
    loader: Iterable[Any], device: Any = None, *, depth: int | None = None, budget: int | str | None = None
) -> FedBatches:
    """A loader's batches, read and copied to the device by a thread while steps are computed.

    >>> batches = vramfit.prefetch([{"x": torch.full((2,), float(number))} for number in range(3)], "cpu")
    >>> len(batches), [batch["x"][0].item() for batch in batches]
    (3, [0.0, 1.0, 2.0])

    Order and values are the loader's; what it raises comes where the batch would have come. Leaving the loop stops the
    thread. To a card, batches go through two pinned buffers that are used again and again, on a stream beside the
    computation. On the CPU they are the loader's own, read ahead.

    Args:
        loader: any iterable of batches: tensors in dicts, lists, tuples, dataclasses or mappings such as a
            BatchEncoding. Everything else in them is handed on as it is.
        device: where batches are used; None is the current card, or the CPU where there is none.
        depth: batches that are on the device at once, the one in use among them. None begins with 2, and takes as many
            as steps pass during the slowest batch, up to 16, as far as memory that no step has used allows.
        budget: most bytes of batches on the device, such as ``"1GiB"``. A batch that alone is larger comes all the
            same when the one before is gone.

    The result's ``report`` tells how long steps waited, the depth and the bytes.

    Raises:
        UsageError: arguments are no such.
    """
    given: object = loader
    if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        raise UsageError(
            f"loader={shown(given)} gives no batches", "Give a DataLoader, or another iterable of batches"
        )
    place = device_or_default("device", device)
    fixed = None if depth is None else whole_argument("depth", depth, least=1, most=1024)
    limit = None if budget is None else size_argument("budget", budget)
    return FedBatches(loader, place, partial(DepthRule, fixed, limit, partial(free_for_batches, place)))
