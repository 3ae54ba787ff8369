"""What a program that ran out needs at least: held against the same program on a card without end."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from vramfit.analysis import Verdict, verdict
from vramfit.units import GIB, MIB
from vramfit.virtual.gpu import VirtualGPU

WIDTH = 4096
LAYERS = 16
WEIGHT = 4 * WIDTH * WIDTH
PARAMETERS = LAYERS * WEIGHT


def build(device: str = "cuda") -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LAYERS)))


def train(rows: int, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, steps: int = 2) -> None:
    model = build("cpu").cuda()
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.empty(rows, WIDTH, device="cuda")).sum().backward()
        optimizer.step()


def ran_out(program: Callable[[], object], budget: int) -> Verdict:
    with pytest.raises(torch.OutOfMemoryError), VirtualGPU(f"{budget}B", context_bytes=0) as gpu:
        program()
    found = verdict(gpu.run)
    assert found.fits is False
    return found


def needs(program: Callable[[], object]) -> int:
    """Bytes that the program reserves where there is no end of them."""
    with VirtualGPU("1TiB", context_bytes=0) as gpu:
        program()
    return gpu.peak_reserved_bytes


CASES = {
    "moved": (lambda: train(8), PARAMETERS // 2),
    "first forward": (lambda: train(2 * WIDTH), PARAMETERS + 300 * MIB),
    "first backward": (lambda: train(8), PARAMETERS + 100 * MIB),
    "first step": (lambda: train(8), 2 * PARAMETERS + 100 * MIB),
    "momentum": (lambda: train(8, lambda p: torch.optim.SGD(p, momentum=0.9)), PARAMETERS + 100 * MIB),
}
"""Programs, and cards that are too small for them."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_needed_at_least_counts_what_was_still_to_come(name: str) -> None:
    program, budget = CASES[name]
    found = ran_out(program, budget)
    assert found.needed <= needs(program)
    kept = 3 if name == "momentum" else 1 if name == "moved" else 4
    assert found.needed >= kept * PARAMETERS


