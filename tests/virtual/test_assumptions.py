"""Programs whose sizes depend on data: what is assumed, what the error bar says, and that it holds the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vramfit.errors import UsageError
from vramfit.options.assume_choice import Assume
from vramfit.virtual.data_dependent.shadow import MAX_KNOWN
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


# -- the error bar follows what is made from assumed sizes ---------------------------------------------------------

ROWS = 50_000


def mask() -> Tensor:
    return cuda(ROWS) > 0.5


def empty_of_count() -> object:
    count = int(mask().sum())
    return [torch.empty(count, 4, device="cuda") for _ in range(5)]


def empty_of_length() -> object:
    count = torch.nonzero(mask()).shape[0]
    return [torch.empty(count, 4, device="cuda") for _ in range(5)]


def empty_of_arithmetic() -> object:
    count = int(mask().sum())
    return torch.empty(3 * count, 4, device="cuda"), torch.empty(count + 1, 4, device="cuda")


def joined() -> object:
    rows = torch.cat([cuda(ROWS, 4)[mask()], torch.zeros(7, 4, device="cuda")])
    return [rows * number for number in range(5)]


def padded() -> object:
    rows = F.pad(cuda(ROWS, 4)[mask()], (0, 0, 0, 3))
    return [rows * number for number in range(5)]


def cut() -> object:
    rows = cuda(ROWS, 4)[mask()]
    return [rows[1:] + 1, rows[::2] + 1, rows[:-3] + 1, rows.chunk(2)[0] * 2]


def flattened() -> object:
    rows = cuda(ROWS, 4)[mask()]
    return rows.flatten() + 1, rows.view(-1, 2, 2).transpose(0, 1).contiguous().sum(0)


def sorted_rows() -> object:
    return torch.sort(cuda(ROWS)[mask()])


def stepwise() -> object:
    kept = cuda(ROWS)[mask()]
    return kept[kept > 1].cumsum(0)


@pytest.mark.parametrize(
    "program",
    [
        empty_of_count,
        empty_of_length,
        empty_of_arithmetic,
        joined,
        padded,
        cut,
        flattened,
        sorted_rows,
        stepwise,
    ],
)
def test_what_is_made_from_an_assumed_size_has_its_bar(program: Callable[[], object]) -> None:
    low, typical, high = bar(measure(program, Assume.TYPICAL))
    least, most, _ = bar(measure(program, Assume.UPPER))
    assert low < typical < high
    assert low <= most <= high, "the bar of what is typical holds the most that can be"
    assert least <= typical <= most, "the bar of the most holds what is typical"


def test_temporaries_of_assumed_sizes_widen_the_bar() -> None:
    """A sort's temporaries are as uncertain as what it sorts."""

    def program() -> None:
        kept = cuda(ROWS)[mask()]
        torch.cuda.reset_peak_memory_stats()
        torch.sort(kept)

    low, typical, high = bar(measure(program, Assume.TYPICAL))
    most = bar(measure(program, Assume.UPPER))[1]
    assert low < typical < most <= high


def test_a_size_that_shows_nothing_may_be_more() -> None:
    def program() -> None:
        labels = torch.randint(0, 10, (ROWS, 8), device="cuda")
        x = cuda(ROWS, 8)
        x[labels == 12]  # no label is 12, says the range: a mistaken range is not an exact count

    _, typical, high = bar(measure(program, Assume.TYPICAL))
    assert high - typical >= 4 * 8 * ROWS


def test_a_certain_program_has_no_bar() -> None:
    def program() -> None:
        x = cuda(ROWS, 4)
        kept = x[mask()]
        del kept
        torch.cuda.empty_cache()

    def plain() -> None:
        program()
        y = [cuda(ROWS, 64) for _ in range(8)]
        (y[0] + y[1]).sum()

    low, peak, high = bar(measure(plain, Assume.TYPICAL))
    assert (low, high) == (peak, peak)


def test_a_resized_storage_leaves_its_bar_behind() -> None:
    def program() -> None:
        kept = cuda(ROWS)[mask()]
        kept.resize_(0)
        kept.untyped_storage().resize_(0)
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    low, peak, high = bar(measure(program, Assume.TYPICAL))
    assert (low, high) == (peak, peak)


def test_guessed_counts_that_a_program_only_reads_leave_no_bar() -> None:
    """Counting what was right is in every training loop."""

    def program() -> None:
        right = (cuda(ROWS, 10).argmax(1) == torch.randint(0, 10, (ROWS,), device="cuda")).sum().item()
        assert right > 0
        torch.zeros(ROWS, 16, device="cuda").sum()
        torch.empty(4096, 4096, device="cuda")

    low, peak, high = bar(measure(program, Assume.TYPICAL))
    assert (low, high) == (peak, peak)


# -- what is expected of values ------------------------------------------------------------------------------------


def kept(make: Callable[[], Tensor]) -> int:
    """How many elements a mask selects, by what is expected."""
    found: list[int] = []
    measure(lambda: found.append(len(make().nonzero())), Assume.TYPICAL)
    return found[0]


LARGE = 300_000  # more than values are followed for


def full(value: int) -> Tensor:
    return torch.full((LARGE,), value, device="cuda")


