from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from vramfit.patching import PatchStack, after_import, together


class Base:
    inherited = 1


class Child(Base):
    own = 2


def test_set_is_undone_in_reverse_order():
    thing = SimpleNamespace(value=1)
    with PatchStack() as patches:
        patches.set(thing, "value", 2)
        patches.set(thing, "value", 3)
        assert thing.value == 3
    assert thing.value == 1


def test_what_was_not_there_is_deleted_again():
    thing = SimpleNamespace()
    with PatchStack() as patches:
        patches.set(thing, "added", 1)
    assert not hasattr(thing, "added")


def test_what_was_inherited_is_uncovered_again():
    with PatchStack() as patches:
        patches.set(Child, "inherited", 5)
        patches.set(Child, "own", 6)
        assert (Child.inherited, Child.own) == (5, 6)
    assert "inherited" not in vars(Child)
    assert (Child.inherited, Child.own) == (1, 2)


def test_a_static_method_comes_back_as_one():
    class Thing:
        @staticmethod
        def method() -> str:
            return "original"

    with PatchStack() as patches:
        patches.set(Thing, "method", lambda self: "patched")
        assert Thing().method() == "patched"
    assert Thing().method() == "original"


def test_keep_restores_what_somebody_else_changed():
    thing = SimpleNamespace(kept=1)
    with PatchStack() as patches:
        patches.keep(thing, "kept")
        patches.keep(thing, "appears")
        thing.kept, thing.appears = 2, 3
    assert vars(thing) == {"kept": 1}


def test_delete_and_item():
    thing, table = SimpleNamespace(gone=1), {"a": 1}
    with PatchStack() as patches:
        patches.delete(thing, "gone")
        patches.delete(thing, "never_there")
        patches.item(table, "a", 2)
        patches.item(table, "b", 3)
        assert not hasattr(thing, "gone") and table == {"a": 2, "b": 3}
    assert thing.gone == 1 and table == {"a": 1}


@pytest.fixture
def module():
    module = ModuleType("a_module_of_the_test")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_rebind_reaches_modules_that_copied_a_name(module: ModuleType):
    old, new = object(), object()
    module.copied, module.again, module.other = old, old, 1
    with PatchStack() as patches:
        assert patches.rebind([(old, new)]) == 2
        assert module.copied is module.again is new
        module.imported_meanwhile = new
    assert module.copied is module.again is module.imported_meanwhile is old


def test_what_was_rebound_twice_is_bound_back_to_the_first(module: ModuleType):
    first, second, third = object(), object(), object()
    module.copied = first
    with PatchStack() as patches:
        assert patches.rebind([(first, second)]) == 1
        assert patches.rebind([(second, third)]) == 1
        module.imported_between, module.imported_last = second, third
    assert module.copied is module.imported_between is module.imported_last is first


def test_what_is_rebound_together_is_looked_for_once(module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    from vramfit import patching

    sweeps, sweep = [], patching._bindings.swap
    monkeypatch.setattr(patching._bindings, "swap", lambda pairs: sweeps.append(pairs) or sweep(pairs))
    first, second, third, fourth, other, another = (object() for _ in range(6))
    module.copied, module.other = first, other
    with PatchStack() as patches:
        with together():
            assert patches.rebind([(first, second)]) == 0
            assert patches.rebind([(other, another), (second, third)]) == 0
            assert module.copied is first
        assert (module.copied, module.other) == (third, another)
        assert len(sweeps) == 1
        assert patches.rebind([(third, fourth)]) == 1
    assert (module.copied, module.other) == (first, other)


def test_two_stacks_are_put_back_at_once(module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    from vramfit import patching

    first, second, third = (object() for _ in range(3))
    module.copied = first
    below, above = PatchStack(), PatchStack()
    with together():
        below.rebind([(first, second)])
        above.rebind([(second, third)])
    assert module.copied is third
    sweeps, sweep = [], patching._bindings.swap
    monkeypatch.setattr(patching._bindings, "swap", lambda pairs: sweeps.append(pairs) or sweep(pairs))
    with together():
        above.undo()
        below.undo()
    assert module.copied is first and len(sweeps) == 1


def test_what_is_rebound_where_the_block_fails_is_bound_back(module: ModuleType):
    old, new = object(), object()
    module.copied = old
    with pytest.raises(ZeroDivisionError), PatchStack() as patches, together():
        patches.rebind([(old, new)])
        raise ZeroDivisionError
    assert module.copied is old


def test_what_was_rebound_is_bound_back_where_another_step_of_the_undo_fails(module: ModuleType):
    old, new = object(), object()
    module.copied = old
    patches = PatchStack()
    patches.call(lambda: 1 // 0)
    with together():
        patches.rebind([(old, new)])
    assert module.copied is new
    with pytest.raises(ExceptionGroup), together():
        patches.undo()
    assert module.copied is old


def test_rebind_leaves_our_own_modules_alone():
    from vramfit import patching

    original = patching._rename
    with PatchStack() as patches:
        assert patches.rebind([(original, object())]) == 0
        assert patching._rename is original


def test_a_failing_undo_does_not_keep_the_others_from_running():
    thing = SimpleNamespace(value=1)
    patches = PatchStack()
    patches.set(thing, "value", 2)
    patches.call(lambda: 1 / 0)
    with pytest.raises(ExceptionGroup) as caught:
        patches.undo()
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
    assert thing.value == 1 and len(patches) == 0
    patches.undo()


def test_several_may_change_a_module_once_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "changed_by_two.py").write_text("told = []")
    monkeypatch.syspath_prepend(tmp_path)
    with PatchStack() as one, PatchStack() as two:
        after_import({"changed_by_two": lambda module: module.told.append("one")}, one)
        after_import({"changed_by_two": lambda module: module.told.append("two")}, two)
        import changed_by_two

        assert changed_by_two.told == ["one", "two"]
    monkeypatch.delitem(sys.modules, "changed_by_two")
