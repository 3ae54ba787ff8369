"""Parameters on the host: the same gradients, the same objects, and models larger than the card."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.techniques.tiny_gpt2 import tiny_gpt2
from tests.techniques.toys import Language, all_toys, gradients, language_loss, losses, tokens
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vramfit.errors import UsageError
from vramfit.inference.host_lane import CopyLane
from vramfit.techniques import AttachedProgram, Numerics, Profile, live_of
from vramfit.techniques.activation_checkpointing import ActivationCheckpointing, Checkpointing, Mode
from vramfit.techniques.activation_compression import (
    ActivationCompression,
    ActivationCompressionSetting,
    Method,
)
from vramfit.techniques.activation_offload import ActivationOffload, ActivationOffloadSetting
from vramfit.techniques.core.model_profile import ModelBlock
from vramfit.techniques.core.surround import surroundings_of
from vramfit.techniques.parameter_offload import GradientPlace, ParameterOffload, ParameterOffloadSetting
from vramfit.techniques.parameter_offload import depot as depots
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

pytestmark = [pytest.mark.torch_versions, pytest.mark.usefixtures("kept_workspaces")]

TOYS = all_toys()
# Blocks of each kind of model, by name where none repeat.
MODULES = {
    "language-tied": (),
    "language-untied": (),
    "frozen-trunk": ("trunk", "adapter"),
    "batch-norm": (),
    "two-losses": ("trunk", "kind", "amount"),
    "lstm": ("rnn", "head"),
    "unet-3d": ("down", "deep", "up", "head"),
    "mlp": ("0", "3", "5"),
}
PLACES = list(GradientPlace)


class LateLane(CopyLane):
    """Copies to the device are filled when they are waited for, and hold no numbers before."""

    def __init__(self) -> None:
        self.brought = 0

    def back(self, hosts: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        self.brought += 1
        made = [torch.full_like(host, float("nan")) for host in hosts]
        return made, (made, hosts)

    def wait(self, end: Any) -> None:
        if end is not None:
            for copy_, host in zip(*end, strict=True):
                copy_.copy_(host)


@pytest.fixture(autouse=True)
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    late = LateLane()
    monkeypatch.setattr(depots, "CopyLane", lambda: late)
    return late


def _language(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Language(**options)


def _live(model: nn.Module, optimizer: Any = None, **options: Any) -> AttachedProgram:
    live = AttachedProgram(model, optimizer)
    ParameterOffload().attach(live, ParameterOffloadSetting(**options))
    return live


def _backward(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    model.zero_grad()
    language_loss(model, tokens(2)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("toy", sorted(TOYS))
def test_gradients_are_the_same(toy: str, ahead: int, lane: LateLane) -> None:
    expected = gradients(TOYS[toy], steps=3)
    for place in PLACES:
        setting = ParameterOffloadSetting(modules=MODULES[toy], gradients=place, ahead=ahead)
        assert _same(gradients(ParameterOffload().apply(TOYS[toy], setting), steps=3), expected)
    assert lane.brought >= 6


def test_gradients_of_gpt2_are_the_same() -> None:
    plain = tiny_gpt2()
    found = gradients(ParameterOffload().apply(plain, ParameterOffloadSetting()), steps=2)
    assert _same(found, gradients(plain, steps=2))


def test_losses_are_the_same_on_the_cpu() -> None:
    plain = TOYS["language-tied"]
    assert losses(ParameterOffload().apply(plain, ParameterOffloadSetting()), steps=5) == losses(
        plain, steps=5
    )


def test_each_block_comes_once_for_each_pass_but_the_last(lane: LateLane) -> None:
    model = _language(layers=4)
    _live(model)
    _backward(model)
    assert lane.brought == 4 + 3
    with torch.no_grad():
        model(tokens(2))
    assert lane.brought == 7 + 4


def test_the_graph_holds_no_weights(lane: LateLane) -> None:
    model = _language(layers=4, dropout=0.0)
    _live(model, ahead=0)
    copies: list[Any] = []
    plain_back = lane.back

    def back(hosts: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        import weakref

        made, end = plain_back(hosts)
        copies.append(weakref.ref(made[0].untyped_storage()))
        return made, end

    lane.back = back  # type: ignore[method-assign]
    loss = language_loss(model, tokens(2))
    gc.collect()
    assert [ref() is not None for ref in copies] == [False, False, False, True]
    loss.backward()
    gc.collect()
    assert [ref() for ref in copies] == [None] * 7


def test_what_modules_share_and_what_lies_outside_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.blocks[2].weight = self.blocks[0].weight
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).tanh()
            return self.head(x)

    model = Tied()
    _live(model, modules=("blocks.0", "blocks.1", "blocks.2"))
    names = [surroundings_of(block)[0]._names for block in model.blocks]  # type: ignore[attr-defined]
    assert names == [("bias",), ("weight", "bias"), ("bias",)]
    assert not surroundings_of(model.head)


def test_parameters_are_the_objects_that_they_were() -> None:
    model = _language()
    before, keys = list(model.parameters()), list(model.state_dict())
    live = _live(model, torch.optim.AdamW(model.parameters()))
    seen: list[bool] = []
    model.layers[0].register_forward_hook(lambda block, *_: seen.append(block.up.weight is before[5]))
    _backward(model)
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), before, strict=True))
    assert list(model.state_dict()) == keys
    assert all(p.grad is not None and p.grad.device == p.device for p in model.parameters())
    live.undo()
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), before, strict=True))
    assert type(model.layers[0]).__name__ == "Block" and not surroundings_of(model.layers[0])


def test_a_parameter_that_changes_between_the_passes_is_told_as_torch_tells_it() -> None:
    model = _language(layers=2)
    _live(model)
    loss = language_loss(model, tokens(2))
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_was_brought_before_a_change_is_not_used_after_it() -> None:
    model, plain = _language(layers=2), _language(layers=2)
    _live(model)
    for one in (model, plain):
        one(tokens(2))  # a graph that nobody goes back through: the last block stays on the device
        for parameter in one.parameters():
            parameter.data.mul_(1.5)  # no version is counted
    assert _same(_backward(model), _backward(plain))


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_micro_batches_add_up(place: GradientPlace) -> None:
    found = []
    for treated in (False, True):
        model = _language(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = _live(model, optimizer, gradients=place) if treated else AttachedProgram(model, optimizer)
        for seed in range(3):
            live.backward(language_loss(model, (tokens(2) + seed) % 97))
        live.step(clip_norm=0.5)
        found.append(model.state_dict())
    assert _same(*found)


def test_gradients_on_the_card_have_to_be_gathered() -> None:
    model = _language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = _live(model, optimizer, gradients=GradientPlace.DEVICE)
    _backward(model)
    assert model.layers[0].up.weight.grad is None
    with pytest.raises(UsageError, match="gradients are still on the card"):
        optimizer.step()
    live.step()
    optimizer.step()
    live.undo()
    assert not live.gathering


def test_gradients_are_given_to_those_who_ask() -> None:
    plain, model = _language(dropout=0.0), _language(dropout=0.0)
    _live(model)
    given = [
        torch.autograd.grad(language_loss(one, tokens(2)), list(one.parameters())) for one in (plain, model)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*given, strict=True))
    seen: list[torch.Tensor] = []
    model.layers[0].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    _backward(model)
    assert seen[0] is model.layers[0].up.weight.grad


def test_gradients_of_gradients_are_the_same() -> None:
    found = []
    for treated in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        if treated:
            _live(model, modules=("0", "2"))
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        slopes = torch.autograd.grad(model(x).sum(), [x, model[2].weight], create_graph=True)
        sum(slope.pow(2).sum() for slope in slopes).backward()
        found.append([p.grad for p in model[:3].parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing_and_offloaded_activations(reentrant: bool) -> None:
    class Checkpointed(Language):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    plain = Checkpointed()
    model = copy.deepcopy(plain)
    live = _live(model)
    ActivationOffload().attach(live, ActivationOffloadSetting())
    for _ in range(2):
        assert _same(_backward(model), _backward(plain))


def test_with_selective_checkpointing_only_the_block_is_counted() -> None:
    def keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = op in (
            torch.ops.aten.addmm.default,
            torch.ops.aten.clone.default,
            torch.ops.aten.as_strided.default,
        )
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    class Checkpointed(Language):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            for layer in self.layers:
                contexts = partial(create_selective_checkpoint_contexts, keep_products)
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    plain = Checkpointed()
    model = copy.deepcopy(plain)
    live = _live(model)
    eight_bits = ActivationCompressionSetting(modules=("layers.1.up",), min_bytes=0, method=Method.QUANTIZED)
    for _ in range(2):
        assert _same(_backward(model), _backward(plain))
    ActivationCompression().attach(live, eight_bits)
    found, expected = _backward(model), _backward(plain)
    assert not _same(found, expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0.01 * float(gradient.abs().max()))


class _Borrowing(Language):
    """A model that asks a part of its first block for what all blocks get, as DiT asks for its conditioning."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        x = x + self.layers[0].ln_2(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + self.layers[1].proj(x)))


