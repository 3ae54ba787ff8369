"""Ranks of a job on the cards, as the driver and the system tell of them."""

from dataclasses import replace

from tests.doctor.machines import CARD, DRIVER, QUIET_BOX, SHARED_BOX

from vramfit.doctor import Facts, Finding, Severity, diagnose
from vramfit.doctor.facts import Container, HostProcess, Process
from vramfit.units import GIB, MIB

TORCHRUN = {"job": "29500", "parent": 100, "name": "python"}


def found(facts: Facts, check: str) -> list[Finding]:
    return [finding for finding in diagnose(facts).findings if finding.check == check]


def one(facts: Facts, check: str) -> Finding:
    [finding] = found(facts, check)
    return finding


def machine(held: dict[int, dict[int, int | None]], processes: list[HostProcess]) -> Facts:
    """A machine whose cards hold memory of processes: by card, then by pid."""
    cards = tuple(
        replace(
            CARD,
            index=index,
            uuid=f"GPU-{index}",
            total_bytes=80 * GIB,
            processes=tuple(
                Process(pid=pid, name="python", used_bytes=used) for pid, used in of_card.items()
            ),
        )
        for index, of_card in held.items()
    )
    return replace(
        QUIET_BOX,
        driver=replace(DRIVER, cards=cards),
        torch=None,
        torch_error="x",
        processes=tuple(processes),
    )


def ranks(count: int, **more: object) -> list[HostProcess]:
    return [
        HostProcess(pid=10 + rank, rank=rank, local_rank=rank, has_card_open=True, **{**TORCHRUN, **more})  # type: ignore[arg-type]
        for rank in range(count)
    ]


def checks(facts: Facts) -> set[str]:
    return {finding.check for finding in diagnose(facts).findings}


RANK_CHECKS = {"ranks-on-one-card", "context-on-another-card", "fork-after-cuda", "forks-left-behind"}


def test_each_rank_on_its_own_card_is_fine() -> None:
    facts = machine({0: {10: 20 * GIB}, 1: {11: 20 * GIB}}, ranks(2))
    assert not checks(facts) & RANK_CHECKS


def test_every_ranks_context_on_the_first_card() -> None:
    # as in github.com/pytorch/pytorch/issues/135279
    held: dict[int, dict[int, int | None]] = {rank: {10 + rank: 30 * GIB} for rank in range(8)}
    held[0] |= {10 + rank: 500 * MIB for rank in range(1, 8)}
    finding = one(machine(held, ranks(8)), "context-on-another-card")
    assert finding.severity is Severity.WARNING
    assert finding.finding == (
        "GPU 0: contexts of 7 ranks whose own card is another: 3.42 GiB, rank 1 (pid 11), rank 2 (pid 12), "
        "rank 3 (pid 13), rank 4 (pid 14) and 3 more"
    )
    assert "set_device" in finding.fix
    assert found(machine(held, ranks(8)), "ranks-on-one-card") == []


def test_memory_that_is_more_than_a_context() -> None:
    facts = machine({0: {10: 30 * GIB, 11: 3 * GIB}, 1: {11: 30 * GIB}}, ranks(2))
    assert one(facts, "context-on-another-card").finding.startswith("GPU 0: memory of 1 rank whose")


def test_several_ranks_on_one_card() -> None:
    facts = machine({0: {10: 9 * GIB, 11: 9 * GIB, 12: 9 * GIB}, 1: {}}, ranks(3))
    finding = one(facts, "ranks-on-one-card")
    assert finding.finding == (
        "GPU 0: 3 ranks of one job hold 27.00 GiB: rank 0 (pid 10), rank 1 (pid 11), rank 2 (pid 12), "
        "while GPU 1 has none"
    )
    assert found(facts, "context-on-another-card") == []


def test_processes_that_a_program_spawned_are_ranks_too() -> None:
    spawned = [HostProcess(pid=pid, parent=7, name="python", has_card_open=True) for pid in (10, 11)]
    facts = machine({0: {10: GIB, 11: GIB}}, spawned)
    assert "pid 10, pid 11" in one(facts, "ranks-on-one-card").finding


def test_programs_that_have_nothing_to_do_with_each_other_are_neighbours() -> None:
    strangers = [
        HostProcess(pid=10, parent=7, name="python", has_card_open=True),
        HostProcess(pid=11, parent=8, name="python", has_card_open=True),
        HostProcess(pid=12, parent=1, name="python", has_card_open=True),
        HostProcess(pid=13, parent=1, name="python", has_card_open=True),
    ]
    facts = machine({0: dict.fromkeys((10, 11, 12, 13), GIB)}, strangers)
    assert not checks(facts) & RANK_CHECKS
    two_jobs = [*ranks(1), HostProcess(pid=11, parent=100, name="python", rank=0, job="29501")]
    assert not checks(machine({0: {10: GIB, 11: GIB}}, two_jobs)) & RANK_CHECKS


def test_one_process_may_use_every_card() -> None:
    alone = [HostProcess(pid=10, parent=7, name="python", has_card_open=True)]
    facts = machine({0: {10: 20 * GIB}, 1: {10: 20 * GIB}}, alone)
    assert not checks(facts) & RANK_CHECKS


def test_where_the_driver_does_not_tell_nothing_is_said() -> None:
    untold = machine({0: {10: None, 11: None}}, ranks(2))
    assert not checks(untold) & RANK_CHECKS
    elsewhere = machine({0: {4711: GIB, 4712: GIB}}, [])  # ids of the host, seen from a container
    assert not checks(elsewhere) & RANK_CHECKS
    assert not checks(SHARED_BOX) & RANK_CHECKS


def test_forks_of_a_process_with_a_context() -> None:
    trainer = HostProcess(pid=10, parent=7, name="python", has_card_open=True)
    workers = [HostProcess(pid=pid, parent=10, name="pt_data_worker", has_card_open=True) for pid in (20, 21)]
    finding = one(machine({0: {10: GIB}}, [trainer, *workers]), "fork-after-cuda")
    assert finding.severity is Severity.INFO
    assert finding.finding == (
        "2 processes were forked after CUDA was started: pt_data_worker (pid 20), pt_data_worker (pid 21)"
    )


def test_forks_that_outlived_their_parent() -> None:
    orphan = HostProcess(pid=20, parent=1, name="pt_data_worker", has_card_open=True)
    finding = one(machine({0: {}}, [orphan]), "forks-left-behind")
    assert finding.severity is Severity.WARNING
    assert finding.fix == "End them: kill 20"
    assert "1 process of a program that has ended still has a card open" in finding.finding


def test_in_a_container_whose_processes_the_driver_hides_no_orphans_are_seen() -> None:
    trainer = HostProcess(pid=20, parent=1, name="python", has_card_open=True)
    hidden = replace(machine({0: {}}, [trainer]), container=Container(kind="docker", version=2))
    assert not checks(hidden) & RANK_CHECKS
    told = replace(machine({0: {20: GIB}}, [trainer]), container=Container(kind="docker", version=2))
    assert not checks(told) & RANK_CHECKS
