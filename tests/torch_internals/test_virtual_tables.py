"""Entries of virtual tables by name: symbols first, headers where there are none, and refusals where neither helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from vramfit.errors import EnvironmentUnfitError
from vramfit.torch_internals import build_shim, cuda_hooks, device_guards, headers, virtual_tables
from vramfit.torch_internals.headers import Declared, active, declared
from vramfit.torch_internals.symbols import SymbolTable
from vramfit.torch_internals.torch_libraries import pointer_at
from vramfit.torch_internals.virtual_tables import TableNames

# -- the torch that is installed --------------------------------------------------------------------------------------


def hook_names() -> TableNames:
    return cuda_hooks.hook_names(cuda_hooks.interface_table())


def guard_names() -> TableNames:
    build_shim.install()
    assert device_guards._guard is not None
    return device_guards.guard_names(pointer_at(device_guards._guard.address))


TABLES = {"hooks": hook_names, "guard": guard_names}


@pytest.mark.parametrize("table", TABLES)
def test_symbols_and_headers_of_this_torch_name_every_entry_alike(table: str) -> None:
    names = TABLES[table]()
    destructors = 2
    assert (
        len(names.declared.slots) == names.length - destructors == (names.declared.length or 0) - destructors
    )
    for name, slot in names.declared.slots.items():
        assert names.by_symbol(name) == [slot], name
        assert names.slot(name) == slot


def test_what_is_declared_for_rocm_alone_takes_no_entry() -> None:
    names = hook_names()
    if torch.version.hip is None:
        assert not names.has("isGPUArch")
    assert names.slot("deviceSynchronize") == names.length - 1


@pytest.mark.parametrize("table", TABLES)
def test_without_symbols_the_headers_serve(
    table: str, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_symbol = TABLES[table]()
    forget()
    _strip(monkeypatch)
    names = TABLES[table]()
    assert not any(names.symbols)
    assert names.length == by_symbol.length
    assert {name: names.slot(name) for name in names.declared.slots} == by_symbol.declared.slots


@pytest.mark.usefixtures("bare")
def test_a_stripped_torch_passes_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.torch_internals import build_check

    _strip(monkeypatch)
    build_shim.install()
    build_check.self_check()


@pytest.mark.parametrize("table", TABLES)
def test_without_headers_the_symbols_serve(
    table: str, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = TABLES[table]().declared.slots
    forget()
    monkeypatch.setattr(headers, "_header", _missing)
    names = TABLES[table]()
    assert {name: names.slot(name) for name in slots} == slots


@pytest.mark.usefixtures("bare")
def test_without_both_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _strip(monkeypatch)
    monkeypatch.setattr(headers, "_header", _missing)
    with pytest.raises(
        EnvironmentUnfitError, match="how long the virtual table of DeviceGuardImplInterface is"
    ):
        build_shim.install()


def _strip(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stripped(SymbolTable):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self._entries = np.empty(0, self._entries.dtype)

    monkeypatch.setattr(virtual_tables, "SymbolTable", Stripped)


def _missing(path: Path) -> str:
    raise FileNotFoundError(path)


# -- which of the two is right ----------------------------------------------------------------------------------------


def entry(*names: str, mangled: Callable[[str], str] = "_ZNK1a{}Ev".format) -> dict[str, str]:
    return {mangled(name): name for name in names}


def table(*entries: dict[str, str], header: dict[str, int] | None = None) -> TableNames:
    return TableNames(of="a", symbols=entries, declared=Declared(slots=header or {}, length=None))


def test_symbols_win_over_headers() -> None:
    names = table(entry("x"), entry("y"), header={"x": 1, "y": 0})
    assert (names.slot("x"), names.slot("y")) == (0, 1)


def test_headers_decide_between_methods_that_share_their_code() -> None:
    shared = entry("x", "y", "z")
    names = table(shared, shared, entry("w"), shared, header={"x": 0, "y": 1, "w": 2, "z": 3})
    assert [names.slot(name) for name in "xywz"] == [0, 1, 2, 3]


def test_a_method_that_is_declared_twice_is_there_and_refused_without_symbols() -> None:
    declared_twice = Declared(slots={}, length=3, several=frozenset({"x"}))
    names = TableNames(of="a", symbols=[{}] * 3, declared=declared_twice)
    assert names.has("x") and not names.has("y")
    with pytest.raises(EnvironmentUnfitError, match="a::x in the virtual table has several entries"):
        names.slot("x")


def test_methods_that_share_their_code_are_refused_without_a_header() -> None:
    names = table(entry("x", "y"), entry("x", "y"), entry("z"))
    assert names.slot("z") == 2
    with pytest.raises(EnvironmentUnfitError, match="a::x in the virtual table has several entries"):
        names.slot("x")


def test_a_header_that_the_symbols_contradict_is_refused_where_they_leave_a_choice() -> None:
    names = table(entry("x", "y"), entry("x", "y"), entry("z"), header={"x": 2})
    with pytest.raises(EnvironmentUnfitError, match="a::x"):
        names.slot("x")


def test_an_overloaded_name_is_refused() -> None:
    names = table({"_ZNK1a1xEv": "x"}, {"_ZNK1a1xEi": "x"}, header={"x": 0})
    with pytest.raises(EnvironmentUnfitError, match=r"a::x .* is overloaded"):
        names.slot("x")


def test_a_header_that_points_at_another_method_is_not_believed() -> None:
    names = table(entry("z"), {}, header={"x": 0, "y": 1})
    assert names.slot("y") == 1, "there is no symbol to contradict it"
    with pytest.raises(EnvironmentUnfitError, match="a::x"):
        names.slot("x")


def test_a_name_that_nothing_knows_is_refused() -> None:
    names = table(entry("x"), {})
    assert not names.has("y")
    with pytest.raises(EnvironmentUnfitError, match=r"a::y .* nothing that torch ships"):
        names.slot("y")


# -- headers ----------------------------------------------------------------------------------------------------------

BASE = """
struct API Base : Other {
  virtual ~Base() = default;
  virtual bool first() const { return {}; }
  // virtual bool commented() const;
  virtual Device& second(int = -1, std::array<int, 2> = {}) const = 0;
};
"""


def read(folder: Path, derived: str) -> Declared:
    """What is declared by a class below `BASE`."""
    (folder / "base.h").write_text(BASE)
    (folder / "derived.h").write_text("struct Derived;\nstruct Derived final : Base {" + derived + "};")
    return declared(("base.h", "Base"), ("derived.h", "Derived"), include=folder)


def test_entries_come_in_the_order_of_declarations(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        ~Derived() override = default;
        bool first() const override { return true; }
        virtual void third() const {}
        void no_method_of_the_table() const;
        virtual bool second() const override;
        """,
    )
    assert found == Declared(slots={"first": 2, "second": 3, "third": 4}, length=5)