def test_a_part_of_a_block_may_run_outside_of_it() -> None:
    torch.manual_seed(0)
    plain = _Borrowing()
    model = copy.deepcopy(plain)
    live = _live(model)
    for _ in range(2):
        assert _same(_backward(model), _backward(plain))
    copied = copy.deepcopy(model)  # which has run no block of its own yet
    assert _same(_backward(copied), _backward(plain))
    live.undo()
    assert not any(map(surroundings_of, model.modules()))


def test_a_part_outside_of_its_block_sees_what_the_optimizer_did() -> None:
    torch.manual_seed(0)
    plain = _Borrowing()
    model = copy.deepcopy(plain)
    _live(model)
    for one in (plain, model):
        _backward(one)
        with torch.no_grad():
            one.layers[0].ln_2.weight.mul_(2.0)
            one.layers[1].proj.weight.mul_(3.0)
    assert _same(_backward(model), _backward(plain))


@pytest.mark.parametrize("kept", [False, True])
def test_parts_of_blocks_are_recomputed_apart(kept: bool) -> None:
    torch.manual_seed(0)
    plain = _language(dropout=0.1)
    model = copy.deepcopy(plain)
    _live(model)
    parts = tuple(f"layers.{block}.{part}" for block in range(3) for part in ("ln_1", "qkv", "up", "down"))
    save = {part: ("addmm",) for part in parts if "ln" not in part} if kept else {}
    setting = Checkpointing(mode=Mode.SELECTIVE if kept else Mode.WHOLE, modules=parts, save=save)
    ActivationCheckpointing().attach(AttachedProgram(model, None), setting)
    for _ in range(2):
        assert _same(_backward(model), _backward(plain))


