"""A program in the shape of GRPO: a group is generated, rewarded as strings, trained on beside a reference.

The lengths are computed as TRL's trainer does (trl/trainer/grpo_trainer.py, ``_generate_single_turn``): where a row has
no end, it is as long as the batch. That several questions about the ends agree is what is tried here.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from vramfit.virtual.gpu import VirtualGPU

END, LONGEST, GROUP, WORDS, PROMPT = 1, 24, 4, 20_000, 8


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        self.head = nn.Linear(64, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(tokens)))


@torch.no_grad()
def generated(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    unfinished, made = torch.ones(GROUP, dtype=torch.long, device="cuda"), 0
    while made < LONGEST and unfinished.max() != 0:
        likely = torch.softmax(policy(tokens)[:, -1].float(), -1)
        found = torch.multinomial(likely, 1).squeeze(1)
        found = found * unfinished + END * (1 - unfinished)
        tokens = torch.cat([tokens, found[:, None]], 1)
        unfinished = unfinished * (found != END).long()
        made += 1
    return tokens


def kept(answers: torch.Tensor) -> torch.Tensor:
    ends = answers == END
    first = torch.full((GROUP,), answers.size(1), dtype=torch.long, device="cuda")
    first[ends.any(dim=1)] = ends.int().argmax(dim=1)[ends.any(dim=1)]
    return (torch.arange(answers.size(1), device="cuda").expand(GROUP, -1) <= first.unsqueeze(1)).int()


def log_probabilities(model: Policy, tokens: torch.Tensor) -> torch.Tensor:
    likely = F.log_softmax(model(tokens)[:, PROMPT - 1 : -1], -1)
    return torch.gather(likely, 2, tokens[:, PROMPT:].unsqueeze(-1)).squeeze(-1)


def loss_of(
    policy: Policy, reference: Policy, tokens: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor
):
    with torch.no_grad():
        expected = log_probabilities(reference, tokens)
    found = log_probabilities(policy, tokens)
    apart = torch.exp(expected - found) - (expected - found) - 1
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    lost = -(torch.exp(found - found.detach()) * advantages[:, None] - 0.04 * apart)
    return ((lost * mask).sum(1) / mask.sum(1)).mean()


def test_a_group_is_generated_to_its_full_length_and_trained_on() -> None:
    lengths, texts = [], []
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0) as gpu:
        policy = Policy().cuda()
        reference = copy.deepcopy(policy).eval().requires_grad_(False)
        optimizer = torch.optim.AdamW(policy.parameters())
        prompt = torch.randint(2, WORDS, (1, PROMPT)).cuda()
        for _ in range(2):
            tokens = generated(policy, prompt.repeat(GROUP, 1))
            answers = tokens[:, PROMPT:]
            mask = kept(answers)
            told = [row[keep.bool()].tolist() for row, keep in zip(answers, mask, strict=True)]
            texts += ["".join(chr(97 + token % 26) for token in row) for row in told]
            rewards = torch.tensor([float(text.count("a")) for text in texts[-GROUP:]]).cuda()
            loss_of(policy, reference, tokens, mask, rewards).backward()
            optimizer.step()
            optimizer.zero_grad()
            lengths += mask.sum(1).tolist()
        peak = torch.cuda.max_memory_allocated()
    assert [len(text) for text in texts] == [LONGEST] * 2 * GROUP, "no row has met its end"
    assert lengths == [LONGEST] * 2 * GROUP, "the mask of what is kept agrees with the rows themselves"
    # Weights, two moments and the reference's weights; log-softmax and its gradient over all words.
    weights = sum(parameter.nbytes for parameter in policy.parameters())
    assert peak > 4 * weights + 2 * GROUP * LONGEST * WORDS * 4
    assert gpu.run.exit_code == 0
