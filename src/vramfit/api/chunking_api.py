"""Inference in parts, from Python: a call in chunks, and batches by tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from vramfit.arguments import (
    call_argument,
    flag_argument,
    names_argument,
    shown,
    size_argument,
    text_argument,
    whole_argument,
)
from vramfit.errors import UsageError
from vramfit.inference.input_chunks import ChunkSettings, call_in_chunks
from vramfit.inference.peak_bound import PeakBound
from vramfit.inference.token_batches import TokenBatches, TokenBatchSettings
from vramfit.planner.batch_shapes import MakeBatch, ShapesQuestion, measure_shapes, token_ids
from vramfit.planner.chunk_choice import choose_chunk


def chunked(
    model: Callable[..., Any],
    *inputs: Any,
    named: Mapping[str, Any] | None = None,
    size: int | None = None,
    dim: int = 0,
    whole: Sequence[str] = (),
    out: Any = None,
    device: Any = None,
    output_device: Any = None,
    check: bool = True,
    budget: int | str | None = None,
    gpu: Any = None,
) -> Any:
    """Call a model on parts of its inputs and join the outputs: equal to the whole call, but for rounding.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 2))
    >>> x = torch.rand(1000, 8)
    >>> y = vramfit.chunked(model, x, size=100)
    >>> y.shape, torch.allclose(y, model(x), atol=1e-6)
    (torch.Size([1000, 2]), True)
    >>> try:
    ...     vramfit.chunked(lambda x: x - x.mean(0), x, size=100)
    ... except vramfit.VramfitError as error:
    ...     print(error.message)
    outputs of an entry depend on other entries of the batch, as a change of their values shows

    Tensors are found in dicts, lists, tuples and dataclasses, of transformers too. Those that have the size along `dim`
    that most have are cut, others go to every call whole. Outputs are allocated once and written chunk by chunk, so
    that the peak is the outputs and the work of one chunk. No gradients are computed.

    Args:
        model: a module, or any function of tensors.
        inputs: its arguments; they may lie on the host, and are moved to the device chunk by chunk.
        named: its arguments by name.
        size: entries in a chunk. Left out, `budget` decides.
        dim: the dimension: 0 for the batch, 1 for the sequence of most models.
        whole: arguments that are not to be cut though they have the size, by name or number (``"1"``).
        out: tensors that outputs are written into, in the containers of the output.
        device: where the model computes; None is where its parameters are, and for a function where the inputs are.
        output_device: where outputs are joined, such as ``"cpu"``; None is where the model leaves them.
        check: try on a few entries first that none depends on others. Not on the virtual GPU, where there are no values
            to compare: there only batch norm is refused.
        budget: what torch may reserve on the device, the model included, as ``"4GiB"``: the quickest size within it is
            found on the virtual GPU, in a process of its own; None is what is free there, less 2 %.
        gpu: the card that the size is chosen for; None is the one that is there.

    Returns:
        the outputs of all entries, in the model's containers.

    Raises:
        UsageError: entries of the outputs depend on others, outputs cannot be joined, or arguments are no such.
    """
    call_argument("model", model)
    if named is not None and not isinstance(named, Mapping):
        raise UsageError(f"named={shown(named)} names no arguments", 'Give a dict: named={"input_ids": ids}')
    flag_argument("check", check)
    call = (inputs, dict(named or {}))
    known = {*map(str, range(len(inputs))), *call[1]}
    if unknown := [name for name in names_argument("whole", whole) if name.split(".")[0] not in known]:
        raise UsageError(
            f"whole names {unknown[0]!r}, which is no argument", f"Arguments are {', '.join(sorted(known))}"
        )
    settings = ChunkSettings(
        size=1 if size is None else whole_argument("size", size, least=1),
        dim=dim,
        whole=names_argument("whole", whole),
        device=_model_device(model) if device is None else _device("device", device),
        output_device=None if output_device is None else _device("output_device", output_device),
        check=check,
    )
    if size is None:
        settings = replace(settings, size=choose_chunk(model, call, settings, budget=budget, gpu=gpu).size)
    elif budget is not None:
        raise UsageError(
            "size and budget are both given", "Give a budget to let the size be chosen, or the size itself"
        )
    return call_in_chunks(model, call, settings, out=out)


def batches(
    items: Sequence[Any] | Iterable[Any],
    *,
    peak: Callable[[int, int], float] | Mapping[tuple[int, int], float] | None = None,
    budget: int | str | None = None,
    model: nn.Module | None = None,
    make_batch: Callable[[int, int], Any] | None = None,
    gpu: Any = None,
    length: Callable[[Any], int] | None = None,
    multiple: int = 8,
    max_padding: float = 0.03,
    most_items: int = 4096,
    window: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> TokenBatches[Any]:
    """Batches of items of similar length, each as large as its predicted peak allows.

    >>> lengths = [5, 900, 40, 38, 7, 880]
    >>> plan = vramfit.batches(lengths, peak=lambda items, length: items * length**2, budget=2_000_000)
    >>> results = plan.ordered()
    >>> for batch in plan:
    ...     print(batch, list(batch))
    ...     results.add(batch, [lengths[number] for number in batch])
    <TokenBatch of 2 x 904> [1, 5]
    <TokenBatch of 2 x 40> [2, 3]
    <TokenBatch of 1 x 7> [4]
    <TokenBatch of 1 x 5> [0]
    >>> results.all() == lengths
    True

    Batches come longest first, so that one that does not fit is met at once. A loop tells what each took
    (``plan.observe(torch.cuda.max_memory_allocated())``): where the bound was too low it is raised for all that follow,
    and a batch that ran out of memory is given back in halves (``plan.split()``). A `torch.utils.data.DataLoader` takes
    the plan as its ``batch_sampler``.

    What batches take is measured where a model is given: on the virtual GPU, in a process of its own, some dozens of
    shapes and then the largest of each bucket of lengths, before anything runs here.

    Args:
        items: lengths, or items whose lengths `length` tells; a stream with `window`.
        peak: bytes that a batch takes at its highest: a function of items and length that does not fall as either
            grows, or measured bytes by pairs of them, from which a bound is made (`fitted_bound`).
        budget: bytes that a batch may take, ``"8GiB"`` or a number. With a model: what torch may reserve on the device,
            the model included; None is what is free there, less 2 %.
        model: what runs on the batches, in place of `peak`; its values stay here.
        make_batch: what the model is given for so many items of a length: a tensor, a tuple of arguments or a dict of
            them by name, on the CPU. None makes ``input_ids`` and ``attention_mask``, as transformers' models take.
        gpu: the card that shapes are measured for; None is the one that the model is on.
        length: tokens of an item; None where items are their lengths.
        multiple: lengths are rounded up to it.
        max_padding: part of the tokens that may be padding, in each bucket of lengths.
        most_items: of a batch.
        window: items of a stream that are looked at together, and so how long one waits for others.
        progress: called with what is measured.

    Raises:
        UsageError: the longest item does not fit alone, or arguments are no such.
        VramfitError: the model fails.
    """
    if (peak is None) == (model is None):
        raise UsageError(
            "batches need either peak= or model=", "Say what a batch takes, or give the model to measure it"
        )
    if model is None and budget is None:
        raise UsageError("budget is missing", 'Give the bytes that a batch may take, such as budget="8GiB"')
    settings = TokenBatchSettings(
        budget=1 if budget is None else size_argument("budget", budget),
        multiple=multiple,
        max_padding=max_padding,
        most_items=most_items,
        window=window,
    )
    tell = (lambda item: item) if length is None else call_argument("length", length)
    if model is not None:
        if window is not None:
            raise UsageError("shapes of a stream are not known before", "Give peak= in place of model=")
        lengths = tuple(_tokens(tell(item)) for item in items)
        return _measured_batches(model, make_batch or token_ids, lengths, settings, budget, gpu, progress)
    assert peak is not None
    bound = PeakBound.of(peak)
    if window is None:
        if not isinstance(items, Sequence) and not hasattr(items, "__len__"):
            raise UsageError("items come as a stream", "Give window=, how many are looked at together")
        return TokenBatches([_tokens(tell(item)) for item in items], bound, settings)
    return TokenBatches(None, bound, settings, stream=((_tokens(tell(item)), item) for item in items))


def _tokens(length: Any) -> int:
    """A length as a whole number, which tables of numbers keep as floating ones."""
    try:
        whole = isinstance(length, float | np.floating) and float(length).is_integer()
        return int(length) if whole else operator.index(length)
    except TypeError:
        raise UsageError(
            f"an item has the length {shown(length)}, which is no whole number",
            "Give lengths, or items with length=, such as length=len",
        ) from None


def _measured_batches(
    model: Any,
    make_batch: MakeBatch,
    lengths: tuple[int, ...],
    settings: TokenBatchSettings,
    budget: int | str | None,
    gpu: Any,
    progress: Callable[[str], None] | None,
) -> TokenBatches[Any]:
    """Batches within what was measured of a model."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model={shown(model)} is no module, whose structure can be looked at",
            "Give peak=, or wrap the function in a module",
        )
    call_argument("make_batch", make_batch)
    if not lengths:
        return TokenBatches([], PeakBound.of(lambda _items, _length: 1), settings)
    if min(lengths) < 1:
        raise UsageError("an item has no tokens", "Leave empty items out")
    question = ShapesQuestion(make_batch=make_batch, lengths=lengths, settings=settings)
    device = _model_device(model) or torch.device("cpu")
    found = measure_shapes(model, question, device, budget=budget, gpu=gpu, progress=progress)
    return TokenBatches(lengths, found.bound(), replace(settings, budget=found.limit))


def _device(name: str, given: Any) -> torch.device:
    if isinstance(given, torch.device):
        return given
    try:
        return torch.device(text_argument(name, given))
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise UsageError(f"{name}={shown(given)} is no device: {line}", 'Give "cuda" or "cpu"') from None


def _model_device(model: Any) -> torch.device | None:
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return None
