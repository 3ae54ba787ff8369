"""What an op did is done again, never anything else: traces with and without remembering are equal in every event."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._library import simple_registry
from torch.nn import functional as F

from vramfit.trace.model import COLUMNS
from vramfit.virtual import describe
from vramfit.virtual.gpu import VirtualGPU


def training() -> None:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten())
    model = nn.Sequential(body, nn.LazyLinear(64), nn.Dropout(0.1), nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    images, labels = torch.randn(4, 3, 16, 16, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, cache_enabled=False):  # it frees in any order
            hidden = model(images)
            loss = F.cross_entropy(hidden + hidden.sin() + hidden.cos(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@torch.no_grad()
def generation() -> None:
    embedding, layer = nn.Embedding(100, 32).cuda(), nn.Linear(32, 96).cuda()
    token, kept = torch.zeros(1, 1, dtype=torch.long, device="cuda"), torch.zeros(1, 2, 0, 32, device="cuda")
    for number in range(6):
        q, k, v = layer(embedding(token)).view(1, 1, 3, 1, 32).unbind(2)
        kept = torch.cat((kept, torch.stack((k, v), 1).flatten(2, 3)), dim=2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), kept[:, :1], kept[:, 1:])
        token = (token + number + int(token.item())) % 100
        if (y.softmax(-1) > 2).any():
            token = y.argmax(-1).flatten(1)


def switches() -> None:
    x = torch.randn(600, 600, device="cuda")
    for allowed in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        for _ in range(2):
            (x @ x).mul_(2).t().contiguous()
    torch.backends.cuda.matmul.allow_tf32 = False
    mask = x > 0
    for _ in range(2):
        chosen = x[mask]
        (chosen * 2).sum()
        torch.zeros(chosen.numel(), device="cuda").add_(1)
    rows = torch.arange(3, device="cuda")
    for index in (rows, rows, rows > 0, rows > 0):
        x[:3][index] = x[:3][index].half().float() + 1
    with torch.cuda.stream(torch.cuda.Stream()):
        (x + 1).record_stream(torch.cuda.default_stream())
    with torch.inference_mode():
        [(x + 1)[1:].sum() for _ in range(2)]


def run(program: Callable[[], None], *, remembers: bool) -> tuple[dict[str, Any], int]:
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, profile="none") as gpu:
        gpu.meter.repeats = remembers
        torch.cuda.manual_seed(0)
        program()
        repeated = sum(len(info.plans) for info in gpu.mode.ops.met.values())
    trace = gpu.trace
    told: dict[str, Any] = {name: getattr(trace, name) for name in COLUMNS}
    told["tables"] = trace.ops, trace.modules, trace.phases, trace.tensors, trace.frames, trace.stacks
    told["run"] = gpu.run.devices, gpu.run.warnings, gpu.run.ops, gpu.run.seconds_simulated
    return told, repeated


@pytest.mark.parametrize("program", [training, generation, switches])
def test_remembering_changes_no_event(program: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what ops of the same card did, nor what is known of ops from an earlier card."""
    monkeypatch.setattr(describe, "_of_aten", {})
    runs, known = [], []
    for remembers in (False, True):  # from one line, which is in the stacks of both
        runs.append(run(program, remembers=remembers))
        known.append(sum(len(ops.recipes) for ops in describe._of_aten.values()))
    (plain, none), (again, plans) = runs
    assert none == 0 and plans > 5, "one of the two runs remembers"
    assert known[0] == known[1] > 5, "the second card works out nothing of torch's own ops"
    for name, value in plain.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(again[name], value, err_msg=name)
        else:
            assert again[name] == value, name


def test_what_is_known_of_ops_is_of_cards_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "_of_aten", {})
    for card, kinds in (("RTX 4090", 1), ("L40S", 1), ("T4", 2)):  # compute capability 8.9, 8.9 and 7.5
        with VirtualGPU(card):
            torch.ones(8, device="cuda") + 1
        assert len(describe._of_aten) == kinds


