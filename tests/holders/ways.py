"""Twenty-two ways of keeping a tensor alive, each with the owner chain that tells it."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from vramfit.holders.chains import Root, Through

held: dict[str, Any] = {}


def key(tensor: Tensor) -> int:
    """The storage of a tensor, without a variable that holds it."""
    return tensor.untyped_storage()._cdata


class Registry:
    entries: list[Tensor] = []  # noqa: RUF012  # a mutable class attribute is the leak


class Slotted:
    __slots__ = ("value",)


class Bag:
    pass


@functools.cache
def remember(size: int) -> Tensor:
    return torch.ones(size)


@functools.lru_cache(maxsize=4)
def remember_few(size: int) -> Tensor:
    return torch.ones(size)


def in_a_list() -> int:
    held["history"] = [{}, {"loss": torch.ones(3)}]
    return key(held["history"][1]["loss"])


def in_a_class() -> int:
    Registry.entries.append(torch.ones(3))
    return key(Registry.entries[0])


def in_a_graph() -> int:
    layer = nn.Linear(4, 4)
    hidden = layer(torch.ones(2, 4)).relu()
    held["loss"] = (hidden * hidden).mean()
    return key(hidden)


def in_a_deep_graph() -> int:
    start = torch.ones(3, requires_grad=True)
    value = start.sin()
    for _ in range(300):  # more tensors than a search follows
        value = (value * 1.01).sin()
    held["last"] = value
    return key(start)


def in_a_closure() -> int:
    cache: list[Tensor] = []

    def step() -> None:
        cache.append(torch.ones(3))

    step()
    held["step"] = step
    return key(cache[0])


def in_a_cache() -> int:
    return key(remember(3))


def in_a_bounded_cache() -> int:
    return key(remember_few(3))


def in_a_traceback() -> int:
    found = []

    def fails() -> None:
        batch = torch.ones(3)
        found.append(key(batch))
        raise ValueError("no")

    try:
        fails()
    except ValueError as error:
        held["errors"] = [error]
    return found[0]


def in_a_thread_local() -> int:
    held["local"] = threading.local()
    held["local"].buffer = [torch.ones(3)]
    return key(held["local"].buffer[0])


def in_a_generator() -> int:
    found = []

    def batches() -> Generator[None]:
        batch = torch.ones(3)
        found.append(key(batch))
        yield
        del batch

    held["loader"] = batches()
    next(held["loader"])
    return found[0]


class Pause:
    def __await__(self) -> Generator[None]:
        yield


def in_a_coroutine() -> int:
    found = []

    async def serve() -> None:
        batch = torch.ones(3)
        found.append(key(batch))
        await Pause()
        del batch

    held["task"] = serve()
    held["task"].send(None)
    return found[0]


def in_a_hook() -> int:
    layer = held["layer"] = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, inputs, output, kept=[]: kept.append(output))
    output = layer(torch.ones(1, 2))
    return key(output)


def in_a_buffer() -> int:
    held["model"] = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return key(held["model"][1].running_mean)


def in_a_gradient() -> int:
    held["layers"] = nn.Linear(2, 2, bias=False)
    held["layers"](torch.ones(1, 2)).sum().backward()
    return key(held["layers"].weight.grad)


def in_optimizer_state() -> int:
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    held["optimizer"] = torch.optim.Adam([parameter])
    held["optimizer"].step()
    return key(held["optimizer"].state[parameter]["exp_avg"])


def in_a_slot() -> int:
    held["slotted"] = Slotted()
    held["slotted"].value = torch.ones(3)
    return key(held["slotted"].value)


def in_a_queue() -> int:
    held["queue"] = queue.Queue()
    held["queue"].put(torch.ones(3))
    return key(held["queue"].queue[0])


def in_a_partial() -> int:
    held["call"] = functools.partial(print, torch.ones(3))
    return key(held["call"].args[0])


def in_a_weakref_callback() -> int:
    held["watched"] = Bag()
    held["reference"] = weakref.ref(held["watched"], functools.partial(print, torch.ones(3)))
    return key(held["reference"].__callback__.args[0])


def packed_by_a_hook() -> int:
    found = []

    def pack(tensor: Tensor) -> tuple[int, Tensor]:
        copy = tensor.detach().clone()
        found.append(key(copy))
        return 1, copy

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
        held["packed"] = torch.ones(3, requires_grad=True).exp().sum()
    return found[0]


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.scratch = value * 3
        held["storage"] = key(ctx.scratch)
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def in_a_context() -> int:
    held["output"] = Keeps.apply(torch.ones(3, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    return int(held["storage"])


def through_a_view() -> int:
    whole = torch.ones(100)
    held["view"] = whole[3:5].reshape(2, 1)
    return key(whole)


WAYS: list[tuple[Callable[[], int], Root, str, set[Through]]] = [
    (in_a_list, Root.GLOBAL, "held['history'][1]['loss']", set()),
    (in_a_class, Root.CLASS, "Registry.entries[0]", set()),
    (in_a_graph, Root.GLOBAL, "held['loss'] -> grad_fn MeanBackward0 -> MulBackward0 saved", {Through.AUTOGRAD}),
    (in_a_deep_graph, Root.GLOBAL,
     "held['last'] -> grad_fn SinBackward0 -> MulBackward0 -> … -> SinBackward0 saved self", {Through.AUTOGRAD}),
    (in_a_closure, Root.GLOBAL, "held['step'] -> closure cache[0]", {Through.CLOSURE}),
    (in_a_cache, Root.GLOBAL, "remember -> cached result", {Through.CACHE}),
    (in_a_bounded_cache, Root.GLOBAL, "remember_few -> cached result", {Through.CACHE}),
    (in_a_traceback, Root.GLOBAL, "held['errors'][0] ValueError traceback -> in_a_traceback.<locals>.fails()",
     {Through.TRACEBACK}),
    (in_a_thread_local, Root.GLOBAL, "held['local'].buffer[0]", {Through.THREAD_LOCAL}),
    (in_a_generator, Root.GLOBAL, "held['loader'] -> suspended in_a_generator.<locals>.batches()",
     {Through.GENERATOR}),
    (in_a_coroutine, Root.GLOBAL, "held['task'] -> suspended in_a_coroutine.<locals>.serve()", {Through.GENERATOR}),
    (in_a_hook, Root.GLOBAL, "held['layer']._forward_hooks[", {Through.HOOK, Through.DEFAULT, Through.MODULE}),
    (in_a_buffer, Root.GLOBAL, "held['model'].1.running_mean", {Through.MODULE}),
    (in_a_gradient, Root.GLOBAL, "held['layers'].weight.grad", {Through.MODULE, Through.GRADIENT}),
    (in_optimizer_state, Root.GLOBAL, "held['optimizer'].state[<Parameter (2, 3)>]['exp_avg']", {Through.OPTIMIZER}),
    (in_a_slot, Root.GLOBAL, "held['slotted'].value", set()),
    (in_a_queue, Root.GLOBAL, "held['queue'].queue[0]", set()),
    (in_a_partial, Root.GLOBAL, "held['call'] -> partial arguments[0]", set()),
    (in_a_weakref_callback, Root.GLOBAL, "held['reference'] -> callback of a weak reference -> partial arguments[0]",
     {Through.WEAKREF_CALLBACK}),
    (packed_by_a_hook, Root.GLOBAL,
     "held['packed'] -> grad_fn SumBackward0 -> ExpBackward0 saved result (packed by a hook)[1]", {Through.AUTOGRAD}),
    (in_a_context, Root.GLOBAL, "held['output'] -> grad_fn SumBackward0 -> KeepsBackward.scratch", {Through.AUTOGRAD}),
    (through_a_view, Root.GLOBAL, "held['view']", set()),
]  # fmt: skip
