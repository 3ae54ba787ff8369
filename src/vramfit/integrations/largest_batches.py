"""The largest batch for what people train with: a DataLoader, Lightning, transformers' Trainer, Accelerate.

None of these libraries is imported here: what they made is used as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from vramfit.api.largest_batch_api import largest_batch
from vramfit.errors import UsageError
from vramfit.integrations.plan_callbacks import put
from vramfit.runtime.largest_batch import LargestBatch, sized
from vramfit.training_state.random_generators import GeneratorStates
from vramfit.workload import to_device

_LOOKED_AT = 10_000
"""Items of a data set whose lengths are looked at where none is told: evenly over all of it."""


def worst_batches(
    loader: DataLoader[Any], length: Callable[[Any], float] | None = None
) -> Callable[[int], Any]:
    """What makes batches of any size of a loader's longest item, by the loader's own collate function.

    Args:
        loader: over a data set with numbers; its sampler and its workers are not touched.
        length: of an item; None counts the elements of its tensors, lists and texts. Up to 10,000 items are looked at.

    Raises:
        UsageError: the data set is a stream.
    """
    data: Any = loader.dataset
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not len(data):
        raise UsageError(
            "the loader's data set has no items by number, of which the longest could be taken",
            "Give make_batch=, which makes the largest batch that may come",
        )
    state = GeneratorStates.of(torch.device("cpu"))
    every = max(1, len(data) // _LOOKED_AT)
    longest = max((data[number] for number in range(0, len(data), every)), key=length or _elements)
    state.restore()
    collate: Any = loader.collate_fn
    return sized([longest], collate)


def loader_of_size(loader: DataLoader[Any], size: LargestBatch | int) -> DataLoader[Any]:
    """The same loader with batches of another size: its data set, order, workers and collate function.

    Raises:
        UsageError: it has a batch sampler of its own, or none.
    """
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler:
        raise UsageError(
            f"the loader's batches are made by {type(sampler).__name__}, whose size is its own matter",
            "Make the loader anew with the size",
        )
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        batch_sampler=BatchSampler(sampler.sampler, int(size), sampler.drop_last),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **workers,
    )


def largest_for_loader(
    loader: DataLoader[Any],
    step: Callable[[Any], Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    length: Callable[[Any], float] | None = None,
    **options: Any,
) -> tuple[LargestBatch, DataLoader[Any]]:
    """The largest batch of a loader's longest item that steps fit with, and the loader with it.

    Args:
        step: one whole step on a batch, as the loader gives it.
        length: as of `worst_batches`.
        options: of `vramfit.largest_batch`.
    """
    options = {"most": _items(loader), **options}
    found = largest_batch(step, worst_batches(loader, length), model=model, optimizer=optimizer, **options)
    return found, loader_of_size(loader, found)


def largest_for_lightning(
    module: nn.Module,
    loader: DataLoader[Any],
    *,
    length: Callable[[Any], float] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> LargestBatch:
    """The largest batch for a LightningModule's ``training_step``; where it is on its device already.

    Set the size where the module or the data module reads it, before ``trainer.fit`` or in ``on_fit_start``. A
    trainer's callbacks, loggers and loops are not run.

    Args:
        optimizer: None takes the first that ``configure_optimizers`` makes.
        options: of `vramfit.largest_batch`.

    Raises:
        UsageError: the module steps its optimizers itself.
    """
    live: Any = module
    if not live.automatic_optimization:
        raise UsageError(
            "the module steps its optimizers itself (automatic_optimization = False)",
            "Call vramfit.largest_batch with a step of your own",
        )
    chosen = optimizer or _first_optimizer(live.configure_optimizers())
    device = next(module.parameters()).device
    logged = vars(live).get("log"), vars(live).get("log_dict")

    def step(batch: Any) -> None:
        chosen.zero_grad()
        found = live.training_step(to_device(batch, device), 0)
        (found["loss"] if isinstance(found, dict) else found).backward()
        chosen.step()

    live.__dict__["log"] = live.__dict__["log_dict"] = lambda *_, **__: None
    try:
        return largest_batch(
            step,
            worst_batches(loader, length),
            model=module,
            optimizer=chosen,
            **{"most": _items(loader), **options},
        )
    finally:
        for name, before in zip(("log", "log_dict"), logged, strict=True):
            del live.__dict__[name]
            if before is not None:
                live.__dict__[name] = before


def largest_for_trainer(
    trainer: Any, *, length: Callable[[Any], float] | None = None, **options: Any
) -> LargestBatch:
    """The largest ``per_device_train_batch_size`` for a Trainer of transformers, before ``trainer.train()``.

    Its ``training_step`` and optimizer are used, with its data collator over the longest item of its data set. The
    Trainer's arguments stay as they are: set the size, and make the Trainer anew or set ``train_batch_size``.

    Args:
        length: of an item, as of `worst_batches`.
        options: of `vramfit.largest_batch`.
    """
    data = trainer.train_dataset
    if data is None or not hasattr(data, "__len__"):
        raise UsageError(
            "the Trainer's data set has no items by number", "Call vramfit.largest_batch yourself"
        )
    made = trainer.optimizer is None
    optimizer = _inner(trainer.create_optimizer())
    loader: DataLoader[Any] = DataLoader(data, collate_fn=trainer.data_collator)

    def step(batch: Any) -> None:
        trainer.training_step(trainer.model, batch)
        optimizer.step()
        optimizer.zero_grad()

    # What training_step divides losses by; the loop sets it (transformers/trainer.py, _inner_training_loop).
    accumulated = trainer.args.gradient_accumulation_steps
    back = put(trainer, "current_gradient_accumulation_steps", accumulated)
    try:
        with _accelerate_as_found(trainer.accelerator):
            return largest_batch(
                step,
                worst_batches(loader, length),
                model=trainer.model,
                optimizer=optimizer,
                others=_scalers(trainer.accelerator),
                **{"most": len(data), **options},
            )
    finally:
        back()
        if made:
            trainer.optimizer = None


def largest_for_accelerator(
    accelerator: Any,
    step: Callable[[Any], Any],
    make_batch: Callable[[int], Any] | Sequence[Callable[[int], Any]],
    *,
    model: nn.Module,
    optimizer: Any,
    others: Sequence[Any] = (),
    **options: Any,
) -> LargestBatch:
    """The largest batch for a loop with Accelerate, in place of ``find_executable_batch_size``.

    Args:
        accelerator: its scaler and its count of steps are left as found too.
        step: one whole step as the loop makes it, with ``accelerator.backward``.
        make_batch, others, options: of `vramfit.largest_batch`.
        model: as ``accelerator.prepare`` gave it.
        optimizer: the same, or the one within.
    """
    with _accelerate_as_found(accelerator):
        return largest_batch(
            step,
            make_batch,
            model=model,
            optimizer=_inner(optimizer),
            others=[*others, *_scalers(accelerator)],
            **options,
        )


@contextlib.contextmanager
def _accelerate_as_found(accelerator: Any) -> Any:
    """Accelerate's own counts of steps, by which it knows when gradients are complete, put back afterwards."""
    before = accelerator.step, accelerator.gradient_state.sync_gradients
    try:
        yield
    finally:
        accelerator.step = before[0]
        accelerator.gradient_state._set_sync_gradients(before[1])


