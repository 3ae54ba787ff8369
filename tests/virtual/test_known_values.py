"""Indices and masks of programs keep their true values beyond the size of a counter, and decide what they decide."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vramfit.virtual.data_dependent.shadow import MAX_ELEMENTS, MAX_KNOWN
from vramfit.virtual.gpu import VirtualGPU


def codes(gpu: VirtualGPU) -> set[str]:
    return {warning.code for warning in gpu.run.warnings}


def test_which_tokens_are_marked_is_known_in_a_real_batch(gpu: VirtualGPU) -> None:
    tokens = torch.arange(4 * 2048).reshape(4, 2048) % 100
    mask = tokens.cuda() == 7
    embedded = torch.empty(4, 2048, 8, device="cuda")
    assert tokens.numel() > MAX_ELEMENTS
    assert int(mask.sum()) == int((tokens == 7).sum())
    assert embedded[mask].shape == (int((tokens == 7).sum()), 8)
    everywhere = mask.unsqueeze(-1).expand_as(embedded)  # as models put pictures in the places of tokens
    assert embedded[everywhere].numel() == 8 * int((tokens == 7).sum())
    assert codes(gpu) == set()


def test_a_mask_larger_than_its_storage_is_counted_without_making_it(gpu: VirtualGPU) -> None:
    mask = torch.tensor([[True], [False], [True]], device="cuda").expand(3, 2 * MAX_KNOWN)
    assert torch.empty(3, 2 * MAX_KNOWN, device="cuda")[mask].numel() == 4 * MAX_KNOWN
    assert torch.masked_select(torch.empty(5, 3, 1, device="cuda"), mask[:, :1]).numel() == 10
    assert codes(gpu) == set()


def test_padding_is_seen_in_a_mask(gpu: VirtualGPU) -> None:
    whole = torch.ones(8, 1024, dtype=torch.long)
    padded = whole.clone()
    padded[3, :5] = 0
    assert bool(whole.cuda().all()) and not bool(padded.cuda().all())
    assert bool(padded.cuda().bool().any()) and int(padded.cuda().sum()) == 8 * 1024 - 5
    assert codes(gpu) == set()


def test_what_is_written_over_known_values_changes_them(gpu: VirtualGPU) -> None:
    mask = torch.ones(8192, dtype=torch.long, device="cuda")
    mask[:100] = 0
    assert int(mask.sum()) == 8092
    mask.zero_()
    assert not bool(mask.any())
    mask.copy_(torch.empty(8192, device="cuda").argsort())  # nobody knows these
    assert codes(gpu) == set()
    int(mask.sum())
    assert codes(gpu) == {"guessed-value"}


def test_guesses_are_not_made_up_for_large_tensors(gpu: VirtualGPU) -> None:
    logits = torch.empty(8, 1024, 50, device="cuda")
    chosen = logits.argmax(-1)
    assert gpu.mode.shadows.find(chosen) is None
    assert gpu.mode.shadows.find(chosen + torch.ones_like(chosen)) is None
    assert gpu.mode.shadows.find(logits[0, 0].argmax()) is not None


def test_fractions_are_not_kept_beyond_the_size_of_a_counter(gpu: VirtualGPU) -> None:
    assert gpu.mode.shadows.find(torch.ones(MAX_ELEMENTS + 1).cuda()) is None
    assert gpu.mode.shadows.find(torch.ones(MAX_KNOWN + 1, dtype=torch.long).cuda()) is None


def test_pictures_that_are_not_blank_are_kept(gpu: VirtualGPU) -> None:
    pictures = torch.empty(4, 3, 64, 64, device="cuda")
    blank = (pictures == 0.0).sum(dim=(-1, -2, -3)) == 3 * 64 * 64
    assert blank.tolist() == [False] * 4
    assert "guessed-value" in codes(gpu)


# -- lists of numbers on the card ----------------------------------------------------------------------------------


def test_a_list_of_losses_becomes_a_tensor(gpu: VirtualGPU) -> None:
    numbers = [torch.tensor(n, device="cuda") for n in (1, 2, 3)]
    assert torch.tensor(numbers).tolist() == [1, 2, 3]
    made = torch.tensor([numbers, [4, 5, 6]], device="cuda")
    assert made.device.type == "cuda" and made.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert torch.as_tensor(tuple(numbers)).tolist() == [1, 2, 3]
    assert numbers[0].new_tensor(numbers).device.type == "cuda"
    assert torch.tensor([torch.ones((), dtype=torch.float64, device="cuda")]).dtype is torch.float64
    assert (
        torch.tensor([torch.ones((), dtype=torch.int32, device="cuda", requires_grad=False)]).dtype
        is torch.int32
    )
    loss = (torch.ones(2, device="cuda", requires_grad=True) * 2).sum()
    assert torch.tensor([loss, loss]).tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="one element"):
        torch.tensor([torch.ones(2, device="cuda")])
    assert codes(gpu) == set()


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_positions_index(gpu: VirtualGPU, kind: type) -> None:
    table = torch.zeros(4, 4, device="cuda")
    rows = kind(torch.tensor(n, device="cuda") for n in (0, 1))
    columns: list[Tensor] = [torch.tensor(n, device="cuda") for n in (2, 3)]
    table[rows, columns] = 1
    assert table.nonzero().tolist() == [[0, 2], [1, 3]]
    assert table[rows, columns].tolist() == [1, 1]
    assert table[1, 3:].tolist() == [1]
    assert codes(gpu) == set()


def test_guessed_positions_lie_within_what_they_index(gpu: VirtualGPU) -> None:
    experts = torch.empty(4, 8, 16, device="cuda")
    chosen = torch.randn(65_536, 4, device="cuda").topk(2).indices
    hit = F.one_hot(chosen, num_classes=5).sum((0, 1)).greater(0).nonzero()  # nobody chooses the fifth
    assert hit.shape[0] >= 4
    for (expert,) in hit:
        assert experts[expert].shape == (8, 16)
        assert experts[None, :, ..., expert].shape == (1, 4, 8)
        experts[expert, 0] = 1.0
    guessed = [int(expert) for (expert,) in hit]
    assert guessed[:4] == [0, 1, 2, 3] and max(guessed) == 3
    true = torch.tensor(4, device="cuda")
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        experts[true]
