"""Names of modules are found as if all modules were looked through each time, and seldom they are."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from itertools import pairwise
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vramfit.name_bindings import NameBindings
from vramfit.patching import PatchStack, together

NAMES = ("first", "second", "third")


class Thing:
    """What names are bound to."""


def some(count: int) -> tuple[list[ModuleType], NameBindings]:
    """Modules, and what swaps their names."""
    modules = [ModuleType(f"number_{number}") for number in range(count)]
    for one in modules:
        vars(one).update(dict.fromkeys(NAMES, None))
    return modules, NameBindings({one.__name__: one for one in modules})


def swap(bindings: NameBindings, *pairs: tuple[object, object]) -> None:
    with bindings.gathered() as gathered:
        gathered.extend(pairs)


def blocks(bindings: NameBindings, old: object, count: int) -> None:
    for _ in range(count):
        new = type("Thing", (Thing,), {}) if old is Thing else Thing()
        swap(bindings, (old, new))
        swap(bindings, (new, old))


def test_what_is_known_is_not_looked_for_again() -> None:
    (module,), bindings = some(1)
    for old in (Thing(), Thing):  # classes wait to be collected, and hold what they derive from
        vars(module)["first"] = old
        blocks(bindings, old, 2)
        before = bindings.sweeps
        blocks(bindings, old, 3)
        assert bindings.sweeps == before and vars(module)["first"] is old


def test_a_name_that_is_bound_to_either_is_found_though_there_are_no_more_names() -> None:
    (module,), bindings = some(1)
    old, names = Thing(), vars(module)
    names["first"] = old
    blocks(bindings, old, 3)
    new = Thing()
    swap(bindings, (old, new))
    names["second"] = new
    swap(bindings, (new, old))
    assert names["second"] is old
    names["second"] = None
    blocks(bindings, old, 3)
    names["second"] = old
    swap(bindings, (old, new))
    assert names["second"] is new


def test_what_is_held_elsewhere_hides_no_name() -> None:
    """One block leaves what stood there in a list, and the next leaves a name."""
    (module,), bindings = some(1)
    old, names, kept = Thing(), vars(module), []
    names["first"] = old
    blocks(bindings, old, 3)
    for leaves in ("list", "name"):
        new = Thing()
        swap(bindings, (old, new))
        if leaves == "list":
            kept.append(new)
        else:
            names["second"] = new
        swap(bindings, (new, old))
    assert names["second"] is old


def test_nothing_that_stood_there_is_kept() -> None:
    bindings, old = NameBindings({}), Thing()
    seen = []
    for _ in range(2):
        new, newer = Thing(), Thing()
        seen += [weakref.ref(new), weakref.ref(newer)]
        swap(bindings, (old, new), (new, newer))
        swap(bindings, (newer, new), (new, old))
        del new, newer
    gc.collect()
    assert not any(one() for one in seen)


CHANGES = st.tuples(st.integers(0, 1), st.sampled_from(NAMES), st.integers(0, 3))
BLOCKS = st.tuples(st.lists(CHANGES, max_size=3), st.lists(CHANGES, max_size=3), st.booleans(), st.booleans())


@given(st.lists(BLOCKS, min_size=1, max_size=8))
@example([([], [], False, True), ([], [(0, "first", 1), (0, "second", 1), (1, "first", 1)], False, False)])
@example([([], [(0, "first", 3)], False, False), ([], [], False, False)])
def test_after_any_changes_every_name_is_bound_to_what_it_should_be(
    runs: list[tuple[list[tuple[int, str, int]], list[tuple[int, str, int]], bool, bool]],
) -> None:
    """Beside a look at all names: none is left that is bound to what was replaced."""
    modules, bindings = some(2)
    olds, kept = (Thing(), Thing()), []
    for before, within, keeps, twice in runs:
        for number, name, choice in before:
            vars(modules[number])[name] = (*olds, None, None)[choice]
        chain = [[old, Thing()] for old in olds]
        if twice:
            chain[1].append(Thing())
        with bindings.gathered() as gathered:
            gathered.extend(pair for one in chain for pair in pairwise(one))
        held = {id(value) for one in modules for value in vars(one).values()}
        assert held.isdisjoint(id(replaced) for one in chain for replaced in one[:-1])
        for number, name, choice in within:
            vars(modules[number])[name] = (chain[0][-1], chain[1][-1], None, olds[0])[choice]
        if keeps:
            kept.extend([chain[0][-1], chain[1][-1]])
        with bindings.gathered() as gathered:
            gathered.extend(pair for one in chain for pair in pairwise(one[::-1]))
        held = {id(value) for one in modules for value in vars(one).values()}
        assert held.isdisjoint(id(new) for one in chain for new in one[1:])


def test_patches_of_a_run_are_looked_for_no_more_than_at_first() -> None:
    """The virtual card's own, once its classes, functions and library modules are known."""
    import vramfit
    from vramfit import patching

    def run() -> int:
        gc.collect()  # what earlier tests left may hold what is replaced, and go at any moment
        before = patching._bindings.sweeps
        with vramfit.VirtualGPU("H100"):
            pass
        return patching._bindings.sweeps - before

    assert [run() for _ in range(5)][-2:] == [0, 0]


def test_a_name_of_what_stands_in_a_run_is_bound_back_and_one_of_what_it_replaces_is_swapped() -> None:
    """Every sixth of them, each in a run of its own, since one look finds the names of all."""
    import vramfit
    from vramfit import patching

    stray = ModuleType("stray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stray.__name__, stray)
        for number in range(0, 110, 6):
            with vramfit.VirtualGPU("H100"):
                roles = patching._bindings._roles.values()
                standing = [role for role in roles if role.number == 1]
                stray.left = standing[number].obj
                (old,) = [
                    one.obj for one in roles if one.number == 0 and one.origin is standing[number].origin
                ]
                del standing, roles
            assert stray.left is old
            with vramfit.VirtualGPU("H100"):
                assert stray.left is not old
            assert stray.left is old
            stray.left = None
            del old


@pytest.mark.parametrize("fails", [False, True], ids=["swapped", "failed before"])
def test_a_stack_forgets_what_it_replaced(fails: bool) -> None:
    old, new = Thing(), Thing()
    with contextlib.suppress(ZeroDivisionError), PatchStack() as patches, together():
        patches.rebind([(old, new)])
        if fails:
            raise ZeroDivisionError
    gone = weakref.ref(new)
    del new
    gc.collect()
    assert gone() is None