def test_a_model_on_its_way_counts_in_the_precision_in_which_it_arrives() -> None:
    found = ran_out(lambda: build("cpu").to("cuda", torch.bfloat16), PARAMETERS // 4)
    assert found.needed == PARAMETERS // 2
    assert not found.any_batch
    assert found.oom is not None
    assert found.oom.to_come is not None
    assert found.oom.to_come.building


def test_a_model_whose_first_weight_finds_no_room_counts_in_the_precision_that_was_asked_for() -> None:
    def program() -> None:
        nn.Sequential(nn.Linear(4 * WIDTH, WIDTH, bias=False), build("cpu")).to("cuda", torch.bfloat16)

    assert ran_out(program, 100 * MIB).needed == (PARAMETERS + 4 * WEIGHT) // 2


def test_a_model_made_on_the_card_is_said_not_to_be_whole() -> None:
    found = ran_out(lambda: build("cuda"), PARAMETERS // 2)
    assert any("the model was not whole yet" in reason for reason in found.why)
    assert found.needed <= PARAMETERS


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trained_before", [False, True])
def test_no_gradients_are_promised_where_none_are_computed(
    mode: Callable[[], torch.no_grad], trained_before: bool
) -> None:
    def program() -> None:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        if trained_before:
            model(torch.empty(1, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with mode():
            model(torch.empty(32 * WIDTH, WIDTH, device="cuda"))

    found = ran_out(program, 7 * PARAMETERS if trained_before else PARAMETERS + 150 * MIB)
    assert not any("gradients" in reason for reason in found.why)
    assert found.any_batch
    assert found.needed <= needs(program)


def test_parameters_that_are_not_trained_get_no_gradients() -> None:
    def program() -> None:
        model = build().requires_grad_(False)
        adapter = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
        optimizer = torch.optim.AdamW(adapter.parameters())
        adapter(model(torch.empty(64 * WIDTH, WIDTH, device="cuda"))).sum().backward()
        optimizer.step()

    found = ran_out(program, PARAMETERS + 200 * MIB)
    assert found.oom is not None
    assert found.oom.to_come is not None
    assert found.oom.to_come.gradients_bytes == WEIGHT
    assert found.oom.to_come.states_bytes == 2 * WEIGHT


def test_where_no_batch_fits_that_is_a_reason() -> None:
    found = ran_out(lambda: train(2 * WIDTH), 2 * PARAMETERS)
    assert not found.any_batch
    assert found.why[0].startswith(
        "parameters 1.00 GiB and gradients 1.00 GiB + the states of AdamW 2.00 GiB"
    )
    assert found.advice == ()


def test_where_a_smaller_batch_fits_there_may_be_one() -> None:
    """A large request is no reason to give up: it came with the batch."""
    found = ran_out(lambda: train(16 * WIDTH), 7 * PARAMETERS)
    assert found.any_batch
    with VirtualGPU(f"{7 * PARAMETERS}B", context_bytes=0):
        train(8)


def test_no_card_is_named_for_what_is_needed_at_least() -> None:
    """A block of code is not run again: what it needs in all is not known, and states of an optimizer are in it."""

    def program() -> None:
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(6))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.empty(8, 16384, device="cuda")).sum().backward()
        optimizer.step()

    found = ran_out(program, 6 * GIB + 64 * MIB)  # parameters alone are 6 GiB
    assert found.smallest_gpu is None
    assert found.need is not None
    assert not found.need.whole
    assert found.needed > 4 * 6 * GIB - GIB


def test_gradients_are_counted_for_what_an_optimizer_has() -> None:
    """An averaged copy that is never trained may still say that it requires gradients."""

    def program(rows: int = 2 * WIDTH) -> None:
        model = build()
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.empty(rows, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        del average

    budget = 3 * PARAMETERS + 200 * MIB
    found = ran_out(program, budget)
    assert found.oom is not None
    assert found.oom.to_come is not None
    assert found.oom.to_come.gradients_bytes == PARAMETERS
    assert found.any_batch
    with VirtualGPU(f"{budget}B", context_bytes=0):
        program(8)


def test_gradients_that_are_used_up_one_by_one_are_not_counted_together() -> None:
    def program(rows: int = 4 * WIDTH) -> None:
        model = build()
        optimizers = {weight: torch.optim.SGD([weight]) for weight in model.parameters()}

        def step(weight: torch.Tensor) -> None:
            optimizers[weight].step()
            optimizers[weight].zero_grad()

        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(step)
        model(torch.empty(rows, WIDTH, device="cuda")).sum().backward()

    budget = PARAMETERS + 5 * WEIGHT
    found = ran_out(program, budget)
    assert found.any_batch
    with VirtualGPU(f"{budget}B", context_bytes=0):
        program(8)


@pytest.mark.parametrize("rows", [30 * WIDTH, 70 * WIDTH], ids=["in a module", "outside"])
def test_a_closure_of_an_optimizer_is_no_step_of_it(rows: int) -> None:
    """It asks for a batch, so that a smaller one helps, and states are still to come."""

    def program(rows: int) -> None:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())

        def closure() -> torch.Tensor:
            loss: torch.Tensor = model(torch.empty(rows, WIDTH, device="cuda")).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    budget = 5 * PARAMETERS + 300 * MIB
    found = ran_out(lambda: program(rows), budget)
    assert found.any_batch
    assert not any("at its step" in reason for reason in found.why)
    assert any("the states of AdamW 2.00 GiB still to come" in reason for reason in found.why)
    with VirtualGPU(f"{budget}B", context_bytes=0):
        program(8)


def test_states_of_an_optimizer_that_another_took_the_place_of_count_once() -> None:
    def program() -> None:
        model = build()
        earlier = torch.optim.AdamW(model.parameters())
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.empty(2 * WIDTH, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        del earlier

    found = ran_out(program, PARAMETERS + 300 * MIB)
    assert found.oom is not None
    assert found.oom.to_come is not None
    assert found.oom.to_come.states_bytes == 2 * PARAMETERS
    assert found.needed <= needs(program)


def test_many_groups_of_parameters_are_counted() -> None:
    def program() -> None:
        model = build()
        optimizer = torch.optim.AdamW([{"params": [weight]} for weight in model.parameters()])
        model(torch.empty(8, WIDTH, device="cuda")).sum().backward()
        optimizer.step()

    assert ran_out(program, PARAMETERS + 100 * MIB).needed == 4 * PARAMETERS
