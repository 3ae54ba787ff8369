"""Python objects from other ranks: taken to equal this rank's, or read from the mailbox of ranks that run beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.names import in_signature_of
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.ranks.mailbox import Mailbox
from vramfit.virtual.ranks.rank_place import RankPlace


def install(mode: OpRunner, place: RankPlace, mailbox: Mailbox, patches: PatchStack) -> None:
    """Follow the bytes of objects that torch pickles, and give a rank those of the ranks that are not there."""
    _follow_bytes(mode, patches)
    if place.world_size > 1:
        objects = RankObjects(mode, mailbox)
        pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
            (c10d.broadcast_object_list, objects.broadcast),
            (c10d.scatter_object_list, objects.scatter),
            (c10d.send_object_list, objects.send),
            (c10d.recv_object_list, objects.receive),
        ]
        patches.rebind(
            [(original, in_signature_of(distributed.OBJECTS, original, ours)) for original, ours in pairs]
        )


def _follow_bytes(mode: OpRunner, patches: PatchStack) -> None:
    """Follow the bytes of every Python object that torch pickles for a collective, however large it is.

    ``all_gather_object`` and the like pickle an object into a tensor of bytes, move that to the card, and unpickle
    what comes back. The virtual card follows values of small tensors only, and a vocabulary is larger.
    """
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]] = distributed.object_to_tensor.get()

    def object_to_tensor(obj: Any, device: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pickled, size = original(obj, torch.device("cpu"), *rest)
        moved, moved_size = pickled.to(device), size.to(device)
        if type(moved) is FakeTensor and mode.shadows.find(moved) is None:
            mode.shadows.set(moved, pickled)
        return moved, moved_size

    distributed.object_to_tensor.replace(patches, object_to_tensor)


class RankObjects:
    """``torch.distributed``'s functions for objects, as one rank without the others does them.

    Each takes the memory that torch's own takes, by doing what it does with this rank's objects.
    """

    def __init__(self, mode: OpRunner, mailbox: Mailbox) -> None:
        self._mode = mode
        self._mailbox = mailbox
        self._broadcast = c10d.broadcast_object_list
        self._scatter = c10d.scatter_object_list
        self._send = c10d.send_object_list

    def broadcast(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        """The root's objects where it runs beside this rank; else the list keeps what this rank put in."""
        if distributed.is_outside(group):
            self._broadcast(object_list, src, group, device, group_src)  # torch's warning
            return
        root = self._peer(group, src if group_src is not None else src or 0, group_src)
        mine = c10d.get_rank()
        if root != mine and self._mailbox.open:
            object_list[:] = self._mailbox.published(self._name(group), root)
        elif root != mine and any(value is None for value in object_list):
            self._warn(f"broadcast_object_list of rank {root}'s objects", "stay as this rank gave them")
        self._broadcast(object_list, src=mine, group=group, device=device)
        if root == mine:
            self._mailbox.publish(self._name(group), object_list)

    def scatter(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        """The root's object for this rank where it runs beside; else that of this rank's own list, if there is one."""
        if distributed.is_outside(group):
            self._scatter(scatter_object_output_list, scatter_object_input_list, src, group, group_src)
            return
        root = self._peer(group, src if group_src is not None else src or 0, group_src)
        mine, number = c10d.get_rank(), c10d.get_rank(group)
        if root != mine and self._mailbox.open:
            scatter_object_input_list = self._mailbox.published(self._name(group), root)
        elif root != mine:
            given = scatter_object_input_list or ()
            if len(given) <= number or given[number] is None:
                self._warn(f"scatter_object_list of rank {root}'s objects", "stay as this rank gave them")
                scatter_object_input_list = [scatter_object_output_list[0]] * c10d.get_world_size(group)
        self._scatter(scatter_object_output_list, scatter_object_input_list, src=mine, group=group)
        if root == mine:
            self._mailbox.publish(self._name(group), list(scatter_object_input_list or ()))

    def send(
        self,
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        use_batch: bool = False,
    ) -> None:
        """Leave objects in the mailbox of a rank."""
        with self._mailbox.apart_from_numbers():
            self._send(object_list, dst, group, device, group_dst, use_batch)
        self._mailbox.send(self._name(group), self._peer(group, dst, group_dst), object_list)

    def receive(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        use_batch: bool = False,
    ) -> int:
        """Take the next objects that a rank has left; waits for them, and gives the rank's number."""
        rank = self._peer(group, src, group_src)
        object_list[:] = self._mailbox.receive(self._name(group), rank)
        where = device or distributed.object_device(group)
        to_tensor = distributed.object_to_tensor.get()
        held = [to_tensor(value, where, distributed.group_or_default(group)) for value in object_list]
        del held
        return rank

    def _peer(self, group: Any, rank: int | None, number: int | None) -> int:
        """The rank of the world that is meant by its number there or in the group."""
        return distributed.world_rank(distributed.group_or_default(group), rank, number)

    def _name(self, group: Any) -> str:
        return str(distributed.group_or_default(group).group_name)

    def _warn(self, what: str, how: str) -> None:
        self._mode.machine.warn(
            "object-from-other-rank",
            f"{what}: that rank does not run, and they {how}",
            location=self._mode.guesses.location(),
        )
