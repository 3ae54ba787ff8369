"""Activation checkpointing: the plain program's gradients bit for bit, and the bytes of recipes written by hand."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import io
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.resnet import ResNet
from tests.techniques.toys import Language, all_toys, class_loss, gradients, language_loss, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vramfit.errors import UsageError
from vramfit.techniques import (
    AttachedProgram,
    BlockOp,
    ModelBlock,
    Numerics,
    Profile,
    find_technique,
    setting_from_plain,
    setting_to_plain,
)
from vramfit.techniques.activation_checkpointing import (
    ActivationCheckpointing,
    Checkpointing,
    Mode,
    keeps,
    op_specs,
    setting_for,
)
from vramfit.techniques.activation_checkpointing.region import Recomputed
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload, to_device

TECHNIQUE = ActivationCheckpointing()
WHOLE = Checkpointing()
ONE_SEGMENT = Checkpointing(mode=Mode.SEGMENTS, segments=1)
NESTED = Checkpointing(mode=Mode.SEGMENTS, segments=1, nested=True)
EXPENSIVE = Checkpointing(mode=Mode.SELECTIVE)
RANDOM = Checkpointing(mode=Mode.SELECTIVE, save={"*": ("empty_like", "native_dropout", "mm#0", "add")})
CASTS = Checkpointing(mode=Mode.SELECTIVE, save={"*": ("_to_copy", "matmuls")})
KEPT_IN_A_SEGMENT = Checkpointing(mode=Mode.SEGMENTS, segments=1, save={"*": ("expensive",)})
LAZY = Checkpointing(mode=Mode.LAZY)
LAZY_EXPENSIVE = Checkpointing(mode=Mode.LAZY, save={"*": ("expensive",)})
LAZY_RANDOM = Checkpointing(mode=Mode.LAZY, save={"*": ("empty_like", "native_dropout", "mm#0", "add")})
LAZY_MODEL = Checkpointing(mode=Mode.LAZY, modules=("",), save={"": ("expensive",)})
SETTINGS = (
    *(WHOLE, Checkpointing(mode=Mode.EVERY), ONE_SEGMENT, NESTED, EXPENSIVE, KEPT_IN_A_SEGMENT, RANDOM),
    *(LAZY, LAZY_EXPENSIVE, LAZY_RANDOM, LAZY_MODEL),
)
# Blocks of the toys that have none that repeat.
NAMED = {"two-losses": ("trunk",), "lstm": ("rnn",), "mlp": ("0", "1", "3", "4")}


def assert_same(workload: Workload, setting: Checkpointing, *, steps: int = 1) -> None:
    expected = gradients(workload, steps=steps)
    found = gradients(TECHNIQUE.apply(workload, setting), steps=steps)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), f"{name} with {setting}"


def attached(model: nn.Module, setting: Checkpointing = WHOLE) -> AttachedProgram:
    live = AttachedProgram(model, None)
    TECHNIQUE.attach(live, setting)
    return live


def backward(model: nn.Module, *args: Any, seed: int = 3, **kwargs: Any) -> list[torch.Tensor]:
    """Gradients of the sum of squares of a model's output."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(*args, **kwargs)
    out = next(iter(out.values())) if isinstance(out, dict) else out
    out.square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine, its)


# -- the same results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in all_toys() if name != "lstm"])
def test_gradients_are_the_plain_programs(name: str) -> None:
    for setting in SETTINGS:
        modules = setting.modules or NAMED.get(name, ())
        assert_same(all_toys()[name], dataclasses.replace(setting, modules=modules), steps=2)


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_layer": 3, "n_embd": 32, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "LlamaForCausalLM": {**SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1},
    "BertForMaskedLM": SMALL,
    "T5ForConditionalGeneration": {
        "num_layers": 2,
        "d_model": 32,
        "d_ff": 64,
        "num_heads": 4,
        "d_kv": 8,
        "decoder_start_token_id": 0,
    },
    "AlbertForMaskedLM": {
        **SMALL,
        "embedding_size": 16,
        "hidden_dropout_prob": 0.1,
    },  # one layer, three times
    "ViTForImageClassification": {**SMALL, "image_size": 32, "patch_size": 8},
}


