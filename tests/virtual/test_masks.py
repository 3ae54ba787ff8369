"""A mask selects as many elements on the card as its copy on the host, whatever is assumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vramfit.options.assume_choice import Assume
from vramfit.virtual.data_dependent.shadow import MAX_ELEMENTS
from vramfit.virtual.fake_impls.host import LONGEST_LIST
from vramfit.virtual.gpu import VirtualGPU

BOTH = pytest.mark.parametrize("assume", list(Assume))
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "compared": lambda x: x > 0,
    "negated": lambda x: ~(x > 0),
    "both": lambda x: (x > 0) & (x < 1),
    "either": lambda x: (x > 0) | (x < -1),
    "close": lambda x: ~torch.isclose(x, torch.ones_like(x), atol=20.0),
    "of rows": lambda x: (x[:, None].expand(-1, 8) > 0).any(1),
    "of counts": lambda x: (x[:, None].expand(-1, 8) > 0).sum(1) / 8 >= 0.95,
    "of a rank": lambda x: x[:, None].expand(-1, 8).argmax(1) == 3,
    "of numbers": lambda x: x == 0.5,
    "finite": torch.isfinite,
    "no number": torch.isnan,
    "joined": lambda x: torch.cat([x[: len(x) // 2] > 0, x[len(x) // 2 :] < 0]),
    "cast": lambda x: x.argsort().bool(),
}


def run(program: Callable[[], None], assume: Assume) -> VirtualGPU:
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, assume=assume) as gpu:
        program()
    return gpu


@BOTH
@pytest.mark.parametrize("elements", [96, MAX_ELEMENTS + 904])
def test_whoever_asks_a_mask_gets_the_same_count(assume: Assume, elements: int) -> None:
    found: dict[str, set[int]] = {}
    answers: dict[str, tuple[bool, bool]] = {}

    def program() -> None:
        x = torch.randn(2 * elements, 1024, device="cuda").amax(1)[:elements].clone()
        rows = np.arange(elements)
        for name, make in MASKS.items():
            mask = make(x)
            assert mask.dtype is torch.bool
            host = mask.cpu()
            found[name] = {
                len(x[mask]),
                len(torch.masked_select(x, mask)),
                len(mask.nonzero()),
                int(mask.sum()),
                len(rows[mask.cpu().numpy()]),
                sum(mask.tolist()),
                len(host.nonzero()),
                int(host.sum()),
                len(torch.arange(elements)[host]),
                len([row for row in rows if host[row]]),
            }
            count = int(host.sum())
            answers[name] = (
                bool(mask.any()),
                bool(mask.all()),
            )  # asked in an assert, they would be what it wants
            assert answers[name] == (count > 0, count == elements), name

    run(program, assume)
    assert {name: counts for name, counts in found.items() if len(counts) > 1} == {}
    assert found["compared"] == {elements if assume is Assume.UPPER else elements // 2}
    assert found["finite"] == {elements} and found["no number"] == {0}


@BOTH
def test_a_part_of_a_large_mask_counts_the_same_in_numbers(assume: Assume) -> None:
    found: set[int] = set()

    def program() -> None:
        mask = (torch.randn(96, 640, device="cuda") > 0).view(-1)[:96]
        found.update(
            (int(mask.long().sum()), len(mask.int().nonzero()), len(mask.nonzero()), int(mask.sum()))
        )

    run(program, assume)
    assert found == {96 if assume is Assume.UPPER else 48}


def _filtered(values: Any, keep: Tensor) -> Any:
    if isinstance(values, torch.Tensor):
        return values[torch.as_tensor(keep, device=values.device)]
    if isinstance(values, np.ndarray):
        return values[keep.cpu().numpy()]
    return [value for row, value in enumerate(values) if keep[row]]


@BOTH
def test_a_filter_over_the_card_and_the_host_keeps_rows_together(assume: Assume) -> None:
    """What Segment Anything's ``MaskData.filter`` does (segment_anything/utils/amg.py)."""
    kept: list[set[int]] = []

    def program() -> None:
        logits = torch.randn(96, 64, 64, device="cuda")
        data: list[Any] = [logits, logits.mean((1, 2)), np.arange(96), list(range(96)), torch.arange(96)]
        for threshold in (0.1, 0.2, 0.3):
            above, below = (data[0] > threshold).sum((1, 2)), (data[0] > -threshold).sum((1, 2))
            keep = data[1] > threshold if threshold < 0.2 else above / below >= threshold
            data = [_filtered(values, keep) for values in data]
            kept.append({len(values) for values in data})

    run(program, assume)
    assert kept == ([{96}] * 3 if assume is Assume.UPPER else [{48}, {24}, {12}])


@BOTH
def test_lists_of_an_assumed_length_end(assume: Assume) -> None:
    """Segment Anything encodes each mask by lists of where it changes: a hundred thousand made-up numbers each."""
    lengths: list[int] = []

    def program() -> None:
        masks = torch.randn(8, 500, 400, device="cuda") > 0
        flat = masks.permute(0, 2, 1).flatten(1)
        changes = (flat[:, 1:] ^ flat[:, :-1]).nonzero()
        for number in range(8):
            where = changes[changes[:, 0] == number, 1]
            lengths.append(len((where + 1).cpu().tolist()))
            lengths.append(sum(1 for _ in where))
        if assume is Assume.TYPICAL:  # a position lies in one of the eight masks
            assert len(where) == round(len(changes) / 8)

    gpu = run(program, assume)
    assert lengths == [LONGEST_LIST] * 16
    assert "list-shortened" in {w.code for w in gpu.run.warnings}