def _scalers(accelerator: Any) -> list[Any]:
    return [] if accelerator.scaler is None else [accelerator.scaler]


def _inner(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper, or itself."""
    return getattr(optimizer, "optimizer", optimizer)


def _first_optimizer(found: Any) -> torch.optim.Optimizer:
    """The first optimizer of what ``configure_optimizers`` gives.

    Raises:
        UsageError: it gives no optimizer.
    """
    if isinstance(found, dict):
        found = found.get("optimizer")
    if isinstance(found, list | tuple) and found:
        return _first_optimizer(found[0])
    if not isinstance(found, torch.optim.Optimizer):
        raise UsageError("configure_optimizers gives no optimizer", "Give optimizer=")
    return found


def _items(loader: DataLoader[Any]) -> int:
    """How many items a loader's data set has: no batch is larger."""
    data: Any = loader.dataset
    return len(data) if hasattr(data, "__len__") and len(data) else 1 << 20


def _elements(item: Any) -> float:
    """How large an item is."""
    if isinstance(item, torch.Tensor):
        return item.numel()
    if isinstance(item, dict):
        return sum(map(_elements, item.values()))
    if isinstance(item, list | tuple):
        return sum(map(_elements, item))
    return len(item) if isinstance(item, str | bytes) else getattr(item, "size", 1)