def of_transformers(name: str, *, autocast: bool) -> Workload:
    transformers = pytest.importorskip("transformers")
    options = dict(MODELS[name])
    pictures = "image_size" in options

    def make() -> nn.Module:
        kind = getattr(transformers, name)
        if not pictures:
            options["vocab_size"] = 97
        torch.manual_seed(0)
        model: nn.Module = kind(kind.config_class(**options)).train()
        return model

    def batch(batch_size: int) -> torch.Tensor:
        if pictures:
            return numbers(batch_size, 3, 32, 32)
        return torch.randint(97, (batch_size, 16), generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if pictures:
                return model(inputs).logits.square().sum()
            return model(input_ids=inputs, labels=inputs).loss

    return Workload(
        model=make,
        batch=batch,
        sizes={"batch_size": 2},
        loss=loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_models_of_transformers(name: str) -> None:
    plain = of_transformers(name, autocast=False)
    for setting in (WHOLE, ONE_SEGMENT, NESTED, EXPENSIVE, LAZY, LAZY_EXPENSIVE, LAZY_MODEL):
        assert_same(plain, setting)
    lower = of_transformers(name, autocast=True)
    for setting in (ONE_SEGMENT, EXPENSIVE, CASTS, LAZY, LAZY_MODEL):
        assert_same(lower, setting)


def test_running_statistics_are_updated_once() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return ResNet((2, 2), width=4, classes=10)

    plain = make()
    expected = backward(plain, numbers(4, 3, 32, 32))
    for setting in (WHOLE, ONE_SEGMENT, NESTED, EXPENSIVE, LAZY, LAZY_EXPENSIVE, LAZY_MODEL):
        model = make()
        attached(model, setting)
        assert_equal(backward(model, numbers(4, 3, 32, 32)), expected)
        for (name, mine), its in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, its), f"{name} with {setting}"


class Noisy(nn.Module):
    """Two draws, so that the second depends on whether the first is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.native_dropout(layer(x).sin(), 0.5, True)[0]
        return x.cos()


@pytest.mark.torch_versions
def test_a_kept_draw_leaves_the_later_ones_as_they_were() -> None:
    model = nn.Sequential(Noisy())
    x = numbers(8, 16)
    expected = backward(model, x)
    attached(model, Checkpointing(mode=Mode.SELECTIVE, modules=("0",), save={"0": ("native_dropout#0",)}))
    assert_equal(backward(model, x), expected)


def test_a_kept_result_may_be_changed_in_place_in_the_block() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ELU(inplace=True), nn.Linear(8, 8)))
    x = numbers(4, 8)
    expected = backward(model, x)
    attached(model, Checkpointing(mode=Mode.SELECTIVE, modules=("0",), save={"*": ("addmm",)}))
    assert_equal(backward(model, x), expected)


class Blocks(nn.Module):
    """A loop over blocks with something in between."""

    def __init__(self, *blocks: nn.Module, between: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.between is not None:
                x = self.between(x)
        return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))


@pytest.mark.parametrize("between", [F.elu_, lambda x: x + 1, lambda x: x.mul_(2), lambda x: x.detach()])
def test_segments_where_the_parent_does_something_in_between(between: Callable[[torch.Tensor], Any]) -> None:
    model = Blocks(mlp(), mlp(), mlp(), between=between)
    model.add_module("last", nn.Identity())
    x = numbers(4, 8).requires_grad_()
    head = nn.Linear(8, 1)
    whole = nn.Sequential(model, head)
    expected = backward(whole, x)
    attached(
        whole, Checkpointing(mode=Mode.SEGMENTS, segments=1, modules=tuple(f"0.blocks.{i}" for i in range(3)))
    )
    assert_equal(backward(whole, x), expected)


class Keywords(nn.Module):
    """Takes containers and keywords, and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, more: tuple[torch.Tensor, int], log: list[str]) -> dict[str, Any]:
        log.append("seen")
        shift, times = more
        return {"out": self.dropout(self.layer(x).tanh()) * times + shift, "name": "block", "pair": (x, None)}