def draws(low: int, high: int) -> Tensor:
    return torch.randint(low, high, (LARGE,), device="cuda")


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (lambda: full(-100) > 0, 0),
        (lambda: full(-100) == -100, 1),
        (lambda: full(-100) != -100, 0),
        (lambda: full(-100) < 0, 1),
        (lambda: full(0) == 0, 1),
        (lambda: full(0) >= 0, 1),
        (lambda: full(3)[:1000].repeat(LARGE // 1000) > 2, 1),
        (lambda: full(7).bool(), 1),
        (lambda: full(0).bool().logical_not(), 1),
        (lambda: torch.full((LARGE,), 0.5, device="cuda", dtype=torch.int64).bool(), 0),
        (lambda: draws(5, 10) == 7, 1 / 5),
        (lambda: draws(5, 10) == 4, 0),
        (lambda: draws(5, 10) != 7, 4 / 5),
        (lambda: draws(0, 10) < 3, 3 / 10),
        (lambda: draws(0, 10) <= 3, 4 / 10),
        (lambda: draws(0, 10) > 3, 6 / 10),
        (lambda: draws(0, 10) >= 3, 7 / 10),
        (lambda: draws(0, 10) < 2.5, 3 / 10),
        (lambda: draws(-5, 5) > 0, 4 / 10),
        (lambda: draws(-5, 5) < float("inf"), 1 / 2),
        (lambda: torch.arange(10, LARGE + 10, device="cuda") < 10, 0),
        (lambda: draws(0, 2).bool(), 1 / 2),
        (lambda: ~(draws(0, 4) == 1), 3 / 4),
        (lambda: cuda(LARGE) == 0.25, 0),
        (lambda: cuda(LARGE) != 0.25, 1),
    ],
)
def test_the_share_that_holds_follows_from_the_values(make: Callable[[], Tensor], share: float) -> None:
    assert kept(make) == round(share * LARGE)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m[:1].zero_(),
        lambda m: m[:1].fill_(False),
        lambda m: m[:1].copy_(torch.zeros(1, dtype=torch.bool, device="cuda")),
        lambda m: m[:8].scatter_(0, torch.zeros(1, dtype=torch.int64, device="cuda"), True),
        lambda m: m[::2].logical_not_(),
        lambda m: m[1:].logical_and_(m[:-1]),
    ],
)
def test_a_part_that_was_written_says_nothing_of_the_whole(write: Callable[[Tensor], object]) -> None:
    counts: list[int] = []

    def program() -> None:
        m = cuda(LARGE) > 0
        write(m)
        counts.append(len(m.nonzero()))
        known = torch.ones(LARGE, dtype=torch.bool, device="cuda")
        write(known)
        counts.append(len(known.nonzero()))

    measure(program)
    assert counts == [LARGE, LARGE]


def test_a_whole_that_was_written_is_known() -> None:
    counts: list[int] = []

    def program() -> None:
        m = cuda(LARGE) > 0
        m.zero_()
        counts.append(len(m.nonzero()))
        m.fill_(True)
        counts.append(len(m.nonzero()))
        m.copy_(torch.zeros(LARGE, dtype=torch.bool, device="cuda"))
        counts.append(len(m.nonzero()))

    assert not [w for w in measure(program).run.warnings if w.code == "shape-from-data"]
    assert counts == [0, LARGE, 0]


@pytest.mark.parametrize("assume", Assume)
def test_counts_of_distinct_values_sum_to_all(assume: Assume) -> None:
    def program() -> None:
        x = cuda(MAX_KNOWN)
        _, inverse, counts = torch.unique((x * 100).long(), return_inverse=True, return_counts=True)
        assert sum(counts.tolist()) == MAX_KNOWN
        assert inverse.shape == x.shape
        few = torch.unique(torch.randint(0, 50, (LARGE,), device="cuda"), return_counts=True)[1]
        assert [len(part) for part in cuda(LARGE).split(few.tolist())] == [LARGE // 50] * 50
        assert len(torch.repeat_interleave(torch.arange(50, device="cuda"), few)) == LARGE
        assert len(full(3).unique()) == 1

    gpu = measure(program, assume)
    assert "size-without-bound" not in {w.code for w in gpu.run.warnings}


def test_a_size_that_nothing_bounds_makes_the_answer_uncertain() -> None:
    from vramfit.analysis import verdict

    def program() -> None:
        x = cuda(LARGE)
        torch.repeat_interleave(x, (x * 3).long())

    gpu = measure(program)
    (warning,) = [w for w in gpu.run.warnings if w.code == "size-without-bound"]
    assert Path(str(warning.location).rpartition(":")[0]).name == Path(__file__).name
    assert not verdict(gpu.run).certain
    assert verdict(measure(lambda: cuda(10).sum()).run).certain


def test_a_program_that_fails_on_typical_sizes_is_not_sent_to_upper_ones() -> None:
    with pytest.raises(RuntimeError), VirtualGPU("RTX 4090", assume=Assume.TYPICAL) as gpu:
        cuda(ROWS)[mask()].view(3, 7)
    (warning,) = [w for w in gpu.run.warnings if w.code == "assumed-size-failed"]
    assert "--assume" not in warning.message


def test_an_assumption_in_a_backward_pass_names_the_line_that_called_it() -> None:
    def program() -> None:
        x = cuda(1000, 100).requires_grad_()
        x[x > 0.5].sum().backward()

    gpu = measure(program)
    places = {str(w.location).rpartition(":")[0] for w in gpu.run.warnings if w.code == "shape-from-data"}
    assert {Path(place).name for place in places} == {Path(__file__).name}


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("no weights"),
        ValueError("expected 3 classes"),
        ImportError("no module named 'apex'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_not_laid_on_assumed_sizes(error: Exception) -> None:
    gpu = VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0)
    with pytest.raises(type(error)), gpu:
        x = cuda(5000)
        x[x > 0]
        raise error
    assert {w.code for w in gpu.run.warnings} == {"shape-from-data"}
