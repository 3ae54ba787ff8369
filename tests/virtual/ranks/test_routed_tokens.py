"""Experts on several ranks: the tokens that a rank receives are the even share or as stated, and bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from vramfit.errors import UsageError
from vramfit.options.assume_choice import Assume, assumption
from vramfit.trace import EXPERT_RANKS
from vramfit.virtual.gpu import VirtualGPU

WORLD, EXPERTS, TOKENS, WIDTH, CHOSEN = 8, 16, 3000, 64, 2
SENT = TOKENS * CHOSEN
CODE = "tokens-of-other-ranks"

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*:FutureWarning")

Exchange = Callable[[torch.Tensor], torch.Tensor]


def in_place(counts: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    return received


def returned(counts: torch.Tensor) -> torch.Tensor:
    return functional.all_to_all_single(counts, None, None, dist.group.WORLD) + 0


def as_lists(counts: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(part) for part in counts.chunk(WORLD)]
    dist.all_to_all(parts, list(counts.chunk(WORLD)))
    return torch.cat(parts)


def given(times: int) -> Exchange:
    """What a program would hold that received so many times its even share, without asking."""
    each = times * SENT // EXPERTS
    return lambda counts: torch.full((EXPERTS,), each, device="cuda")


def experts(exchange: Exchange) -> None:
    """Tokens go to the ranks of the experts that a router chose, and back."""
    tokens = torch.randn(TOKENS, WIDTH, device="cuda")
    router = torch.randn(WIDTH, EXPERTS, device="cuda")
    chosen = torch.topk(tokens @ router, CHOSEN, -1).indices.flatten()
    counts = torch.bincount(chosen, minlength=EXPERTS)
    received = exchange(counts)
    ins = counts.view(WORLD, -1).sum(1).tolist()
    outs = received.view(WORLD, -1).sum(1).tolist()
    sent = tokens[torch.argsort(chosen) // CHOSEN]
    mine = tokens.new_empty(sum(outs), WIDTH)
    dist.all_to_all_single(mine, sent, outs, ins)
    hidden = torch.relu(mine @ torch.randn(WIDTH, 4 * WIDTH, device="cuda"))
    back = tokens.new_empty(sum(ins), WIDTH)
    dist.all_to_all_single(back, hidden @ torch.randn(4 * WIDTH, WIDTH, device="cuda"), ins, outs)


def measured(exchange: Exchange, assume: str = "upper") -> VirtualGPU:
    # Pages keep blocks from being larger than they were asked for.
    conf = "expandable_segments:True"
    with VirtualGPU("H100", rank=3, world_size=WORLD, alloc_conf=conf, assume=assume) as gpu:
        dist.init_process_group("nccl")
        torch.cuda.set_device(3)
        experts(exchange)
    return gpu


def told(gpu: VirtualGPU) -> list[str]:
    return [warning.message for warning in gpu.run.warnings if warning.code == CODE]


@pytest.fixture(scope="module")
def even() -> VirtualGPU:
    return measured(in_place)


@pytest.fixture(scope="module")
def doubled() -> VirtualGPU:
    return measured(given(2))


def peak(gpu: VirtualGPU) -> int:
    return gpu.run.devices[3].peak_allocated_bytes


def test_without_a_statement_the_even_share_is_taken_and_told(even: VirtualGPU) -> None:
    assert peak(even) == peak(measured(given(1)))
    (message,) = told(even)
    assert "their even share is taken" in message
    assert "up to 8 times that" in message
    assert even.run.trace.meta[EXPERT_RANKS] == "0,1,2,3,4,5,6,7"
    assert even.run.devices[3].error_below_bytes == 0


@pytest.mark.parametrize("exchange", [in_place, returned, as_lists])
def test_a_stated_imbalance_is_what_a_rank_receives(
    even: VirtualGPU, doubled: VirtualGPU, exchange: Exchange
) -> None:
    gpu = measured(exchange, "typical,imbalance=2")
    assert peak(gpu) == peak(doubled)
    assert any("2 times the even share is assumed, as stated" in message for message in told(gpu))
    assert gpu.run.assume == "typical,imbalance=2"
    # The rank that receives most has the even share at least: there the error bar begins.
    assert peak(gpu) - gpu.run.devices[3].error_below_bytes <= peak(even) < peak(gpu)
    assert gpu.run.devices[3].error_above_bytes == 0


def test_no_rank_receives_more_than_all_send() -> None:
    gpu = measured(in_place, "imbalance=100")
    assert peak(gpu) == peak(measured(given(WORLD)))
    assert any("8 ranks cannot send more" in message for message in told(gpu))


def test_what_the_program_does_not_exchange_by_itself_is_left_alone() -> None:
    with VirtualGPU("H100", rank=0, world_size=2, alloc_conf="", assume="imbalance=2") as gpu:
        dist.init_process_group("nccl")
        fractions = torch.ones(4, device="cuda")
        received = torch.empty_like(fractions)
        dist.all_to_all_single(received, fractions)
        assert received.tolist() == [1.0] * 4
        whole = torch.tensor([5, 6, 7, 8], device="cuda")
        swapped = torch.empty_like(whole)
        dist.all_to_all_single(swapped, whole)
        assert swapped.tolist() == [13] * 4  # twice the 26 that it sends, over four numbers
        gathered = torch.empty(8, dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(gathered, whole)
        assert gathered.tolist() == [5, 6, 7, 8] * 2
    assert len(told(gpu)) == 1


@pytest.mark.parametrize(
    ("written", "sizes", "imbalance", "text"),
    [
        ("upper", Assume.UPPER, None, "upper"),
        ("typical", Assume.TYPICAL, None, "typical"),
        ("imbalance=1.5", Assume.UPPER, 1.5, "upper,imbalance=1.5"),
        ("typical, imbalance=2", Assume.TYPICAL, 2.0, "typical,imbalance=2"),
        ("imbalance=2,typical", Assume.TYPICAL, 2.0, "typical,imbalance=2"),
    ],
)
def test_what_can_be_assumed(written: str, sizes: Assume, imbalance: float | None, text: str) -> None:
    found = assumption(written)
    assert (found.sizes, found.imbalance, found.text) == (sizes, imbalance, text)
    assert assumption(found.text) == found


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("most", "nothing can be assumed as 'most'. Choose upper or typical, and imbalance=2 for experts"),
        ("upper,typical", "nothing can be assumed as 'upper,typical'"),
        ("imbalance", "nothing can be assumed as 'imbalance'"),
        ("imbalance=0.5", "the worst rank cannot receive 0.5 times its even share"),
        ("imbalance=nan", "the worst rank cannot receive nan times its even share"),
        ("imbalance=x", "Write a number of at least 1"),
    ],
)
def test_what_cannot_be_assumed(written: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        assumption(written)
    assert message in str(raised.value)