class Twice(nn.Module):
    """Uses one block twice, in another precision each time."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Keywords()

    def forward(self, x: torch.Tensor, log: list[str]) -> dict[str, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.block(x, more=(x.sin(), 2), log=log)["out"]
            with torch.autocast("cpu", enabled=False):
                return self.block(x.float(), more=(x.cos(), 3), log=log)


@pytest.mark.parametrize("setting", [WHOLE, EXPENSIVE, LAZY, LAZY_EXPENSIVE])
def test_keywords_containers_nested_autocast_and_a_block_used_twice(setting: Checkpointing) -> None:
    model, x = Twice(), numbers(4, 8)
    expected = backward(model, x, [])
    attached(model, dataclasses.replace(setting, modules=("block",)))
    log: list[str] = []
    assert_equal(backward(model, x, log), expected)
    assert (
        log == ["seen"] * 2
    )  # of the second runs, the caller's list hears nothing, and a lazy block has none


class Attending(nn.Module):
    """Attention, which asks whether its query is its key."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.after = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm(x)
        return self.after(x + self.attention(seen, seen, seen)[0])


@pytest.mark.parametrize("modules", [("0.attention",), ("0", "0.attention"), ("0", "0.attention", "1")])
@pytest.mark.parametrize("packed", [False, True])
def test_an_argument_that_is_given_twice_is_one_in_the_second_run(
    modules: tuple[str, ...], packed: bool
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Attending(), Attending()), numbers(2, 5, 16).requires_grad_()
    expected = backward(model, x)
    attached(model, Checkpointing(modules=modules))
    # Hooks around it, as those of offloading, make a new object of each saved tensor.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    with hooks if packed else contextlib.nullcontext():
        assert_equal(backward(model, x), expected)


def test_gradients_with_a_scaler_and_with_a_retained_graph() -> None:
    model, x = Blocks(mlp(), mlp()), numbers(4, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        loss = scaler.scale(model(x).square().sum())
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = run()
    for setting in (WHOLE, ONE_SEGMENT, NESTED, LAZY, LAZY_MODEL):
        live = attached(model, setting)
        assert_equal(run(), expected)
        live.undo()


@pytest.mark.parametrize("setting", [WHOLE, ONE_SEGMENT, NESTED, KEPT_IN_A_SEGMENT])
def test_hooks_around_it_see_the_inputs_of_blocks(setting: Checkpointing) -> None:
    model, x = nn.Sequential(Blocks(mlp(), mlp(), mlp())), numbers(4, 8)
    expected = backward(model, x)
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        seen.append(tensor.clone())
        return len(seen) - 1

    attached(model, dataclasses.replace(setting, modules=tuple(f"0.blocks.{i}" for i in range(3))))
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: seen[index]):
        out = model(x)
    # Until 2.11 torch saves a tensor without elements beside each region's inputs.
    assert sum(tensor.numel() > 0 for tensor in seen) == (3 if setting is WHOLE else 1)
    model.zero_grad()
    out.square().sum().backward()
    assert_equal([p.grad for p in model.parameters() if p.grad is not None], expected)


@pytest.mark.parametrize("setting", [WHOLE, ONE_SEGMENT, NESTED])
def test_gradients_of_gradients(setting: Checkpointing) -> None:
    model = Blocks(mlp(), mlp(), mlp())
    x = numbers(4, 8).requires_grad_()

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (slope.square().sum() + out).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = run()
    attached(model, setting)
    assert_equal(run(), expected)


