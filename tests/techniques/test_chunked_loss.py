"""Chunked losses of deferred logits: equal to the plain ones, and the logits themselves for whoever asks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.toys import Language, all_toys, gradients, language_loss, losses, tokens
from torch import nn

from vramfit.errors import UsageError, VramfitError
from vramfit.techniques import AttachedProgram, Choice, Numerics, Profile
from vramfit.techniques.chunked_loss import ChunkedLoss, ChunkedLossSetting, DeferHead, find_head
from vramfit.techniques.chunked_loss.deferred import Chunking, DeferredLogits
from vramfit.techniques.chunked_loss.operations import defer
from vramfit.techniques.core.surround import release, surround
from vramfit.virtual.gpu import VirtualGPU

pytestmark = [pytest.mark.torch_versions, pytest.mark.usefixtures("kept_workspaces")]

ROWS, LENGTH, WIDTH, WORDS = 4, 5, 8, 33

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Case:
    """Hidden states, a head and targets, some of which are ignored."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.hidden = torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(WORDS, WIDTH, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(WORDS, dtype=dtype, requires_grad=True)
        self.target = torch.randint(WORDS, (ROWS, LENGTH))
        self.target[0, 1] = -100
        self.target[2] = -100

    def plain(self) -> torch.Tensor:
        return F.linear(self.hidden, self.weight, self.bias)

    def deferred(self, *, rows: int = 3, recompute: bool = False) -> DeferredLogits:
        return defer(self.hidden, self.weight, self.bias, Chunking(rows=rows, recompute=recompute))

    def gradients(self) -> list[torch.Tensor]:
        found = [tensor.grad for tensor in (self.hidden, self.weight, self.bias)]
        return [gradient for gradient in found if gradient is not None]


def compare(
    loss: Loss,
    *,
    recompute: bool = False,
    real: bool = False,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    tolerance: float = 1e-5,
) -> None:
    """A loss of plain and of deferred logits: value and gradients, relative to the largest."""
    context: Callable[[], Any] = contextlib.nullcontext
    if autocast is not None:
        context = lambda: torch.autocast("cpu", dtype=autocast)  # noqa: E731
    first, second = Case(dtype), Case(dtype)
    with context():
        expected = loss(first.plain(), first.target)
        logits = second.deferred(recompute=recompute)
        found = loss(logits, second.target)
    assert logits.family.real is real
    assert type(found) is torch.Tensor
    for value in (expected, found):
        (value.float().sum() * 3).backward()
    pairs = zip((expected, *first.gradients()), (found, *second.gradients()), strict=True)
    for ours, theirs in ((b, a) for a, b in pairs):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.detach().abs().max()))


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, WORDS)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_shifted_rows(
    recompute: bool, reduction: str, smoothing: float, weighted: bool
) -> None:
    weight = torch.rand(WORDS, generator=torch.Generator().manual_seed(4)) if weighted else None

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows, wanted = x[:, :-1].contiguous(), target[:, 1:]
        return F.cross_entropy(
            rows.view(-1, WORDS),
            wanted.reshape(-1),
            weight=weight,
            reduction=reduction,
            label_smoothing=smoothing,
        )

    compare(loss, recompute=recompute)


