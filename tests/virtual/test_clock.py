"""Simulated time: what runs beside what, and who waits for whom."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload

from vramfit.virtual.roofline import BANDWIDTH_EFFICIENCY, HOST_BANDWIDTH
from vramfit.virtual.simulated_streams import Clock, Engine


def test_one_stream_does_one_thing_after_the_other():
    clock = Clock()
    clock.work(10, 0, 0)
    clock.work(5, 0, 0, Engine.UPWARDS)
    clock.work(3, 0, 0)
    assert clock.now_us == clock.reached(0, 0) == 18


def test_copies_of_another_stream_run_beside_the_computation():
    clock = Clock()
    clock.work(10, 0, 0)
    clock.work(4, 0, 3, Engine.DOWNWARDS)
    clock.work(5, 0, 5, Engine.UPWARDS)
    assert clock.now_us == 10
    clock.work(4, 0, 7, Engine.DOWNWARDS)  # its engine is busy until 4
    assert clock.reached(0, 7) == 8


def test_kernels_of_two_streams_or_cards_follow_one_another():
    clock = Clock()
    clock.work(10, 0, 0)
    clock.work(10, 0, 3)
    clock.work(10, 1, 0)
    assert clock.now_us == 30


def test_a_stream_that_waits_begins_later():
    clock = Clock()
    clock.work(10, 0, 0)
    clock.hold(0, 3, clock.reached(0, 0))
    clock.work(4, 0, 3, Engine.DOWNWARDS)
    assert clock.now_us == 14
    clock.work(1, 0, 0)
    assert clock.reached(0, 0) == 11


def test_what_the_host_asks_for_after_waiting_begins_later():
    clock = Clock()
    clock.work(10, 0, 0)
    clock.hold_host(clock.reached(0, 0))
    clock.work(4, 0, 3, Engine.UPWARDS)
    assert clock.now_us == 14


def test_streams_go_on_while_the_host_works_and_begin_what_it_asks_for_afterwards():
    clock = Clock()
    clock.work(10, 0, 0)
    clock.work_host(4)
    clock.work_host(8)
    assert clock.now_us == 12
    clock.work(1, 0, 0)
    assert clock.reached(0, 0) == 13


def _us(gpu, work):
    torch.cuda.synchronize()
    before = gpu.run.seconds_simulated
    work()
    torch.cuda.synchronize()
    return 1e6 * (gpu.run.seconds_simulated - before)


def test_a_pinned_copy_beside_a_product_hides_behind_it(gpu):
    a = torch.empty(8192, 8192, device="cuda")
    host = torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()

    def product():
        a @ a

    def copy():
        host.copy_(card, non_blocking=True)

    def beside():
        with torch.cuda.stream(side):
            copy()
        product()

    def awaited():
        with torch.cuda.stream(side):
            copy()
        torch.cuda.current_stream().wait_stream(side)
        product()

    def blocking():
        with torch.cuda.stream(side):
            host.copy_(card)
        product()

    product()
    alone, crossing = _us(gpu, product), _us(gpu, copy)
    assert 500 < crossing < alone
    assert _us(gpu, beside) == pytest.approx(alone, abs=1)
    assert _us(gpu, awaited) == pytest.approx(alone + crossing, abs=3)
    assert _us(gpu, blocking) == pytest.approx(alone + crossing, abs=3)


def test_a_pinned_copy_takes_what_the_link_takes_in_both_directions(gpu):
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    crossing = 1e6 * host.nbytes / gpu.spec.host_link
    assert _us(gpu, lambda: host.copy_(card, non_blocking=True)) == pytest.approx(crossing)
    assert _us(gpu, lambda: card.copy_(host, non_blocking=True)) == pytest.approx(crossing)
    assert _us(gpu, lambda: host.to("cuda", non_blocking=True)) == pytest.approx(crossing)


def test_pageable_memory_takes_as_long_as_the_link_and_the_hosts_own_copy_together(gpu):
    host, pinned = (
        torch.empty(64 << 20, dtype=torch.uint8),
        torch.empty(64 << 20, dtype=torch.uint8).pin_memory(),
    )
    card = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    buffered = 1e6 * 2 * host.nbytes / (HOST_BANDWIDTH * BANDWIDTH_EFFICIENCY)
    crossing = 1e6 * host.nbytes / gpu.spec.host_link
    for copy in (lambda: card.copy_(host), lambda: host.to("cuda"), lambda: host.copy_(card)):
        assert _us(gpu, copy) == pytest.approx(crossing + buffered)
    assert _us(gpu, lambda: pinned.to("cuda")) == pytest.approx(crossing)


@pytest.mark.parametrize("surrounding", [torch.no_grad, torch.inference_mode], ids=["no-grad", "inference"])
def test_a_models_parameters_cross_the_link_as_other_tensors_do(gpu, surrounding):
    layer = torch.nn.Linear(4096, 4096, bias=False)
    kept = {"weight": layer.weight.detach().clone()}
    pinned = layer.weight.detach().pin_memory()
    a = torch.empty(8192, 8192, device="cuda")
    a @ a  # what is set up once is set up
    crossing = 1e6 * kept["weight"].nbytes / gpu.spec.host_link
    buffered = 1e6 * 2 * kept["weight"].nbytes / (HOST_BANDWIDTH * BANDWIDTH_EFFICIENCY)
    alone, side = _us(gpu, lambda: a @ a), torch.cuda.Stream()

    def beside():
        with torch.cuda.stream(side):
            pinned.to("cuda", non_blocking=True)
        a @ a

    with surrounding():
        assert _us(gpu, lambda: kept["weight"].to("cuda")) == pytest.approx(crossing + buffered)
        assert _us(gpu, lambda: kept["weight"].to("cuda", non_blocking=True)) == pytest.approx(
            crossing + buffered
        )
        assert _us(gpu, lambda: pinned.to("cuda")) == pytest.approx(crossing)
        assert _us(gpu, beside) == pytest.approx(alone, abs=1)
        assert _us(gpu, layer.cuda) == pytest.approx(crossing + buffered)


def test_accelerates_offload_takes_no_less_than_its_copies(gpu):
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(4))).eval()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    slower = 2 / (HOST_BANDWIDTH * BANDWIDTH_EFFICIENCY) + 1 / gpu.spec.host_link
    model = cpu_offload(model, execution_device=torch.device("cuda", 0))
    x = torch.empty(1, 2048, device="cuda")
    with torch.no_grad():
        assert _us(gpu, lambda: model(x)) > 1e6 * nbytes * slower
        assert _us(gpu, lambda: model(x)) > 1e6 * nbytes * slower


def test_pageable_copies_and_values_that_are_read_stop_the_host(gpu):
    a = torch.empty(4096, 4096, device="cuda")
    host, side = torch.empty(16 << 20, dtype=torch.uint8), torch.cuda.Stream()
    (a @ a)[0, 0].item()
    alone = _us(gpu, lambda: a @ a)

    def pageable():
        with torch.cuda.stream(side):
            host.to("cuda", non_blocking=True)
        a @ a

    def read():
        (a @ a)[0, 0].item()
        with torch.cuda.stream(side):
            a @ a

    assert _us(gpu, pageable) > alone + 500
    assert _us(gpu, read) == pytest.approx(2 * alone, rel=0.01)


def test_an_event_is_waited_for_by_the_stream_that_is_told_to(gpu):
    a = torch.empty(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a @ a
    torch.cuda.synchronize()
    start.record()
    a @ a
    done = torch.cuda.current_stream().record_event()
    side.wait_event(done)
    end.record(side)
    assert start.elapsed_time(end) == pytest.approx(_us(gpu, lambda: a @ a) / 1e3, rel=0.05)


def test_memory_that_nothing_is_written_to_takes_no_time(gpu):
    like = torch.empty(1 << 20)
    before = gpu.run.seconds_simulated
    torch.empty(1 << 20, device="cuda"), torch.empty_like(like, device="cuda").new_empty(1 << 20)
    assert gpu.run.seconds_simulated == before
    torch.zeros(1 << 20, device="cuda")
    assert gpu.run.seconds_simulated > before


def test_a_host_runs_ahead_of_its_card_as_far_as_the_launch_queue():
    clock = Clock()
    for _ in range(1024):
        clock.work(10, 0, 0)
    assert clock.host_us == 0
    clock.work(10, 0, 3)
    assert clock.host_us == 10
    clock.work(1, 0, 0, Engine.NONE)  # an event takes no place in the queue
    assert clock.host_us == 10


def test_a_freed_block_comes_back_once_the_host_has_seen_its_stream_pass(gpu):
    side = torch.cuda.Stream()
    active = []
    for _ in range(4):
        block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            block.add_(1)
        block.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        del block
        torch.ones(1, device="cuda").item()
        active.append(torch.cuda.memory_stats()["active_bytes.all.peak"])
    assert active == [active[0]] * 4
    assert active[0] < 1.5 * 2**28
    assert not [warned for warned in gpu.run.warnings if warned.code == "blocks-await-streams"]


def test_a_run_whose_frees_depend_on_the_host_is_not_certain(gpu):
    side = torch.cuda.Stream()
    for _ in range(3):
        block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            block.add_(1)
        block.record_stream(side)
        del block
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 3 * 2**28
    assert [warned.code for warned in gpu.run.warnings] == ["blocks-await-streams"]
