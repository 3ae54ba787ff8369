import pytest

from vramfit.errors import UsageError
from vramfit.plain import from_plain, to_plain
from vramfit.searching.largest import largest_where
from vramfit.stress.stress_run import CEILING, Vary, chosen, cycle_of


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


@pytest.mark.parametrize(
    ("text", "usual", "limit", "expected"),
    [
        ("n", 8, 50, [8, 16, 32, 64, 48, 56, 52, 50, 51]),
        ("n=..20", 8, 50, [8, 16, 20]),
        ("n=20..", 8, 50, [20, 40, 80, 60, 50, 55, 52, 51]),
        ("n=10..", 100, 4, [100, 50, 25, 12, 10]),
        ("n", 128, 1000, [128, 256, 512, 1024, 768, 896, 960, 992, 1008]),  # to within a part in 32
        ("n=1,2,4,8,16", 4, 9, [4, 8, 16]),
        ("n=1,2,4,8,16", 16, 3, [16, 8, 4, 2]),
        ("n=3,5,6,7,20", 4, 19, [3, 6, 7, 20]),
    ],
)
def test_the_values_on_the_way_to_a_limit(text: str, usual: int, limit: int, expected: list[int]) -> None:
    largest = largest_where(lambda value: value <= limit, Vary.parse(text).strategy(usual))
    assert [tried.value for tried in largest.tries] == expected


def test_a_ramp_ends_at_the_ceiling_or_at_the_usual_value_above_it() -> None:
    for usual in (3, CEILING + 5):
        largest = largest_where(lambda _: True, Vary(name="n").strategy(usual))
        assert (largest.value, largest.failing) == (max(CEILING, usual), 0)
