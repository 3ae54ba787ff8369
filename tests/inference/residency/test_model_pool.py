"""Real models that come and go: bit for bit, whatever they hold, from several threads, and undone when a move fails."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.inference.residency.eviction import LeastRecentlyUsed
from vramfit.inference.residency.hosted_model import HostedModel
from vramfit.inference.residency.model_pool import ModelPool
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.torch_versions


class Words(nn.Module):
    """A tied head, an LSTM with its flat weights, and buffers that training changes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 60, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head(self.lstm(self.embed(x))[0]).transpose(1, 2))


class Counting(nn.Module):
    """Writes to a buffer in place, and grows another by replacing it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = torch.cat([self.seen, x.sum().reshape(1)])
        return self.seen.sum() + self.calls


def words(*, trains: bool = False) -> Words:
    torch.manual_seed(1)
    return Words().train(trains)


def halves() -> nn.Module:
    return nn.Sequential(nn.Linear(33, 65), nn.Linear(65, 7)).half().eval()


WORKSPACE = 10 * MIB  # of cuBLAS, and until 2.11 one of cuBLASLt beside it
"""Of cuBLAS, which torch keeps: 8,519,680 bytes."""
X = torch.arange(28).reshape(4, 7)
CPU = torch.device("cpu")
INPUTS: dict[str, torch.Tensor] = {
    "words": X,
    "trained": X,
    "half": torch.ones(3, 33, dtype=torch.half),
    "count": torch.ones(5),
}


def mixed() -> dict[str, nn.Module]:
    return {"words": words(), "trained": words(trains=True), "half": halves(), "count": Counting()}


def hosted_model(name: str, model: nn.Module) -> HostedModel:
    found = HostedModel(name, model, CPU, pinned=False)
    found.take_over()
    return found


def same(one: nn.Module, two: nn.Module) -> bool:
    left, right = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (one, two))
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].device == right[name].device
        and left[name].stride() == right[name].stride()
        and torch.equal(left[name], right[name])
        for name in left
    )


def test_outputs_and_values_are_those_of_models_that_never_moved() -> None:
    models = mixed()
    plain = copy.deepcopy(models)
    chance = random.Random(0)
    with ModelPool(models, device="cpu", budget="4MiB") as pool:
        for _ in range(60):
            name = chance.choice(list(models))
            with pool.use(name) as model:
                out = model(INPUTS[name])
            assert torch.equal(out, plain[name](INPUTS[name]))
            assert len(pool.resident) <= 2
        assert pool.evictions > 10
    assert all(same(models[name], plain[name]) for name in models)
    assert {name: one.training for name, one in models.items()} == {
        name: one.training for name, one in plain.items()
    }


def test_parameters_stay_the_objects_that_they_are() -> None:
    model = words()
    before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    hosted = hosted_model("words", model)
    hosted.load()
    assert model.head.weight is model.embed.weight
    assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0
    hosted.unload()
    after = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert before == after


def test_views_of_one_memory_stay_views_of_it() -> None:
    memory = torch.arange(12.0)
    model = nn.Module()
    model.register_buffer("whole", memory)
    model.register_buffer("columns", memory.view(3, 4).t()[1:])
    hosted = hosted_model("views", model)
    for move in (hosted.load, hosted.unload, hosted.load):
        move()
        model.whole[5] += 100
        assert model.columns.shape == (3, 3)
        assert model.columns[0, 1] == model.whole[5]
    hosted.unload()
    assert model.whole[5] == 305
    assert hosted.nbytes == 512


def test_each_tensor_begins_at_a_multiple_of_512_bytes() -> None:
    hosted = hosted_model("words", model := words())
    start = hosted._host.data_ptr()
    places = {
        one.untyped_storage().data_ptr() + one.storage_offset() * one.itemsize for one in model.parameters()
    }
    assert all((place - start) % 512 == 0 for place in places)
    assert hosted.nbytes == sum(
        -(-one.nbytes // 512) * 512 for one in [*model.parameters(), *model.buffers()]
    )


def test_only_what_was_written_to_is_copied_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    hosted = hosted_model("norm", model)
    hosted.load()
    model(torch.ones(2, 8))
    assert hosted.unload() == 0
    hosted.load()
    model.train()(torch.arange(16.0).reshape(2, 8))  # past the version counter
    statistics = model[1].running_mean.clone()
    assert hosted.unload() == 8 * 4 * 2 + 8
    assert torch.equal(model[1].running_mean, statistics)
    model.eval()
    hosted.load()
    with torch.inference_mode():
        model[0].weight.zero_()
    assert hosted.unload() == 8 * 8 * 4
    assert not model[0].weight.any()
    hosted.load()
    model[0].weight.data = torch.ones(8, 8)  # other memory, past the version counter as well
    assert hosted.unload() == 8 * 8 * 4
    assert model[0].weight.all()


def test_gradients_and_random_state_are_left_alone() -> None:
    model = nn.Linear(4, 4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with ModelPool({"a": model}, device="cpu", budget="4MiB") as pool, pool.use("a") as used:
        assert torch.equal(torch.get_rng_state(), state)
        used(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.requires_grad


def test_nobody_leaves_while_all_fit() -> None:
    with ModelPool(mixed(), device="cpu", budget="8MiB") as pool:
        for name in [*INPUTS, *INPUTS]:
            with pool.use(name):
                pass
        assert pool.evictions == 0
        assert pool.loads == 4
        assert pool.resident == tuple(INPUTS)


def test_who_leaves_is_the_policys_choice() -> None:
    models = {name: nn.Linear(8, 8) for name in "abc"}
    with ModelPool(models, device="cpu", budget="4MiB", policy=LeastRecentlyUsed()) as pool:
        for name in "aab":
            with pool.use(name):
                pass
        with pool.use("c"):
            assert pool.resident == ("b", "c")
    with ModelPool(models, device="cpu", budget="4MiB") as pool:
        for name in "aab":
            with pool.use(name):
                pass
        with pool.use("c"):
            assert pool.resident == ("a", "c")


def test_a_failed_move_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    models = mixed()
    plain = copy.deepcopy(models)
    with ModelPool(models, device="cpu", budget="4MiB", policy=LeastRecentlyUsed()) as pool:
        for name in ("words", "half"):
            with pool.use(name):
                pass
        load = HostedModel.load

        def fail(self: HostedModel) -> None:
            if self.name == "trained":
                raise torch.OutOfMemoryError("no room")
            load(self)

        monkeypatch.setattr(HostedModel, "load", fail)
        with pytest.raises(torch.OutOfMemoryError, match="no room"), pool.use("trained"):
            pytest.fail("it was used")
        assert pool.resident == ("words", "half")
        assert pool.evictions == 0
        monkeypatch.undo()
        for name in models:
            with pool.use(name) as model:
                assert torch.equal(model(INPUTS[name]), plain[name](INPUTS[name]))


@pytest.mark.parametrize("broken", ["empty", "copy_", "as_strided"])
def test_a_copy_that_fails_leaves_the_model_on_the_host(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = words()
    plain = copy.deepcopy(model)
    hosted = hosted_model("words", model)

    def fail(*_args: Any, **_keywords: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(torch if broken == "empty" else torch.Tensor, broken, fail)
        with pytest.raises(torch.OutOfMemoryError):
            hosted.load()
    assert not hosted.is_visiting
    assert same(model, plain)
    hosted.load()
    assert torch.equal(model(X), plain(X))


# -- several threads -----------------------------------------------------------------------------------------


def in_threads(work: Callable[[int], None], count: int) -> list[BaseException]:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_threads_get_the_values_of_models_that_never_moved() -> None:
    models: dict[str, nn.Module] = {
        str(at): nn.Sequential(nn.Linear(16, 16 + at), nn.ReLU()).eval() for at in range(5)
    }
    plain = copy.deepcopy(models)
    most = 0
    with ModelPool(models, device="cpu", budget="6MiB", request_bytes="1MiB") as pool:

        def work(number: int) -> None:
            nonlocal most
            chance = random.Random(number)
            for _ in range(40):
                name = chance.choice(list(models))
                x = torch.full((2, 16), float(number))
                with pool.use(name) as model:
                    with pool._changed:
                        taken = 2 * MIB * len(pool.resident) + MIB * sum(pool._in_use.values())
                        most = max(most, taken)
                    assert torch.equal(model(x), plain[name](x))

        assert in_threads(work, 6) == []
        assert most <= 6 * MIB
        assert pool.evictions > 0
    assert all(same(models[name], plain[name]) for name in models)


def test_who_finds_no_room_waits_until_there_is() -> None:
    models = {name: nn.Linear(8, 8) for name in "ab"}
    order: list[str] = []
    held = threading.Event()
    with ModelPool(models, device="cpu", budget="2MiB") as pool:

        def work(number: int) -> None:
            if number == 0:
                with pool.use("a"):
                    held.set()
                    while not pool._waiting:
                        pass
                    order.append("a")
            else:
                held.wait(30)
                with pool.use("b"):
                    order.append("b")

        assert in_threads(work, 2) == []
    assert order == ["a", "b"]


def test_threads_that_wait_for_each_other_are_told_so() -> None:
    models = {name: nn.Linear(8, 8) for name in "ab"}
    with ModelPool(models, device="cpu", budget="2MiB") as pool:
        with (
            pytest.raises(UsageError, match="no room can come free for the model b"),
            pool.use("a"),
            pool.use("b"),
        ):
            pytest.fail("both were used")
        with pool.use("b"):
            assert pool.resident == ("b",)
    both = threading.Barrier(2)
    models = {name: nn.Linear(8, 8) for name in "abcd"}
    with ModelPool(models, device="cpu", budget="4MiB") as pool:

        def work(number: int) -> None:
            with pool.use("ab"[number]):
                both.wait(30)
                with pool.use("cd"[number]):
                    pass

        errors = in_threads(work, 2)
    assert len(errors) == 1
    assert isinstance(errors[0], UsageError)


# -- bad input -------------------------------------------------------------------------------------------------


def shared() -> dict[str, nn.Module]:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return {"one": one, "two": two}


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        ({}, {"budget": "1GiB"}, "there are no models"),
        ([nn.Linear(1, 1)], {"budget": "1GiB"}, "there are no models"),
        ({"a": len}, {"budget": "1GiB"}, "a is of type builtin_function_or_method, no model"),
        (shared(), {"budget": "1GiB"}, "the models one and two share memory: weight"),
        (
            {"a": nn.Linear(4, 4, device="meta")},
            {"budget": "1GiB"},
            "the model a is not on the CPU: weight is on meta",
        ),
        (
            {"a": nn.Linear(2048, 2048)},
            {"budget": "8MiB"},
            "the model a fits not even alone: 18.00 MiB of weights",
        ),
        (
            {"a": nn.Linear(4, 4)},
            {"budget": "8MiB", "request_bytes": "7MiB"},
            "7.00 MiB for a request, of 8.00 MiB",
        ),
        (
            {"a": nn.Linear(4, 4)},
            {"budget": "8MiB", "request_bytes": {"b": 1}},
            "has nothing for the model a",
        ),
        (
            {"a": nn.Linear(4, 4)},
            {"budget": "8MiB", "request_bytes": {"a": 1, "b": 1}},
            "request_bytes names 'b', which is no model here",
        ),
        ({"a": nn.Linear(4, 4)}, {"budget": "8MiB", "policy": "lru"}, "policy='lru' does not say who leaves"),
        ({"a": nn.Linear(4, 4)}, {"budget": "8MiB", "policy": LeastRecentlyUsed}, "does not say who leaves"),
        ({"a": nn.Linear(4, 4)}, {"budget": "8 apples"}, "budget='8 apples' cannot be read"),
        ({"a": nn.Linear(4, 4)}, {}, "nothing says how much the models may take"),
        ({"a": nn.Linear(4, 4)}, {"device": None}, "there is no CUDA device"),
        ({"a": nn.Linear(4, 4)}, {"device": "tpu9"}, "device='tpu9' is no device"),
        (
            {"a": nn.ParameterList([torch.eye(2).to_sparse()])},
            {"budget": "8MiB"},
            "the model a holds a tensor of its own kind",
        ),
    ],
)
def test_bad_input_is_one_line(models: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        ModelPool(models, **{"device": "cpu", **options})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_closed_pool_and_models_in_use_are_told() -> None:
    model = nn.Linear(4, 4)
    pool = ModelPool({"a": model}, device="cpu", budget="4MiB")
    with pytest.raises(UsageError, match="there is no model 'b'"), pool.use("b"):
        pass
    with pool.use("a"):
        with pytest.raises(UsageError, match="the model a is in use"):
            pool.close()
        with pytest.raises(UsageError, match="the model a is in use"):
            pool.evict("a")
    pool.evict("a")
    assert pool.resident == ()
    pool.close()
    pool.close()
    with pytest.raises(UsageError, match="the pool is closed"), pool.use("a"):
        pass


# -- on the virtual card ---------------------------------------------------------------------------------------


def test_what_torch_reserves_is_what_the_pool_counts() -> None:
    with VirtualGPU("RTX 4090", alloc_conf=""):
        models: dict[str, nn.Module] = {
            str(scale): nn.Sequential(nn.Linear(4096, 4096 * scale), nn.Linear(4096 * scale, 4096)).half()
            for scale in (1, 2, 4, 3, 5)
        }
        pool = vramfit.ModelPool(models, budget="900MiB", request_bytes="64MiB")
        sizes = pool.sizes
        chance = random.Random(0)
        for _ in range(40):
            name = chance.choice(list(models))
            with pool.use(name) as model, torch.no_grad():
                alone = sum(sizes[one].weight_bytes for one in pool.resident)
                model(torch.ones(16, 4096, dtype=torch.half, device="cuda"))
            assert alone <= torch.cuda.max_memory_reserved() <= pool.budget
        assert pool.evictions > 5
        pool.close()
        assert torch.cuda.memory_allocated() <= WORKSPACE
        assert all(one.device.type == "cpu" for model in models.values() for one in model.parameters())


def test_weights_alone_are_reserved_to_the_byte() -> None:
    with VirtualGPU("RTX 4090", alloc_conf=""):
        models: dict[str, nn.Module] = {str(scale): nn.Linear(4096, 1024 * scale) for scale in (3, 1, 2)}
        pool = ModelPool(models, budget="64MiB")
        for name in ("1", "2", "3", "1", "2"):
            with pool.use(name):
                assert torch.cuda.memory_reserved() == sum(
                    pool.sizes[one].weight_bytes for one in pool.resident
                )
        assert pool.moved_bytes == sum(
            pool._hosted[name].nbytes for name in ("1", "2", "3", "1", "2")[: pool.loads]
        )


def test_a_model_that_finds_no_room_on_the_card_leaves_all_as_before() -> None:
    with VirtualGPU("1GiB", alloc_conf="", context_bytes=0):
        models: dict[str, nn.Module] = {
            "small": nn.Linear(4096, 4096),
            "large": nn.Linear(8192, 16384),
        }
        pool = ModelPool(models, budget="560MiB")
        with pool.use("small"):
            pass
        other = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError), pool.use("large"):
            pytest.fail("it was used")
        assert pool.resident == ("small",)
        assert torch.cuda.memory_allocated() == before
        del other
        with pool.use("large"):
            assert pool.resident == ("large",)