def test_lists_of_known_length_are_whole(gpu: VirtualGPU) -> None:
    known = torch.arange(5000, device="cuda")
    assert len(known[known > 1].tolist()) == 4998
    assert len(torch.randn(5000, device="cuda").tolist()) == len(torch.randn(5000).tolist()) == 5000
    assert sum(1 for _ in torch.randn(5000, device="cuda").cpu()) == 5000


def _encoded(flags: Tensor) -> list[int]:
    """A round for each row, as Segment Anything's ``mask_to_rle_pytorch`` does (segment_anything/utils/amg.py)."""
    rows, _ = flags.shape
    changes = (flags[:, 1:] ^ flags[:, :-1]).nonzero()
    found: list[int] = []
    for row in range(rows):
        where = changes[changes[:, 0] == row, 1]
        found += [len(where)]
    return found


def _look(batches: int, rounds: list[int]) -> None:
    for _ in range(batches):
        logits = torch.randn(192, 300, device="cuda")
        points: Any = np.arange(192)
        keep = logits.mean(1) > 0.1
        logits, points = _filtered(logits, keep), _filtered(points, keep)
        keep = (logits > 0).sum(1) / 300 > 0.5
        logits, points = _filtered(logits, keep), _filtered(points, keep)
        rounds.append(len(_encoded(logits > 0)))
        assert len(logits) == len(points) == rounds[-1]


def test_loops_over_assumed_rows_go_on_with_few() -> None:
    rounds: dict[Assume, list[int]] = {assume: [] for assume in Assume}
    for assume, found in rounds.items():
        with torch.no_grad():
            gpu = run(lambda found=found: _look(16, found), assume)  # type: ignore[misc]
        if assume is Assume.UPPER:
            (device,) = gpu.run.devices
            shortened = [w for w in gpu.run.warnings if w.code == "rows-shortened"]
            assert len(shortened) == 1
            once = run(lambda: _look(1, []), assume).run.devices[0]
            assert device.peak_allocated_bytes >= once.peak_allocated_bytes
    assert rounds[Assume.UPPER][0] == 192
    assert sum(rounds[Assume.UPPER]) < sum(rounds[Assume.TYPICAL])


def test_loops_over_assumed_rows_stay_where_gradients_are_kept() -> None:
    rounds: list[int] = []
    run(lambda: _look(3, rounds), Assume.UPPER)
    assert rounds == [192] * 3


@BOTH
@pytest.mark.parametrize("kind", [torch.uint8, torch.bool])
@pytest.mark.parametrize("anchors", [2000, 300_000])
def test_a_mask_holds_no_more_than_what_was_written(assume: Assume, kind: torch.dtype, anchors: int) -> None:
    """The samplers of detectors: torchvision/models/detection/_utils.py, ``BalancedPositiveNegativeSampler``."""
    found: list[int] = []

    def program() -> None:
        scores = torch.randn(anchors, 64, device="cuda").amax(1)
        masks = []
        for side, wanted in ((scores > 1, 128), (scores < 0, 384)):
            where = torch.where(side)[0]
            where = where[torch.randperm(len(where), device="cuda")[: min(len(where), wanted)]]
            mask = torch.zeros_like(scores, dtype=kind)
            mask[where] = 1
            masks.append(mask)
        found.append(len(torch.where(masks[0])[0]))
        found.append(len(torch.where(masks[0] | masks[1])[0]))
        found.append(len(torch.where(torch.cat(masks))[0]))
        found.append(int((masks[0] != 0).sum()))
        best = torch.zeros(anchors, dtype=torch.bool, device="cuda")
        best[scores.topk(100).indices] = True
        best[:7] = scores[:7] > 0
        found.append(len(scores[best]))
        assert len(torch.arange(anchors)[best.cpu()]) == found[-1] == int(best.sum())

    run(program, assume)
    assert (found[0], found[2], found[3]) == (128, 512, 128)
    if assume is Assume.UPPER:
        assert (found[1], found[4]) == (512, 107)
    else:  # the two may overlap, and half of what was compared holds
        assert 448 < found[1] <= 512 and found[4] == 104


@BOTH
@pytest.mark.parametrize("positions", [200, 20_000])
def test_a_mask_filled_at_positions_holds_no_more_than_those(assume: Assume, positions: int) -> None:
    """What ``mask[positions] = 1`` is since torch 2.15, and what programs call."""
    found: list[int] = []

    def program() -> None:
        for value in (True, torch.tensor(True, device="cuda")):
            where = torch.randperm(100 * positions, device="cuda")[:positions]
            mask = torch.zeros(100 * positions, dtype=torch.bool, device="cuda")
            found.append(len(torch.where(mask.index_fill(0, where, value))[0]))
            found.append(len(torch.where(mask.index_fill_(-1, where, value))[0]))
            rows = torch.zeros(positions, 8, dtype=torch.bool, device="cuda")
            found.append(len(rows[rows.index_fill_(0, where[:3], value)]))

    run(program, assume)
    assert found == 2 * [positions, positions, 24]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_the_virtual_gpu_starts_without_gradients(guard: Callable[[], Any]) -> None:
    with guard():
        gpu = run(lambda: torch.zeros(1000, device="cuda"), Assume.UPPER)
    assert gpu.run.devices[0].peak_allocated_bytes == 4096