def test_under_autocast() -> None:
    plain, model = _language(), _language()
    _live(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _same(_backward(model), _backward(plain))


def test_in_evaluation_it_computes_the_same() -> None:
    plain, model = _language().eval(), _language()
    live = _live(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens(2)), plain(tokens(2)))
    assert torch.equal(model(tokens(2)), plain(tokens(2)))
    live.undo()


def test_copies_and_saved_models_work_on_their_own() -> None:
    plain, model = _language(), _language()
    _live(model, gradients=GradientPlace.DEVICE)
    pending = language_loss(model, tokens(2))  # a step under way
    expected, file = _backward(plain), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert list(other.state_dict()) == list(plain.state_dict())
        for _ in range(2):
            assert _same(_backward(other), expected)
    pending.backward()


def test_the_state_of_an_optimizer_goes_along() -> None:
    found = []
    for treated in (False, True):
        model = _language(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters())
        live = AttachedProgram(model, optimizer)
        for step in range(4):
            if treated and step == 1:
                ParameterOffload().attach(live, ParameterOffloadSetting())
            if treated and step == 3:
                live.undo()
            live.backward(language_loss(model, tokens(2)))
            live.step()
        found.append(model.state_dict())
    assert _same(*found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ("layers.7",)}, "the model has no module 'layers.7'"),
        ({"modules": ("layers.0", "layers.0.up")}, "layers.0.up is a part of layers.0"),
        ({"modules": ("embed",)}, "the chosen blocks have no parameters of their own"),
        ({"ahead": -1}, "ahead of parameter-offload is -1"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(options: dict[str, Any], message: str) -> None:
    model = _language()
    with pytest.raises(UsageError) as raised:
        _live(model, **options)
    assert message in str(raised.value)
    assert type(model) is Language and not any(surroundings_of(module) for module in model.modules())


def test_a_capturable_optimizer_and_a_model_without_blocks_are_refused() -> None:
    model = _language()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(UsageError, match="a capturable optimizer needs its parameters on the card"):
        _live(model, optimizer)
    with pytest.raises(UsageError, match="finds no blocks in the model"):
        _live(nn.Linear(3, 3))


def test_options_want_room_on_the_host_and_promise_rounding() -> None:
    technique, model = ParameterOffload(), _language(layers=4)
    blocks = tuple(
        ModelBlock(
            path=f"layers.{index}",
            kind="Block",
            index=index,
            like=0,
            ops=(),
            input_bytes=0,
            kept_bytes=0,
            forward_seconds=1e-3,
            backward_seconds=2e-3,
        )
        for index in range(4)
    )
    size = sum(p.nbytes for p in model.layers[0].parameters())
    values: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "sizes": {},
        "trains": True,
        "blocks": blocks,
        "host_bytes": 1 << 40,
        "link_bytes_per_second": 20e9,
    }
    found = [setting.modules for setting in technique.options(Profile(**values))]
    assert found == [("layers.0", "layers.2"), tuple(f"layers.{index}" for index in range(4))]
    assert len(list(technique.options(Profile(**(values | {"host_bytes": 8 * size}))))) == 1
    for missing in ({"device_type": "cpu"}, {"host_bytes": 0}, {"optimizer": None}, {"trains": False}):
        assert not list(technique.options(Profile(**(values | missing))))
    assert technique.promise(ParameterOffloadSetting()).numerics is Numerics.ROUNDING