def test_a_part_is_recomputed_inside_its_block() -> None:
    plain = all_toys()["language-tied"]
    assert_same(plain, Checkpointing(modules=("layers.0", "layers.0.up", "layers.1", "layers.1.qkv")))


# -- how often blocks run ------------------------------------------------------------------------------------------


Log = SimpleQueue[int]


def drained(log: Log) -> list[int]:
    """What was put into a log since it was last drained."""
    return [log.get() for _ in range(log.qsize())]


class Counted(nn.Module):
    """Says when it runs, in what is no state: that would be put back."""

    def __init__(self, log: Log, number: int) -> None:
        super().__init__()
        self.log, self.number = log, number
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.put(self.number)
        return self.layer(x).sin()


@pytest.mark.parametrize(
    ("setting", "again"),
    [
        (WHOLE, [3, 2, 1, 0]),
        (Checkpointing(mode=Mode.EVERY, every=3), [3, 0]),
        (Checkpointing(mode=Mode.SEGMENTS), [2, 3, 0, 1]),
        (Checkpointing(mode=Mode.SEGMENTS, nested=True), [2, 3, 2, 0, 1, 0]),
        (Checkpointing(mode=Mode.SEGMENTS, segments=1), [0, 1, 2, 3]),
        (Checkpointing(mode=Mode.SEGMENTS, segments=3), [3, 2, 0, 1]),
        (Checkpointing(mode=Mode.NONE), []),
    ],
)
def test_blocks_run_again_as_often_as_they_must(setting: Checkpointing, again: list[int]) -> None:
    log: Log = SimpleQueue()
    model = Blocks(*(Counted(log, number) for number in range(4)))
    attached(model, dataclasses.replace(setting, modules=tuple(f"blocks.{i}" for i in range(4))))
    out = model(numbers(2, 4))
    assert drained(log) == [0, 1, 2, 3]
    out.sum().backward()
    assert drained(log) == again


def test_nothing_is_done_in_eval_or_without_gradients() -> None:
    log: Log = SimpleQueue()
    model = Blocks(Counted(log, 0))
    attached(model, Checkpointing(modules=("blocks.0",)))
    x = numbers(2, 4).requires_grad_()
    model.eval()
    model(x).sum().backward()
    model.train()
    with torch.no_grad():
        model(x)
    assert drained(log) == [0, 0]