def log_probabilities(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(x, -1).gather(-1, target.clamp(0)[..., None])


WAYS: dict[str, Loss] = {
    "classes second": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "permuted and cast": lambda x, t: F.cross_entropy(x.permute(0, 2, 1).float(), t, reduction="none"),
    "turned": lambda x, t: F.cross_entropy(x.mT, t),
    "module": lambda x, t: nn.CrossEntropyLoss(ignore_index=7)(flat(x), t.clamp(0).view(-1)),
    "nll": lambda x, t: F.nll_loss(F.log_softmax(flat(x), -1), t.view(-1)),
    "nll in float64": lambda x, t: F.nll_loss(
        x.flatten(0, 1).log_softmax(1, dtype=torch.float64), t.view(-1)
    ),
    "gathered": log_probabilities,
    "chosen by a mask": lambda x, t: F.cross_entropy(x[t >= 0], t[t >= 0]),
    "chosen by an index": lambda x, t: F.cross_entropy(x[:, -1, :], t[:, -1]),
    "last of all": lambda x, t: F.cross_entropy(x[:, 2:3].squeeze(1).unsqueeze(0)[0], t[:, 2]),
    "capped": lambda x, t: F.cross_entropy(flat(torch.tanh(x / 3) * 3), t.view(-1)),
    "scaled": lambda x, t: F.cross_entropy(flat(0.5 * x), t.view(-1)),
    "while accuracy is logged": lambda x, t: (
        F.cross_entropy(flat(x), t.view(-1)) + 0.0 * (x.argmax(-1) == t).float().mean()
    ),
    "twice": lambda x, t: (
        F.cross_entropy(flat(x), t.view(-1)) + 2 * F.cross_entropy(flat(x[:2]), t[:2].view(-1))
    ),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_the_same_loss(way: str, recompute: bool) -> None:
    compare(WAYS[way], recompute=recompute, tolerance=2e-5)


def written_in_place(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    view, copy = x.view(-1, WORDS), x.clone()
    x[0, 0] = 1.0
    view.mul_(2)
    return sum(F.cross_entropy(flat(some), target.view(-1)) for some in (view, copy, x))  # type: ignore[return-value]


PLAIN: dict[str, Loss] = {
    "probabilities as targets": lambda x, t: F.cross_entropy(flat(x), flat(x).detach().softmax(-1)),
    "a penalty": lambda x, t: F.cross_entropy(flat(x), t.view(-1)) + x.logsumexp(-1).pow(2).mean(),
    "some classes": lambda x, t: F.cross_entropy(x[..., :20].reshape(-1, 20), t.clamp(-100, 19).view(-1)),
    "written in place": written_in_place,
    "a new dimension behind": lambda x, t: F.cross_entropy(flat(x[..., None].squeeze(-1)), t.view(-1)),
    "all classes and rows": lambda x, t: x.reshape(-1).pow(2).mean(),
    "joined": lambda x, t: F.cross_entropy(torch.cat([flat(x), flat(x)]), torch.cat([t, t]).view(-1)),
}


@pytest.mark.parametrize("way", PLAIN)
def test_anything_else_takes_the_logits_themselves(way: str) -> None:
    compare(PLAIN[way], real=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("upcast", [False, True])
def test_under_autocast_types_are_those_of_the_plain_program(
    autocast: torch.dtype, recompute: bool, upcast: bool
) -> None:
    # bfloat16 has 8 bits; what is compared was rounded twice on the way.
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert x.dtype == autocast
        return F.cross_entropy(flat(x.float() if upcast else x), target.view(-1))

    compare(loss, recompute=recompute, autocast=autocast, tolerance=2**-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 2**-6)])
def test_in_other_types(dtype: torch.dtype, tolerance: float) -> None:
    compare(lambda x, t: F.cross_entropy(flat(x), t.view(-1)), dtype=dtype, tolerance=tolerance)


def test_a_small_gradient_in_float16_waits_for_the_scale() -> None:
    """One in 2^14 rows has a gradient below what float16 can hold, unless the scale comes first."""
    found = []
    for mode in (False, True):
        case = Case()
        target = torch.zeros(2**14, dtype=torch.int64)
        hidden = case.hidden[0, :1].detach().expand(2**14, WIDTH)
        with torch.autocast("cpu", dtype=torch.float16):
            weight = case.weight
            head = defer(hidden, weight, None, Chunking(rows=2**12)) if mode else F.linear(hidden, weight)
            (F.cross_entropy(head, target) * 2**10).backward()
        assert weight.grad is not None
        found.append(weight.grad / 2**10)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2**-7 * float(found[0].abs().max()))


def test_no_row_that_counts() -> None:
    for recompute in (False, True):
        case = Case()
        nothing = torch.full((ROWS * LENGTH,), -100)
        loss = F.cross_entropy(flat(case.deferred(recompute=recompute)), nothing)
        assert loss.isnan()
        loss.backward()
        assert all(not gradient.any() for gradient in case.gradients())


def test_a_target_that_does_not_exist_is_refused() -> None:
    case = Case()
    with pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy(flat(case.deferred()), torch.full((ROWS * LENGTH,), WORDS))


class Squares(torch.autograd.Function):
    """A library's own function, which torch calls without asking the tensor's class."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


def test_a_custom_function_gets_values_and_gives_gradients() -> None:
    first, second = Case(), Case()
    Squares.apply(first.plain()[:, 1:].log_softmax(-1)).backward()  # type: ignore[no-untyped-call]
    Squares.apply(second.deferred()[:, 1:].log_softmax(-1)).backward()  # type: ignore[no-untyped-call]
    for ours, theirs in zip(second.gradients(), first.gradients(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_second_backward_pass_gives_the_gradients_again() -> None:
    case = Case()
    loss = F.cross_entropy(flat(case.deferred()), case.target.view(-1))
    loss.backward(retain_graph=True)
    once = [gradient.clone() for gradient in case.gradients()]
    loss.backward()
    for twice, first in zip(case.gradients(), once, strict=True):
        torch.testing.assert_close(twice, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_the_logits_can_be_asked_for() -> None:
    case = Case()
    logits = case.deferred()
    logits.retain_grad()
    F.cross_entropy(flat(logits), case.target.view(-1)).backward()
    plain = case.plain().detach().requires_grad_()
    F.cross_entropy(flat(plain), case.target.view(-1)).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, plain.grad)


def test_what_is_known_of_logits_needs_no_logits() -> None:
    case = Case()
    logits, plain = case.deferred(), case.plain()
    assert isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.dtype, logits.device) == (plain.shape, plain.dtype, plain.device)
    assert logits.size(-1) == WORDS and len(logits) == ROWS and logits.dim() == 3
    assert logits.requires_grad and not logits.is_leaf and logits.grad_fn is not None
    assert hash(logits) == id(logits)
    assert not logits.family.real
    assert repr(logits).startswith("tensor(")
    assert torch.equal(logits.detach().cpu(), plain)
    with torch.no_grad():
        assert torch.equal(logits * 2, plain * 2)
    assert not logits.family.real, "values were only looked at"


def test_logits_after_the_step_are_refused_rather_than_wrong() -> None:
    case = Case()
    logits = case.deferred()
    F.cross_entropy(flat(logits), case.target.view(-1)).backward()
    with torch.no_grad():
        case.weight.add_(1.0)
    with pytest.raises(VramfitError, match="the weights have changed since"):
        logits.softmax(-1)


def test_nothing_of_it_stays_alive() -> None:
    gc.collect()
    before = sum(type(thing) is DeferredLogits for thing in gc.get_objects())
    gc.disable()
    try:
        case = Case()
        logits = case.deferred()
        loss = F.cross_entropy(flat(logits[:, :-1]), case.target[:, 1:].reshape(-1))
        del logits
        loss.backward()
        assert sum(type(thing) is DeferredLogits for thing in gc.get_objects()) == before
    finally:
        gc.enable()


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", ["language-tied", "language-untied"])
@pytest.mark.parametrize("setting", [ChunkedLossSetting(chunk_rows=7), ChunkedLossSetting(recompute=True)])
def test_gradients_of_a_language_model(toy: str, setting: ChunkedLossSetting) -> None:
    plain = all_toys()[toy]
    chunked = ChunkedLoss().apply(plain, setting)
    expected, found = gradients(plain), gradients(chunked)
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * largest)
    assert losses(chunked, steps=4) == pytest.approx(losses(plain, steps=4), rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "bert", "t5"])
def test_models_of_transformers_with_labels(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    words = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    torch.manual_seed(0)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, **words))
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **words))
    elif kind == "gemma2":
        extra = {"num_key_value_heads": 1, "head_dim": 8}
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **extra, **words))
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **words))
    else:
        config = transformers.T5Config(
            d_model=16, d_kv=8, num_heads=2, num_layers=1, d_ff=32, decoder_start_token_id=0, **words
        )
        model = transformers.T5ForConditionalGeneration(config)
    model.eval()
    ids = tokens(3)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1] = -100
    arguments: list[dict[str, Any]] = [{}]
    if kind in ("gpt2", "llama", "gemma2"):
        arguments.append({"num_items_in_batch": torch.tensor(7)})
    for extra_arguments in arguments:
        expected, wanted = _run(model, ids, labels, extra_arguments)
        around = DeferHead(Chunking(rows=5))
        head = model.get_output_embeddings()
        surround(head, around)
        found, outcome = _run(model, ids, labels, extra_arguments)
        assert isinstance(outcome.logits, DeferredLogits) and not outcome.logits.family.real
        torch.testing.assert_close(outcome.loss, wanted.loss)
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * largest)
        assert torch.equal(outcome.logits.detach().clone(), wanted.logits)
        with torch.no_grad():
            plain = model(input_ids=ids, labels=labels).logits
        assert type(plain) is torch.Tensor
        release(head, around)


def _run(
    model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, arguments: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], Any]:
    model.zero_grad()
    outcome = model(input_ids=ids, labels=labels, **arguments)
    outcome.loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, outcome


class Head(nn.Module):
    """Only the head and the loss of a language model."""

    def __init__(self, width: int, words: int, *, bias: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(width, words, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def attached(model: nn.Module, setting: ChunkedLossSetting | None = None) -> AttachedProgram:
    live = AttachedProgram(model, None)
    live.attach((Choice(technique=ChunkedLoss(), setting=setting or ChunkedLossSetting()),))
    return live


def test_copies_and_files_of_a_model_are_chunked_too_and_undo_ends_it() -> None:
    model = Language(dropout=0.0)
    keys = list(model.state_dict())
    live = attached(model)
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    batch = tokens(2)
    for same in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(same(batch)) is DeferredLogits
        assert torch.equal(same(batch).detach().clone(), model.eval()(batch).detach().clone())
    assert next(copy.deepcopy(model).parameters()).data_ptr() != next(model.parameters()).data_ptr()
    live.undo()
    assert type(model(batch)) is torch.Tensor and type(model.head) is nn.Linear


def test_what_is_not_differentiated_is_left_alone() -> None:
    model = Language(dropout=0.0)
    attached(model)
    batch = tokens(2)
    with torch.no_grad():
        assert type(model(batch)) is torch.Tensor
    with torch.inference_mode():
        assert type(model(batch)) is torch.Tensor
    values = torch.func.functional_call(model, dict(model.named_parameters()), batch)
    assert type(values) is DeferredLogits
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return language_loss(lambda x: torch.func.functional_call(model, parameters, x), batch)  # type: ignore[arg-type]

    found = torch.func.grad(loss)(parameters)
    (expected,) = torch.autograd.grad(language_loss(model, batch), [model.embed.weight])
    torch.testing.assert_close(found["embed.weight"], expected)
    model.requires_grad_(False)
    assert type(model(batch)) is torch.Tensor


def test_the_wrong_type_fails_as_ever() -> None:
    model = Head(8, 64)
    attached(model)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(2, 8, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 9))


def test_another_surrounding_inside_is_run() -> None:
    class Doubled:
        def __call__(self, _module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            return 2 * forward(*args, **kwargs)

    model = Head(8, 64)
    x = torch.randn(2, 8)
    plain = model(x)
    surround(model.head, Doubled())
    attached(model)
    assert torch.equal(model(x), 2 * plain)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (ChunkedLossSetting(heads=("nothing",)), "the model has no module 'nothing'"),
        (ChunkedLossSetting(heads=("embed",)), "embed is of type Embedding, not an nn.Linear"),
        (ChunkedLossSetting(chunk_rows=-1), "chunk_rows of chunked-loss is -1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(setting: ChunkedLossSetting, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attached(Language(), setting)


def test_a_model_without_logits_is_refused() -> None:
    with pytest.raises(UsageError, match="finds no linear layer that gives the logits"):
        attached(all_toys()["unet-3d"].model())


def test_the_head_is_found() -> None:
    assert find_head(Language()) == "head"
    assert find_head(Head(8, 64)) == "head"
    assert find_head(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))) is None
    assert find_head(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(8, 16))) == "1"
    assert find_head(all_toys()["unet-3d"].model()) is None


def profile(model: nn.Module, *, logits: int, peak: int = 1000, trains: bool = True) -> Profile:
    return Profile(
        model=model,
        optimizer=None,
        sizes={"batch_size": 4},
        trains=trains,
        peak_allocated_bytes=peak,
        logits_bytes=logits,
    )


def test_it_is_an_option_where_logits_are_a_notable_share() -> None:
    model = Language(words=4096, width=512, layers=0)
    rows = 2048
    logits = rows * 4096 * 4
    options = list(ChunkedLoss().options(profile(model, logits=logits, peak=4 * logits)))
    few = rows * 512 // 4096 // 4
    assert options == [
        ChunkedLossSetting(),
        ChunkedLossSetting(chunk_rows=few),
        ChunkedLossSetting(chunk_rows=few, into_grad=True),
        ChunkedLossSetting(chunk_rows=few, recompute=True, into_grad=True),
    ]
    assert not list(ChunkedLoss().options(profile(model, logits=logits, peak=100 * logits)))
    assert not list(ChunkedLoss().options(profile(model, logits=0)))
    assert not list(ChunkedLoss().options(profile(model, logits=logits, trains=False)))
    assert not list(ChunkedLoss().options(profile(all_toys()["unet-3d"].model(), logits=500)))


def test_it_promises_rounding() -> None:
    assert ChunkedLoss().promise(ChunkedLossSetting()).numerics is Numerics.ROUNDING


# -- into an existing gradient -------------------------------------------------------------------------------------


INTO = [ChunkedLossSetting(chunk_rows=7, recompute=recompute, into_grad=True) for recompute in (False, True)]


def accumulated(model: Language, steps: int = 2) -> dict[str, torch.Tensor]:
    """Gradients of some batches together."""
    for step in range(steps):
        language_loss(model, tokens(2 + step)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def language(setting: ChunkedLossSetting | None = None, *, tied: bool = True) -> Language:
    torch.manual_seed(0)
    model = Language(dropout=0.0, tied=tied)
    if setting is not None:
        attached(model, setting)
    return model


@pytest.mark.parametrize("setting", INTO)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_add_up_in_place(setting: ChunkedLossSetting, tied: bool) -> None:
    expected, found = accumulated(language(tied=tied)), accumulated(language(setting, tied=tied))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setting", INTO)
def test_whoever_listens_to_gradients_hears_them(setting: ChunkedLossSetting) -> None:
    model = language(setting)
    heard: list[torch.Tensor] = []
    accumulated(model, 1)
    model.head.weight.register_hook(heard.append)  # type: ignore[arg-type]
    accumulated(model, 1)
    expected = accumulated(language(), 1)["embed.weight"]
    assert len(heard) == 1
    torch.testing.assert_close(heard[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setting", INTO)
def test_gradients_that_are_asked_for_go_to_whoever_asks(setting: ChunkedLossSetting) -> None:
    model = language(setting, tied=False)
    before = accumulated(model, 1)
    asked = torch.autograd.grad(language_loss(model, tokens(2)), [model.head.weight, model.embed.weight])
    for name, gradient in zip(("head.weight", "embed.weight"), asked, strict=True):
        torch.testing.assert_close(gradient, before[name], rtol=1e-5, atol=1e-6)
    (other,) = torch.autograd.grad(language_loss(model, tokens(2)), [model.embed.weight])
    torch.testing.assert_close(other, before["embed.weight"], rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name]), "left as it was"  # type: ignore[arg-type]


# Five sums in 32 bits, and whether it counts, while its logits are there.
NUMBERS_OF_A_ROW = 5 * 4 + 1


# -- memory --------------------------------------------------------------------------------------------------------


def cpu_peak(step: Callable[[], None]) -> int:
    """Most bytes above those at the start, by torch's own profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as record:
        step()
    held = most = 0
    events = (e for e in record.profiler.kineto_results.events() if e.name() == "[memory]")  # type: ignore[union-attr]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_the_peak_on_the_cpu_is_the_gradients_and_a_chunk() -> None:
    """Eight thousand words at a width of 64: logits are most of what plain training needs."""
    rows, width, words = 256, 64, 8192
    hidden = torch.randn(2, rows // 2, width, requires_grad=True)
    target = torch.randint(words, (2, rows // 2))
    peaks = {}
    for chunk in (0, 32, 16):
        model = Head(width, words)
        if chunk:
            attached(model, ChunkedLossSetting(chunk_rows=chunk))

        def step(model: Head = model) -> None:
            logits = model(hidden)
            F.cross_entropy(logits.view(-1, words), target.view(-1)).backward()

        step()
        model.head.weight.grad = hidden.grad = None
        peaks[chunk] = cpu_peak(step)
        hidden.grad = None
    weight, logits = 4 * width * words, 4 * rows * words
    assert peaks[0] >= 3 * logits, "logits, their log-softmax, and its gradient"
    assert peaks[32] - peaks[16] == 16 * (4 * words + NUMBERS_OF_A_ROW)
    # Beyond the chunk: the gradients of the weight and of hidden states, and some numbers of each row.
    assert weight + 4 * rows * width < peaks[16] - 4 * 16 * words < weight + 2 * 4 * rows * width


@pytest.mark.parametrize(
    ("recompute", "of_each_row", "scalars"),
    [
        (False, 8 + 4 + 4, 8),  # its class, whether it counts, its loss
        (True, 8 + 4, 16),
    ],
)
def test_bytes_of_a_head_of_32_000_words_on_the_virtual_gpu(
    gpu: VirtualGPU, recompute: bool, of_each_row: int, scalars: int
) -> None:
    rows, width, words, chunk = 1024, 1024, 32000, 128
    hidden = torch.randn(rows, width, device="cuda", requires_grad=True)
    target = torch.randint(words, (rows,), device="cuda")

    def peak(setting: ChunkedLossSetting | None) -> int:
        model = Head(width, words).cuda()
        if setting is not None:
            attached(model, setting)

        def step() -> None:
            F.cross_entropy(model(hidden), target).backward()

        step()  # workspaces
        model.head.weight.grad = hidden.grad = None
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        step()
        hidden.grad = None
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    logits, weight, of_hidden = 4 * rows * words, 4 * width * words, 4 * rows * width
    assert peak(None) == 3 * logits + 8, (
        "logits, their log-softmax and its gradient; the loss and what it counted"
    )
    found = peak(ChunkedLossSetting(chunk_rows=chunk, recompute=recompute))
    of_chunk = chunk * (4 * words + NUMBERS_OF_A_ROW)
    assert found == weight + of_hidden + of_chunk + rows * of_each_row + scalars


def test_bytes_on_the_virtual_gpu_without_a_second_gradient_of_a_tied_weight(gpu: VirtualGPU) -> None:
    """A tied weight of 4 MiB: autograd would hold the head's part to the end of the backward pass."""
    width, words, batch = 128, 8192, 32

    def peak(setting: ChunkedLossSetting) -> int:
        model = Language(words=words, width=width, layers=2, dropout=0.0).cuda()
        attached(model, setting)
        batch_of_words = torch.randint(words, (batch, 64), device="cuda")
        language_loss(model, batch_of_words).backward()  # the gradients that the next one adds to
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        language_loss(model, batch_of_words).backward()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    usual = peak(ChunkedLossSetting(chunk_rows=64))
    into = peak(ChunkedLossSetting(chunk_rows=64, recompute=True, into_grad=True))
    assert usual - into == 4 * width * words