def test_a_name_that_stands_twice_keeps_its_entries_and_has_no_slot(tmp_path: Path) -> None:
    found = read(tmp_path, "virtual void x(int); virtual void x(long); virtual void y();")
    assert found == Declared(slots={"first": 2, "second": 3, "y": 6}, length=7, several=frozenset({"x"}))


def test_after_a_name_that_may_replace_another_nothing_is_certain(tmp_path: Path) -> None:
    found = read(tmp_path, "virtual void x(); virtual bool first(int) const; virtual void y();")
    assert found == Declared(slots={"first": 2, "second": 3, "x": 4}, length=None)


def test_a_class_that_is_not_there_has_no_entries(tmp_path: Path) -> None:
    read(tmp_path, "")
    for place in (("base.h", "Elsewhere"), ("none.h", "Base")):
        assert declared(place, include=tmp_path) == Declared(slots={}, length=None)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("ifdef USE_ROCM", False),
        ("ifndef USE_ROCM", True),
        ("ifdef ON", True),
        ("if defined(USE_ROCM) || defined(ON)", True),
        ("if !defined(USE_ROCM) && !defined ON", False),
        ("if !defined(TORCH_STABLE_ONLY) && \\\n    !defined(TORCH_TARGET_VERSION)", True),
        ("if CUDA_VERSION >= 12000", False),
        ("if defined(__has_include) && __has_include(<x.h>)", False),
        ("if 1", True),
        ("if (0 != 1) && !0", True),
    ],
)
def test_what_stands_behind_a_condition_that_is_off_is_left_out(condition: str, holds: bool) -> None:
    text = f"a\n#{condition}\nb\n#  if 0\nc\n#endif\n#elif defined(ON)\nd\n#else\ne\n#endif\nf"
    assert active(text, {"ON"}).split() == (["a", "b", "f"] if holds else ["a", "d", "f"])


def test_a_condition_that_is_none_is_an_error() -> None:
    with pytest.raises(LookupError):
        active("#if >=\n#endif", set())