# -- bytes and seconds on the virtual GPU ------------------------------------------------------------------------------


def _wide(blocks: int, width: int = 4096, rows: int = 1024, dtype: torch.dtype = torch.float32) -> Workload:
    return Workload(
        model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(blocks))
        ).to(dtype),
        batch=lambda batch_size: torch.empty(batch_size, width, dtype=dtype),
        sizes={"batch_size": rows},
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )


def test_parameters_gradients_and_states_leave_the_card(gpu: VirtualGPU) -> None:
    plain, block = _wide(6), 4096 * 4096 * 4
    setting = ParameterOffloadSetting(modules=tuple(map(str, range(6))))
    state = ParameterOffload().apply(plain, setting).start("cuda")
    assert torch.cuda.memory_allocated() == 0
    assert gpu.run.host_pinned_peak_bytes == 6 * block
    workload = ParameterOffload().apply(plain, setting)
    for _ in range(2):
        workload.run_step(state, plain.sizes)
    gc.collect()
    workspace = torch.cuda.memory_allocated()
    assert workspace < block  # nothing of the model, only what cuBLAS keeps
    assert {p.device.type for p in state.model.parameters()} == {"cpu"}
    assert gpu.run.host_pinned_peak_bytes == 2 * 6 * block
    live = live_of(state)
    assert live is not None
    assert live.pageable_bytes == 6 * (2 * block + 4), "two averages and a counter for each parameter"
    torch.cuda.reset_peak_memory_stats()
    workload.run_step(state, plain.sizes)
    activation = 1024 * 4096 * 4
    # Two blocks' parameters, a gradient as it is made and one on its way; what is saved, and the gradient of one.
    assert torch.cuda.max_memory_allocated() - workspace - 4 * block - 13 * activation in (512, 1024)
    assert not [warned for warned in gpu.run.warnings if warned.code == "op-without-rule"]