def test_an_operator_that_is_described_anew_is_asked_anew() -> None:
    with torch.library._scoped_library("vramfit_again", "FRAGMENT") as own:
        own.define("rows(Tensor x) -> Tensor")
        for rows in (2, 3):

            @torch.library.register_fake("vramfit_again::rows", lib=own, allow_override=True)  # type: ignore[untyped-decorator]
            def _(x: torch.Tensor, rows: int = rows) -> torch.Tensor:
                return x.new_empty(rows, 8)

            with VirtualGPU("RTX 4090"):
                assert torch.ops.vramfit_again.rows(torch.ones(8, device="cuda")).shape == (rows, 8)


def test_what_values_are_taken_for_when_ops_repeat() -> None:
    seen: list[list[float]] = []
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, profile="none") as gpu:
        for _ in range(3):
            chances = torch.randn(64, 1000, device="cuda").softmax(-1)
            halves = torch.randn(64, 1000, device="cuda").sigmoid() * chances.clone()
            overwritten = chances.clone().copy_(torch.randn(64, 1000, device="cuda"))
            seen.append([t[0, 0].item() for t in (chances, halves, overwritten)])
        assert gpu.mode.ops[torch.ops.aten.sigmoid.default].plans, "it was remembered"
    assert seen[0][:2] == [pytest.approx(1e-3), pytest.approx(5e-4)]
    assert seen[1] == seen[0] == seen[2]
    assert seen[0][2] != seen[0][0], "what is overwritten is no longer a chance"


def test_what_is_remembered_follows_the_switches_of_torch(gpu: VirtualGPU) -> None:
    """The type of a quotient of whole numbers, and whose convolution it is, are in no argument."""
    whole = torch.arange(6, device="cuda")
    weight = torch.zeros(8, 16, 3, 3, device="cuda")
    images = torch.zeros(2, 16, 9, 9, device="cuda").to(memory_format=torch.channels_last)
    for _ in range(2):
        for dtype, cudnn in ((torch.float32, True), (torch.float64, False)):
            torch.set_default_dtype(dtype)
            try:
                assert {(whole / 2).dtype, (whole * 2.5).dtype, whole.sqrt().dtype} == {dtype}
            finally:
                torch.set_default_dtype(torch.float32)
            with torch.backends.cudnn.flags(enabled=cudnn):
                out = F.conv2d(images, weight)
            assert out.is_contiguous(memory_format=torch.channels_last) == cudnn


def test_what_was_told_of_a_large_mask_ends_when_it_is_overwritten() -> None:
    kept: list[int] = []
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, profile="none", assume="typical") as gpu:
        for _ in range(3):
            mask = torch.randn(600_000, 4, device="cuda").amax(1) > 0
            gpu.mode.shading.masks.hold(mask, 5)  # as where a loop waits for fewer
            mask.logical_not_()
            kept.append(len(mask.nonzero()))
        assert gpu.mode.ops[torch.ops.aten.logical_not_.default].plans, "it was remembered"
    assert kept == [300_000] * 3


def test_torchs_look_up_of_rules_is_put_back() -> None:
    find = simple_registry.find_torch_dispatch_rule
    code, defaults = find.__code__, find.__defaults__
    with VirtualGPU("RTX 4090"):
        assert find is simple_registry.find_torch_dispatch_rule and find.__code__ is not code
    assert find.__code__ is code and find.__defaults__ is defaults


def test_no_op_is_announced_to_audit_hooks_by_its_identity() -> None:
    announced: list[str] | None = None

    def hear(event: str, _: object) -> None:
        if announced is not None:
            announced.append(event)

    with VirtualGPU("24GiB"), torch.no_grad():
        x = torch.ones(8, device="cuda")
        x.view(2, 4), x + 1
        sys.addaudithook(hear)  # python can remove none: it is deaf from here on
        announced = []
        for _ in range(10):
            x.view(2, 4), x + 1
        heard, announced = announced, None
    assert heard.count("builtins.id") == 0
    assert heard, "the hook hears"