class Writes(nn.Module):
    """Counts its runs in an attribute, replaces a buffer, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.runs = 0
        self.draws = torch.Generator().manual_seed(3)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        out = (self.layer(x) - self.centre).sin() * self.runs * torch.rand(4, generator=self.draws)
        self.centre = 0.5 * self.centre + 0.5 * out.detach().mean(0)
        return out


@pytest.mark.parametrize(
    "setting", [WHOLE, Checkpointing(mode=Mode.SEGMENTS, segments=1), Checkpointing(mode=Mode.LAZY)]
)
def test_what_a_block_writes_is_written_once(setting: Checkpointing) -> None:
    def after(apply: bool) -> tuple[nn.Module, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = Blocks(Writes(), Writes())
        if apply:
            attached(model, dataclasses.replace(setting, modules=("blocks.0", "blocks.1")))
        for _ in range(3):
            model(torch.linspace(-1, 1, 8).view(2, 4)).sum().backward()
        return model, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    (plain, expected), (recomputed, grads) = after(False), after(True)
    assert all(map(torch.equal, grads, expected))
    for one, other in zip(plain.blocks, recomputed.blocks, strict=True):
        assert one.runs == other.runs == 3
        assert torch.equal(one.centre, other.centre)
        assert torch.equal(one.draws.get_state(), other.draws.get_state())


# -- bytes ---------------------------------------------------------------------------------------------------------


class ByHand(Language):
    """The same model with checkpoints written into it."""

    def __init__(self, run: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(layers=4)
        self.run = run

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.run(self.layers, self.embed(tokens))))


def each(layers: nn.ModuleList, x: torch.Tensor, **options: Any) -> torch.Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, **options)
    return x


def every_second(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for index, layer in enumerate(layers):
        x = layer(x) if index % 2 else checkpoint(layer, x, use_reentrant=False)
    return x


def in_pairs(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for start in (0, 2):
        x = checkpoint(nn.Sequential(*layers[start : start + 2]), x, use_reentrant=False)
    return x


def pairs_of_each(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for start in (0, 2):
        x = checkpoint(lambda x, pair=layers[start : start + 2]: each(pair, x), x, use_reentrant=False)
    return x


def keeping_products(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_efficient_attention.default]
    return each(layers, x, context_fn=functools.partial(create_selective_checkpoint_contexts, kept))


def language(make: Callable[[], nn.Module]) -> Workload:
    return Workload(
        model=make,
        batch=lambda batch_size: torch.zeros(batch_size, 128, dtype=torch.int64),
        sizes={"batch_size": 8},
        loss=language_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )


PLAIN = language(lambda: Language(layers=4))


def held_bytes(workload: Workload) -> tuple[int, int]:
    """Between the forward and the backward pass of a second step, and at its peak."""
    assert workload.loss is not None
    state = workload.start("cuda")
    workload.run_step(state, workload.sizes)
    gc.collect()
    batch = to_device(workload.batch(**workload.sizes), state.device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = workload.loss(state.model, batch)
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    del state, batch, loss
    gc.collect()
    return kept, peak


@functools.cache
def plain_bytes() -> tuple[int, int]:
    return held_bytes(PLAIN)


@pytest.mark.parametrize(
    ("setting", "run"),
    [
        (WHOLE, each),
        (Checkpointing(mode=Mode.EVERY), every_second),
        (Checkpointing(mode=Mode.SEGMENTS), in_pairs),
        (Checkpointing(mode=Mode.SEGMENTS, nested=True), pairs_of_each),
        (Checkpointing(mode=Mode.SELECTIVE, save={"*": ("matmuls", "attention")}), keeping_products),
    ],
    ids=["whole", "every", "segments", "nested", "selective"],
)
def test_bytes_are_those_of_checkpoints_written_by_hand(
    gpu: VirtualGPU, setting: Checkpointing, run: Callable[..., torch.Tensor]
) -> None:
    mine = held_bytes(TECHNIQUE.apply(PLAIN, setting))
    assert mine == held_bytes(language(lambda: ByHand(run)))
    plain = plain_bytes()
    assert mine[0] < plain[0]
    assert mine[1] < plain[1]


@pytest.mark.parametrize(
    "setting",
    [WHOLE, NESTED, KEPT_IN_A_SEGMENT, LAZY, LAZY_MODEL],
    ids=["whole", "nested", "kept", "lazy", "lazy-model"],
)
@pytest.mark.parametrize("goes_backward", [True, False])
def test_all_goes_with_the_graph(gpu: VirtualGPU, setting: Checkpointing, goes_backward: bool) -> None:
    model = all_toys()["language-tied"].model().cuda()
    attached(model, setting)
    tokens = torch.zeros(2, 12, dtype=torch.int64, device="cuda")
    language_loss(model, tokens).backward()
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        loss = language_loss(model, tokens)
        if goes_backward:
            loss.backward()
        del loss
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_running_statistics_cost_their_copies_alone(gpu: VirtualGPU) -> None:
    def make() -> nn.Module:
        return ResNet((2, 2), width=16, classes=10)

    plain = Workload(
        model=make,
        batch=lambda batch_size: (numbers(batch_size, 3, 64, 64), torch.zeros(batch_size, dtype=torch.int64)),
        sizes={"batch_size": 8},
        loss=class_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )

    class ByHandNet(ResNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.max_pool2d(self.stem(x), 3, 2, 1)
            for stage in self.stages:
                x = each(stage, x)
            return self.head(x.mean((2, 3)))

    hand = dataclasses.replace(plain, model=lambda: ByHandNet((2, 2), width=16, classes=10))
    mine_kept, mine_peak = held_bytes(TECHNIQUE.apply(plain, WHOLE))
    hand_kept, hand_peak = held_bytes(hand)
    assert mine_kept == hand_kept
    # At most 4 norms of a bottleneck, each with two vectors and a counter, in blocks of 512 B and more.
    wide = 2 * (16 << 1) * 4 * 4
    assert 0 <= mine_peak - hand_peak <= 4 * 3 * max(512, wide)


# -- copies, files and the way back --------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [WHOLE, NESTED, EXPENSIVE, LAZY_EXPENSIVE, LAZY_MODEL])
def test_copies_and_files_hold_the_treated_model(setting: Checkpointing) -> None:
    model = all_toys()["language-tied"].model()
    tokens = torch.arange(12).view(1, 12)
    expected, keys = backward(model, tokens), list(model.state_dict())
    live = attached(model, setting)
    assert list(model.state_dict()) == keys
    assert_equal(backward(model, tokens), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), average.module):
        assert_equal(backward(other, tokens), expected)
    live.undo()
    assert [type(module) for module in model.modules()] == [
        type(module) for module in all_toys()["language-tied"].model().modules()
    ]
    assert_equal(backward(model, tokens), expected)


def test_outputs_of_a_segment_can_be_saved() -> None:
    model = Blocks(mlp(), mlp())
    attached(model, ONE_SEGMENT)
    out = model.blocks[0](numbers(2, 8))
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False), out)


# -- what is refused -----------------------------------------------------------------------------------------------


class Overwrites(nn.Module):
    """Changes its input in place, which cannot be seen from its structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mul_(2))