def test_a_model_larger_than_the_card_trains_on_it() -> None:
    class Llama(nn.Module):
        def __init__(self, width: int = 4096, layers: int = 40) -> None:
            super().__init__()
            self.embed = nn.Embedding(32000, width)
            self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
            self.head = nn.Linear(width, 32000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.gate, self.up = (nn.Linear(width, 11008, bias=False) for _ in range(2))
            self.down = nn.Linear(11008, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = (
                self.qkv(self.norms[0](x)).view(batch, length, 3, 32, width // 32).permute(2, 0, 3, 1, 4)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            y = self.norms[1](x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    plain = Workload(
        model=lambda: Llama().to(torch.bfloat16),
        batch=lambda batch_size: torch.zeros(batch_size, 512, dtype=torch.long),
        sizes={"batch_size": 1},
        loss=language_loss,
        optimizer=torch.optim.AdamW,
    )
    offloaded = ParameterOffload().apply(plain, ParameterOffloadSetting())
    with VirtualGPU("12GiB", context_bytes=256 << 20) as gpu:
        state = offloaded.start("cuda")
        total = sum(p.nbytes for p in state.model.parameters())
        assert total > 15 << 30
        for _ in range(2):
            offloaded.run_step(state, offloaded.sizes)
        assert state.model.embed.weight.device.type == "cuda"
        assert state.model.layers[0].up.weight.device.type == "cpu"
    assert gpu.run.oom is None
    assert gpu.peak_reserved_bytes < 12 << 30
    gc.collect()


def test_copies_hide_behind_large_batches(gpu: VirtualGPU) -> None:
    setting = ParameterOffloadSetting(modules=tuple(map(str, range(6))))
    crossing = 4096 * 4096 * 2 / gpu.spec.host_link
    for rows in (256, 16384):
        plain = _wide(6, rows=rows, dtype=torch.bfloat16)
        plain, seconds = replace(plain, optimizer=None), []
        for workload in (plain, ParameterOffload().apply(plain, setting)):
            state = workload.start("cuda")
            workload.run_step(state, plain.sizes)
            torch.cuda.synchronize()
            before = gpu.run.seconds_simulated
            workload.run_step(state, plain.sizes)
            torch.cuda.synchronize()
            seconds.append(gpu.run.seconds_simulated - before)
        if rows == 16384:  # what the first block waits for, and the last gradient
            assert seconds[1] - seconds[0] == pytest.approx(2 * crossing, rel=0.25)
        else:
            assert seconds[1] - seconds[0] > 8 * crossing


@pytest.mark.parametrize("parts", [(), ("ln_1", "qkv", "proj", "ln_2", "up", "down")])
def test_parts_that_run_apart_find_their_parameters_on_the_card(
    parts: tuple[str, ...], gpu: VirtualGPU
) -> None:
    plain = replace(TOYS["language-tied"], model=_Borrowing)
    offloaded = ParameterOffload().apply(plain, ParameterOffloadSetting())
    if parts:
        modules = tuple(f"layers.{block}.{part}" for block in range(3) for part in parts)
        offloaded = ActivationCheckpointing().apply(offloaded, Checkpointing(modules=modules))
    state = offloaded.start("cuda")
    for _ in range(2):
        offloaded.run_step(state, plain.sizes)
    assert gpu.run.oom is None
    assert state.model.layers[0].ln_2.weight.device.type == "cpu"


def test_a_model_that_is_on_the_card_goes_and_comes_back(gpu: VirtualGPU) -> None:
    plain = _wide(4)
    state = plain.start("cuda")
    plain.run_step(state, plain.sizes)
    gc.collect()
    before = torch.cuda.memory_allocated()
    block = 4096 * 4096 * 4
    live = AttachedProgram(state.model, state.optimizer)
    ParameterOffload().attach(live, ParameterOffloadSetting(modules=tuple(map(str, range(4)))))
    gc.collect()
    assert before - torch.cuda.memory_allocated() == 3 * 4 * block  # parameters and both moments
    live.backward(plain.loss(state.model, plain.batch(**plain.sizes).cuda()))  # type: ignore[misc]
    live.step()
    live.undo()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert {p.device.type for p in state.model.parameters()} == {"cuda"}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_after_running_out_no_copy_waits_for_a_card_that_has_gone() -> None:
    plain = _wide(6)
    offloaded = ParameterOffload().apply(plain, ParameterOffloadSetting(modules=tuple(map(str, range(6)))))
    with VirtualGPU("512MiB", context_bytes=256 << 20) as gpu:
        state = offloaded.start("cuda")
        live = live_of(state)
        assert live is not None
        with pytest.raises(torch.OutOfMemoryError):
            offloaded.run_step(state, plain.sizes)
        with contextlib.suppress(torch.OutOfMemoryError):
            live.undo()
    assert gpu.run.oom is not None
    del state, live
    gc.collect()
