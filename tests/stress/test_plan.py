import pytest

from vramfit.errors import UsageError
from vramfit.plain import from_plain, to_plain
from vramfit.stress.stress_run import Vary, chosen, cycle_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch_size", Vary(name="batch_size")),
        ("n=1..64", Vary(name="n", low=1, high=64)),
        ("n=..64", Vary(name="n", high=64)),
        ("n=8..", Vary(name="n", low=8)),
        ("n=4, 1,2", Vary(name="n", low=1, high=4, values=(1, 2, 4))),
    ],
)
def test_ranges(text: str, expected: Vary) -> None:
    assert Vary.parse(text) == expected
    assert from_plain(to_plain(expected), Vary) == expected


@pytest.mark.parametrize("text", ["", "=3", "n=", "n=x", "n=8..1", "n=0..3", "n=0,1", "batch size", "n=-3"])
def test_ranges_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError):
        Vary.parse(text)


def test_the_first_size_is_varied_unless_others_are_named() -> None:
    sizes = {"batch_size": 8, "length": 128}
    assert chosen(sizes, ()) == (Vary(name="batch_size"),)
    assert chosen(sizes, [Vary(name="length")]) == (Vary(name="length"),)
    with pytest.raises(UsageError, match=r"no size width\. It has batch_size, length"):
        chosen(sizes, [Vary(name="width")])
    with pytest.raises(UsageError, match="twice"):
        chosen(sizes, [Vary(name="length"), Vary(name="length", high=3)])


def test_a_cycle_alternates_small_and_large_and_ends_at_the_largest() -> None:
    cycle = cycle_of({"n": 8, "m": 3}, [Vary(name="n")], {"n": 160})
    values = [sizes["n"] for sizes in cycle]
    assert values == [20, 90, 40, 110, 10, 140, 70, 160]
    assert all(sizes["m"] == 3 for sizes in cycle)


def test_a_cycle_stays_in_the_range_and_in_the_list() -> None:
    assert {sizes["n"] for sizes in cycle_of({"n": 8}, [Vary(name="n", low=100)], {"n": 160})} == {
        100,
        110,
        140,
        160,
    }
    listed = Vary.parse("n=1,2,4,8,16,32")
    assert {sizes["n"] for sizes in cycle_of({"n": 8}, [listed], {"n": 16})} <= {1, 2, 4, 8, 16}
    assert cycle_of({"n": 8}, [listed], {"n": 16})[-1] == {"n": 16}
    assert cycle_of({"n": 8}, [Vary(name="n")], {"n": 0}) == ()


def test_several_sizes_take_turns() -> None:
    cycle = cycle_of({"n": 8, "m": 4}, [Vary(name="n"), Vary(name="m")], {"n": 16, "m": 16})
    assert len(cycle) == 8
    assert cycle[-2:] == ({"n": 16, "m": 4}, {"n": 8, "m": 16})