class Counts(nn.Module):
    """Changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x) * self.seen


class Reads(nn.Module):
    """Reads a product before it changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        z = y + 1
        return y.mul_(2) + z


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Overwrites, r"blocks\.0 cannot be recomputed: its forward pass changes its input in place"),
        (Counts, r"blocks\.0 cannot be recomputed: its forward pass changes its buffer seen"),
        (Reads, r"blocks\.0 keeps the result of addmm, but mul_ changes it in place after it was read"),
    ],
)
def test_blocks_that_cannot_run_twice_are_noticed_in_their_first_run(
    block: Callable[[], nn.Module], message: str
) -> None:
    model = Blocks(block())
    attached(model, Checkpointing(mode=Mode.SELECTIVE, modules=("blocks.0",), save={"blocks.0": ("addmm",)}))
    with pytest.raises(UsageError, match=message):
        model(numbers(4, 8))


def test_a_kept_result_that_the_parent_changes_is_noticed() -> None:
    model = Blocks(nn.Sequential(nn.Linear(8, 8)), between=lambda x: x.mul_(2))
    attached(model, Checkpointing(mode=Mode.SELECTIVE, modules=("blocks.0",)))
    loss = model(numbers(4, 8)).sum()
    with pytest.raises(
        RuntimeError, match=r"the result of addmm, kept .* of blocks\.0, was changed in place"
    ):
        loss.backward()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            Checkpointing(modules=("layer.0",)),
            r"the model has no module 'layer\.0'\. Did you mean layers\.0\?",
        ),
        (Checkpointing(mode=Mode.EVERY, every=0), "every of activation-checkpointing is 0"),
        (Checkpointing(mode=Mode.SEGMENTS, segments=-1), "segments of activation-checkpointing is -1"),
        (Checkpointing(nested=True), "nested of activation-checkpointing belongs to segments"),
        (Checkpointing(save={"*": ("addmm#one",)}), "'addmm#one' names no op to keep"),
        (Checkpointing(save={"*": ("matmuls#0",)}), "'matmuls#0' names no op to keep"),
        (Checkpointing(save={"*": ("adddmm",)}), r"torch has no op 'adddmm' to keep\. Did you mean addmm\?"),
        (
            Checkpointing(modules=("layers.0",), save={"layers.1": ("addmm",)}),
            r"layers\.1 is to keep results but is not recomputed",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_before_any_change(setting: Checkpointing, message: str) -> None:
    model = all_toys()["language-tied"].model()
    with pytest.raises(UsageError, match=message):
        attached(model, setting)
    assert {type(module).__module__ for module in model.layers} == {"tests.techniques.toys"}
    assert not any(hasattr(type(module), "_vramfit_plain") for module in model.modules())


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no blocks were found in TwoHeads\. Name some in modules"):
        attached(all_toys()["two-losses"].model())


# -- settings ------------------------------------------------------------------------------------------------------


def profiled(model: nn.Module) -> Profile:
    ops = tuple(
        BlockOp(name=name, bytes=1, seconds=seconds, flops=0, kept=True)
        for name, seconds in (
            ("addmm", 3.0),
            ("gelu", 1.0),
            ("_scaled_dot_product_flash_attention", 2.0),
            ("addmm", 3.0),
        )
    )
    blocks = tuple(
        ModelBlock(
            path=f"layers.{index}",
            kind="ModelBlock",
            index=index,
            like=0,
            ops=ops,
            input_bytes=1,
            kept_bytes=4,
            forward_seconds=9.0,
            backward_seconds=18.0,
        )
        for index in range(4)
    )
    return Profile(model=model, optimizer=None, sizes={}, trains=True, blocks=blocks)


def test_options_begin_with_what_recomputes_least() -> None:
    profile = profiled(Language(layers=4))
    found = list(TECHNIQUE.options(profile))
    told = [TECHNIQUE.describe(setting) for setting in found]
    assert told == [
        "selective, 1 results kept",
        "selective, 1 results kept",
        "every, every 3",
        "every, every 2",
        "selective, 1 results kept",
        "whole",
        "segments",
        "segments, nested",
    ]
    assert [setting.save.get("*") for setting in found[:2]] == [("expensive",), ("matmuls",)]
    assert all(TECHNIQUE.promise(setting).numerics is Numerics.BITWISE for setting in found)
    assert not list(TECHNIQUE.options(dataclasses.replace(profile, trains=False)))
    assert not list(TECHNIQUE.options(Profile(model=nn.Linear(2, 2), optimizer=None, sizes={}, trains=True)))


def test_every_block_can_have_a_decision_of_its_own() -> None:
    profile = profiled(Language(layers=4))
    setting = setting_for(
        {"layers.0": None, "layers.1": (), "layers.2": frozenset({3, 2})}, blocks=profile.blocks
    )
    assert setting == Checkpointing(
        mode=Mode.LAZY,
        modules=("layers.1", "layers.2"),
        save={"layers.2": ("_scaled_dot_product_flash_attention#0", "addmm#1")},
    )
    assert setting_for({"layers.0": None}) == Checkpointing(mode=Mode.NONE)
    assert setting_for({"layers.0": ()}) == Checkpointing(mode=Mode.LAZY, modules=("layers.0",))
    assert setting_from_plain(TECHNIQUE, setting_to_plain(setting)) == setting
    assert_same(
        all_toys()["language-tied"],
        Checkpointing(mode=Mode.SELECTIVE, modules=("layers.1", "layers.2"), save={"layers.2": ("addmm#1",)}),
    )


def test_specs_mean_the_calls_that_they_name() -> None:
    names = ("addmm", "gelu", "addmm", "bmm", "addmm")
    assert op_specs(names) == ("addmm#0", "gelu#0", "addmm#1", "bmm#0", "addmm#2")
    assert keeps(("addmm#1", "gelu"), names) == [False, True, True, False, False]
    assert keeps(("*mm#1",), names) == [False, False, True, False, False]
    assert keeps(("matmuls",), names) == [True, False, True, True, True]


def test_it_is_among_the_techniques() -> None:
    assert type(find_technique("activation-checkpointing")) is ActivationCheckpointing
    assert Recomputed("h").path == "h"
