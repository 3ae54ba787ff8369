"""What frees memory that a name of the program holds: one sentence by the kind of the holder, never a promise."""

from __future__ import annotations

from vramfit.trace.holder_notes import Beyond, HolderNote

_SEQUENCES = frozenset({"list", "tuple", "set", "collections.deque", "frozenset"})
_MAPPINGS = frozenset({"dict", "collections.OrderedDict", "collections.defaultdict"})
# Values of vramfit.holders.chains: what the notes of a trace hold.
_CACHE, _CLOSURE, _GENERATOR, _HOOK = (
    "functools cache",
    "closure",
    "suspended generator or coroutine",
    "hook",
)
_COLLECTION = 3
"""Blocks from which on a mapping that grew, one by one, is more than something that was made at once."""
_GLOBAL, _LOCAL, _CLASS = "global", "local", "class attribute"
_NEVER_FREED = "reference cycle through the autograd graph"


def remedy(note: HolderNote, *, loaded: bool = False, on_card: bool = True) -> str:
    """What would free what a note is about.

    Args:
        note: of the holder.
        loaded: ``torch.load`` made it.
        on_card: the memory is a card's, so that the host's could have it instead.
    """
    told = _remedy(note, loaded)
    first, _, other = told.partition(", or ")
    return told if on_card or "cpu" not in other.lower() else first


def _remedy(note: HolderNote, loaded: bool) -> str:
    if note.reason is Beyond.CYCLE:
        if note.root == _NEVER_FREED:
            return (
                "break the cycle with ctx.save_for_backward or a weak reference: no collection frees one that leads "
                "through the autograd graph"
            )
        return "gc.collect() after the last use; a weak reference in place of one of the references avoids the cycle"
    if note.reason is Beyond.ERROR:
        return (
            f"keep str(error) in {note.name} instead of the error, whose traceback has the variables of the functions "
            "that it ended"
        )
    if note.reason is Beyond.GRAPH:
        return _of_graph(note)
    if note.reason is Beyond.NO_MODULE:
        return _of_model(note)
    return _unused(note, loaded)


def _of_graph(note: HolderNote) -> str:
    """What frees the graph of a result that no backward pass follows."""
    function = note.where.partition("(")[0] if note.root == _LOCAL else ""
    where = f"in {function}()" if function and function != "<module>" else "around these passes"
    if note.kind in _SEQUENCES | _MAPPINGS:
        return f"torch.no_grad() {where}, or put x.detach() (a loss as loss.item()) into {note.name}"
    if note.kind == "torch.Tensor" and note.elements <= 1:
        return f"torch.no_grad() {where}, or add loss.item() to {note.name}"
    if note.kind == "torch.Tensor":
        return f"torch.no_grad() {where}, or {note.name} = {note.name}.detach() after each of them"
    return f"torch.no_grad() {where}, or detach what {note.name} keeps"


def _of_model(note: HolderNote) -> str:
    """What frees the parameters of a model that is gone or has given way to another, and its optimizer's state."""
    first, *rest = note.name.split(".")
    if note.kind in _SEQUENCES | _MAPPINGS:
        return (
            f"save the state_dict() of models in {note.name} and drop them, or keep them there as model.cpu()"
        )
    if note.kind.startswith("torch.optim") and rest:
        return f"del {first}, which keeps the optimizer, together with the model and the optimizer"
    return f"del {first} together with the model"


def _unused(note: HolderNote, loaded: bool) -> str:
    """What frees something that is no longer used."""
    name, through = note.name, set(note.through)
    if _CACHE in through:
        return f"{name}.cache_clear(), or leave tensors of the card out of what functools caches"
    if _GENERATOR in through:
        return "close the generator when it has done its work, or del the variable in it before it yields"
    if _CLOSURE in through:
        return f"empty {name.partition(' ')[0]} after use, or store x.cpu() there: it lives as long as the function"
    if note.kind in _SEQUENCES:
        return f"empty {name} when its values have been used, or put x.detach().cpu() into it"
    if loaded and note.root in (_GLOBAL, _LOCAL):
        return f'del {name} when it has been loaded, or torch.load(..., map_location="cpu")'
    at_once = len({since for *_, since in note.rows}) < _COLLECTION
    if note.kind in _MAPPINGS and at_once:
        return f"del {name} when it has been used, or keep it on the CPU"
    if note.kind in _MAPPINGS:
        return f"remove from {name} what has been used, or put x.detach().cpu() into it"
    if _HOOK in through:
        return f"let the hook keep x.detach().cpu(), and remove it when {name} has been used"
    if "." in name or note.root == _CLASS:
        return f"set {name} to None when it has been used, or keep x.detach().cpu() there"
    return f"del {name} when it has been used, or move it to the CPU until it is used again"
