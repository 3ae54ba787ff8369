"""The bytes of a card sum to its total, whoever holds them."""

from dataclasses import replace

import pytest
from tests.doctor.machines import CARD, CONTAINER, DEVICE, DRIVER, MIG_SLICE, QUIET_BOX, SHARED_BOX, TWO_CARDS

from vramfit.doctor.card_accounting import account_lines, accounts, match_card
from vramfit.doctor.facts import Facts
from vramfit.units import MIB


@pytest.mark.parametrize("facts", [QUIET_BOX, SHARED_BOX, CONTAINER, TWO_CARDS])
def test_the_parts_sum_to_the_total(facts: Facts) -> None:
    for account in accounts(facts):
        assert sum(size for _, size in account_lines(account)) == account.total


def test_a_context_is_what_the_card_lost_less_what_the_allocator_held() -> None:
    [account] = accounts(QUIET_BOX)
    assert account.own_context == 400 * MIB
    assert account.own_reserved == 2 * MIB
    assert account.unaccounted == 2 * MIB


def test_a_process_list_that_hides_us_gives_the_same_context() -> None:
    [account] = accounts(CONTAINER)
    assert account.own_context == 400 * MIB
    assert account.unaccounted == 6000 * MIB


def test_a_neighbour_is_accounted_for() -> None:
    [account] = accounts(SHARED_BOX)
    assert account.others == 9120 * MIB
    assert account.unaccounted == 2 * MIB


def test_processes_that_share_memory_leave_nothing_over() -> None:
    twice = replace(SHARED_BOX.cards[0], used_bytes=5000 * MIB)
    [account] = accounts(replace(SHARED_BOX, torch=None, driver=replace(DRIVER, cards=(twice,))))
    assert account.unaccounted == 0
    assert account.torch_index is None


def test_a_card_that_is_sliced_has_no_account() -> None:
    assert accounts(MIG_SLICE) == ()


def test_cards_are_matched_by_name_then_by_place() -> None:
    other = replace(CARD, uuid="GPU-0", pci_bus_id="00000000:09:00.0")
    assert match_card((other, CARD), DEVICE) is CARD
    assert match_card((other, CARD), replace(DEVICE, uuid="", pci_bus_id="0000:01:00.0")) is CARD
    assert match_card((other,), DEVICE) is None
