"""Programs whose sizes depend on data: what is assumed, what the error bar says, and that it holds the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vramfit.errors import UsageError
from vramfit.virtual.assume import Assume, Extent, bounds, merged, resting_on
from vramfit.virtual.gpu import VirtualGPU

TOKENS, WIDTH, EXPERTS = 8192, 64, 8


def measure(program: Callable[[], object], assume: Assume = Assume.UPPER) -> VirtualGPU:
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, assume=assume) as gpu:
        program()
    return gpu


def bar(gpu: VirtualGPU) -> tuple[int, int, int]:
    (device,) = gpu.run.devices
    peak = device.peak_allocated_bytes
    return peak - device.error_below_bytes, peak, peak + device.error_above_bytes


def cuda(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def layer(rows: Tensor) -> Tensor:
    return F.gelu(rows @ cuda(WIDTH, 4 * WIDTH)) @ cuda(4 * WIDTH, WIDTH)


class MixtureOfExperts(nn.Module):
    def __init__(self, *, even: bool) -> None:
        super().__init__()
        self.even = even
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(tokens).softmax(-1), 2, -1)
        out = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            if self.even:  # every expert gets the same number of tokens
                rows = torch.empty(2 * TOKENS // EXPERTS, 2, dtype=torch.int64, device="cuda")
                position, token = rows.unbind(1)
            else:
                position, token = torch.where(mask[number])
            out.index_add_(0, token, expert(tokens[token]) * weights[token, position, None])
        return out


def train_experts(*, even: bool) -> None:
    model = MixtureOfExperts(even=even).cuda()
    model(cuda(TOKENS, WIDTH)).square().mean().backward()


def test_a_mask_selects_all_or_half() -> None:
    shapes: list[int] = []

    def select() -> None:
        x = cuda(100, 101)
        shapes.append(len(x[x > 0]))
        shapes.append(len(torch.masked_select(x, x <= 0)))
        shapes.append(len((x > 0).nonzero()))

    measure(select)
    assert shapes == [10_100] * 3
    shapes.clear()
    measure(select, Assume.TYPICAL)
    assert shapes == [5050] * 3


def test_a_mask_and_its_negation_select_all_together() -> None:
    def select() -> None:
        x = cuda(4999)
        mask = x > 0
        assert len(x[mask]) + len(x[~mask]) == 4999

    measure(select, Assume.TYPICAL)


def test_the_error_bar_holds_what_any_data_would_need() -> None:
    x_elements = 200_000

    def with_data() -> None:
        x = cuda(x_elements // WIDTH, WIDTH)
        layer(x[x[:, 0] > 0])

    def with_rows(count: int) -> Callable[[], None]:
        def program() -> None:
            x = cuda(x_elements // WIDTH, WIDTH)
            layer(x[torch.empty(count, 1, dtype=torch.int64, device="cuda")[:, 0]])

        return program

    rows = x_elements // WIDTH
    for assume, shown in ((Assume.UPPER, rows), (Assume.TYPICAL, rows // 2)):
        low, peak, high = bar(measure(with_data, assume))
        assert low < peak <= high
        assert (peak == high) is (assume is Assume.UPPER)
        for count in (1, rows // 4, shown, rows):  # no product, and no workspace for it, with none
            truth = bar(measure(with_rows(count)))[1]
            # the positions of a mask are found with temporaries of their own, all gone before the layer's peak
            assert low - 1024 <= truth <= high + 1024, count
        assert abs(bar(measure(with_rows(shown)))[1] - peak) <= 1024


def test_routing_to_experts_is_expected_to_be_even() -> None:
    low, typical, high = bar(measure(lambda: train_experts(even=False), Assume.TYPICAL))
    even = bar(measure(lambda: train_experts(even=True)))[1]
    upper = bar(measure(lambda: train_experts(even=False), Assume.UPPER))[1]
    assert abs(typical - even) < 0.02 * even
    assert low < even < high
    assert upper > 2 * typical


def test_every_assumed_size_is_told_with_its_line() -> None:
    gpu = measure(lambda: train_experts(even=False))
    found = [w for w in gpu.run.warnings if w.code == "shape-from-data"]
    assert [w.count for w in found] == [EXPERTS]
    assert Path(str(found[0].location).rpartition(":")[0]).name == Path(__file__).name
    assert "16,384 of 16,384 elements" in found[0].message
    assert [w.code for w in gpu.run.warnings if w.code == "estimated-size"] == []  # nothing could be more


def test_counts_of_large_tensors_sum_to_what_is_counted() -> None:
    def program() -> None:
        chosen = torch.randint(0, EXPERTS, (TOKENS,), device="cuda")
        counts = torch.bincount(chosen, minlength=EXPERTS)
        assert counts.sum().item() == TOKENS
        assert counts.cumsum(0)[-1].item() == TOKENS
        parts = cuda(TOKENS, 4)[torch.argsort(chosen)].split(counts.tolist())
        assert [len(part) for part in parts] == [TOKENS // EXPERTS] * EXPERTS
        assert torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).tolist() == [TOKENS / EXPERTS] * EXPERTS
        assert F.one_hot(chosen, EXPERTS).sum(0).tolist() == [TOKENS // EXPERTS] * EXPERTS
        assert chosen.max().item() == EXPERTS - 1
        assert len(chosen.unique()) == EXPERTS

    measure(program)
    measure(program, Assume.TYPICAL)


def test_a_count_of_what_holds_follows_the_assumption() -> None:
    counts: list[int] = []

    def program() -> None:
        mask = cuda(100, 100) > 0
        counts.append(int(mask.sum()))
        counts.extend(mask.sum(1)[:2].tolist())
        counts.append(int((~mask).count_nonzero()))
        counts.append(int(torch.ones(100, 100, dtype=torch.int64, device="cuda").sum()))

    measure(program)
    assert counts == [10_000, 100, 100, 10_000, 10_000]
    counts.clear()
    measure(program, Assume.TYPICAL)
    assert counts == [5000, 50, 50, 5000, 10_000]


def test_a_mask_that_was_overwritten_is_known_no_longer() -> None:
    def program() -> None:
        mask = torch.zeros(10_000, dtype=torch.bool, device="cuda")
        assert len(mask.nonzero()) == 0
        mask[cuda(10_000) > 0] = True
        assert len(mask.nonzero()) == 10_000

    measure(program)


def test_one_hot_takes_what_it_takes_on_a_card() -> None:
    def program() -> None:
        torch.cuda.reset_peak_memory_stats()
        chosen = torch.randint(0, EXPERTS, (TOKENS,), device="cuda")
        before = torch.cuda.memory_allocated()
        hot = F.one_hot(chosen, EXPERTS)
        assert hot.dtype is torch.int64 and hot.shape == (TOKENS, EXPERTS)
        # zeros of the result and a scatter into it; comparing with a range would take a mask beside
        assert torch.cuda.max_memory_allocated() - before == 8 * TOKENS * EXPERTS

    measure(program)


def test_one_hot_of_small_tensors_is_true() -> None:
    def program() -> None:
        chosen = torch.tensor([2, 0], device="cuda")
        assert F.one_hot(chosen).tolist() == [[0, 0, 1], [1, 0, 0]]
        assert F.one_hot(chosen, 4).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
        with pytest.raises(RuntimeError):
            F.one_hot(chosen.float(), 4)

    measure(program)


def test_positions_of_small_masks_that_nobody_knows_differ() -> None:
    visited: list[int] = []

    def program() -> None:
        hits = cuda(100_000, EXPERTS).sum(0) > 0
        visited.extend(int(hit) for hit in hits.nonzero())

    measure(program)
    assert visited == list(range(EXPERTS))


def test_a_choice_among_few_is_spread_and_names_nothing_twice() -> None:
    def program() -> None:
        chosen = torch.topk(cuda(64, 1000) @ cuda(1000, EXPERTS), 2, dim=-1).indices
        assert all(len(set(row)) == 2 for row in chosen.tolist())
        assert torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist() == [16] * EXPERTS
        order = torch.sort(cuda(4, 10_000).sum(1), descending=True).indices
        assert sorted(order.tolist()) == [0, 1, 2, 3]
        columns = torch.topk(cuda(10_000, 3).sum(0).repeat(5, 1), 2, dim=0).indices
        assert all(len(set(column)) == 2 for column in columns.T.tolist())

    measure(program)


def test_a_choice_among_many_keeps_away_from_special_tokens() -> None:
    def program() -> None:
        tokens = torch.topk(cuda(4, 50_000), 3, dim=-1).indices
        assert tokens.tolist() == [[16_666, 16_667, 16_668]] * 4

    measure(program)


def test_a_program_that_fails_on_an_assumed_size_is_told_what_to_try() -> None:
    def program() -> None:
        x = cuda(100, 100)
        torch.cat([x[x > 0], x[x <= 0]]).view(100, 100)

    with (
        pytest.raises(RuntimeError, match="invalid for input of size"),
        VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0) as gpu,
    ):
        program()
    (warning,) = [w for w in gpu.run.warnings if w.code == "assumed-size-failed"]
    assert "--assume typical" in warning.message and Path(__file__).name in warning.message
    measure(program, Assume.TYPICAL)


def test_a_loop_on_values_ends_and_is_named() -> None:
    rounds = 0

    def program() -> None:
        nonlocal rounds
        x = cuda(10_000)
        while (x > 0.5).sum() > 0:
            x = x * 0.9
            rounds += 1

    gpu = measure(program)
    assert 0 < rounds < 1000
    assert {"guessed-value", "guess-flipped"} <= {w.code for w in gpu.run.warnings}


def test_only_known_assumptions_are_accepted() -> None:
    with pytest.raises(UsageError, match="likely"):
        VirtualGPU("RTX 4090", assume="likely")


def test_extents_are_found_by_their_size() -> None:
    rows = Extent(1000, 0, 2000)
    assert resting_on((1000, 64), (rows,)) == (rows,)
    assert resting_on((64_000,), (rows,)) == (rows,)  # flattened
    assert resting_on((64, 65), (rows,)) == ()
    assert bounds(4000, (1000,), (rows,)) == (0, 8000)
    assert bounds(4_000_000, (1000, 1000), (Extent(1000, 500, 2000),)) == (1_000_000, 16_000_000)
    assert merged((rows,), (Extent(1000, 10, 3000), Extent(7, 7, 7))) == (
        Extent(1000, 0, 3000),
        Extent(7, 7, 7),
    )
