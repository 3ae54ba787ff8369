"""Metered CPU: real tensors, a card's allocator, and values that nobody touched."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

import vramfit
from vramfit.analysis import peak
from vramfit.launch import threads
from vramfit.record.cpu_recorder import CpuRecorder
from vramfit.trace import Category, EventKind, MemoryTrace, Source

pytestmark = [pytest.mark.torch_versions, pytest.mark.usefixtures("no_garbage")]

F32 = 4


class Block(nn.Module):
    """Convolution, normalisation, dropout, attention, and a tensor that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, image: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.relu(self.norm(self.conv(image)))).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.out((x * x + x.sin()).mean(1)) * scale


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
        loss = nn.functional.cross_entropy(model(images, scale=torch.tensor(0.5)), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) < steps:
            optimizer.zero_grad()
    return losses


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Block()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def bytes_of(trace: MemoryTrace, category: Category) -> int:
    """Bytes of all allocations of a category that the trace never frees."""
    alive: dict[int, int] = {}
    for row in range(len(trace)):
        if trace.kind[row] == EventKind.ALLOC:
            alive[int(trace.address[row])] = row
        elif trace.kind[row] == EventKind.FREE_REQUESTED:
            alive.pop(int(trace.address[row]), None)
    return sum(int(trace.size[row]) for row in alive.values() if trace.category[row] == category)


def test_values_gradients_and_random_numbers_are_those_of_the_plain_program() -> None:
    model, optimizer = build()
    losses = train(model, optimizer)
    state = torch.get_rng_state()
    other, other_optimizer = build()
    with vramfit.track(other, other_optimizer, device="cpu") as tracked:
        assert train(other, other_optimizer) == losses
    assert torch.equal(torch.get_rng_state(), state)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two) and torch.equal(one.grad, two.grad), name
    for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert tracked.run.source is Source.CPU and tracked.run.exit_code == 0


def test_passes_of_a_closure_belong_to_the_step_that_calls_it() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with vramfit.track(model, optimizer, device="cpu") as tracked:
        for _ in range(2):
            optimizer.step(closure)
    parts = ("optimizer", "forward", "backward")
    steps = [f"step {step}/{part}" for step in (1, 2) for part in parts]
    assert [name for name in tracked.trace.phases if name.startswith("step")] == steps


def test_every_byte_has_its_category_module_and_phase() -> None:
    model, optimizer = build()
    with vramfit.track(model, optimizer, device="cpu") as tracked:
        train(model, optimizer)
    trace = tracked.trace
    numbers = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert bytes_of(trace, Category.PARAMETERS) == F32 * numbers + buffers
    assert bytes_of(trace, Category.GRADIENTS) == F32 * numbers
    steps = F32 * len(list(model.parameters()))
    assert bytes_of(trace, Category.OPTIMIZER_STATE) == 2 * F32 * numbers + steps
    rows = trace.kind == EventKind.ALLOC
    inputs = rows & (trace.category == Category.INPUTS)
    assert {trace.tensors[i] for i in trace.tensor[inputs]} == {
        "float32[4, 3, 8, 8]",
        "int64[4]",
        "float32[]",
    }
    assert {"Block.conv", "Block.norm", "Block.attention.out_proj", "Block.out"} <= set(trace.modules)
    assert {f"step {n}/{part}" for n in (1, 2, 3) for part in ("forward", "backward", "optimizer")} <= set(
        trace.phases
    )
    where = {frame.filename for frame in trace.frames}
    assert __file__ in where and not any(f"{os.sep}vramfit{os.sep}record{os.sep}" in name for name in where)
    moment = peak(trace)
    assert moment.categories[Category.ACTIVATIONS] > 0
    assert moment.allocated == tracked.peak_allocated_bytes


def test_what_dies_is_given_back() -> None:
    with vramfit.track(device="cpu") as tracked:
        before = tracked.allocated_bytes
        held = torch.ones(1000)
        assert tracked.allocated_bytes - before == 4096, "blocks are handed out in steps of 512 B"
        view = held[10:]
        del held
        assert tracked.allocated_bytes - before == 4096, "a view holds its storage"
        del view
        assert tracked.allocated_bytes == before
        assert tracked.peak_allocated_bytes == before + 4096
        assert tracked.reserved_bytes > before


def test_what_lay_in_memory_before_counts_when_it_is_used() -> None:
    data, unused = torch.randn(64, 16), torch.randn(1 << 20)
    model = nn.Linear(16, 16)
    with vramfit.track(device="cpu") as tracked:
        held = tracked.allocated_bytes
        model(data[:32])
        assert tracked.allocated_bytes == held + data.nbytes
    assert tracked.peak_allocated_bytes < held + unused.nbytes
    assert Category.PARAMETERS in tracked.trace.category, "the parameters were alive"


def test_a_model_that_moves_to_another_dtype_is_met_again() -> None:
    model = nn.Linear(64, 64)
    with vramfit.track(model, device="cpu") as tracked:
        model(torch.ones(1, 64))
        model.double()
        model(torch.ones(1, 64, dtype=torch.float64))
    assert bytes_of(tracked.trace, Category.PARAMETERS) == 8 * (64 * 64 + 64)


def test_past_the_budget_a_request_raises_as_on_a_card() -> None:
    with (
        pytest.raises(
            torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 32\.00 MiB"
        ) as caught,
        vramfit.track(nn.Linear(4, 4), device="cpu", budget="64MiB") as tracked,
    ):
        held = [torch.zeros(8 << 20) for _ in range(3)]
    assert "total capacity of 64.00 MiB" in str(caught.value)
    run = tracked.run
    assert run.oom is not None and not run.oom.handled and run.exit_code == 1
    assert run.oom.requested_bytes == 32 << 20 and run.oom.user_line.filename == __file__
    assert tracked.report.fits is False
    assert tracked.peak_reserved_bytes <= 64 << 20
    assert (run.trace.kind == EventKind.OOM).sum() == 1
    assert "held" not in locals() or len(held) == 3


def test_a_program_that_catches_the_error_goes_on() -> None:
    with vramfit.track(device="cpu", budget="64MiB") as tracked:
        size = 1 << 28
        while True:
            try:
                torch.zeros(size, dtype=torch.uint8)
                break
            except torch.OutOfMemoryError:
                size //= 2
    assert size <= 64 << 20
    assert tracked.run.oom is not None and tracked.run.oom.handled and tracked.report.fits is True


def test_the_allocator_has_the_settings_that_are_given() -> None:
    with vramfit.track(device="cpu", alloc_conf="expandable_segments:True") as tracked:
        torch.ones(10)
    assert EventKind.SEGMENT_MAP in tracked.trace.kind
    assert tracked.trace.meta["alloc_conf"] == "expandable_segments:True"


def test_threads_of_the_program_are_metered() -> None:
    with vramfit.track(device="cpu") as tracked:
        before, held = tracked.allocated_bytes, []
        thread = threading.Thread(target=lambda: held.append(torch.ones(1024)))
        thread.start()
        thread.join()
        assert tracked.allocated_bytes - before == 4096


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_forked_children_are_left_alone() -> None:
    with vramfit.track(device="cpu") as tracked:
        alive = tracked.allocated_bytes  # what other tests have left in this process has room as well
    with vramfit.track(device="cpu", budget=alive + (2 << 20)) as tracked:
        child = os.fork()
        if child == 0:
            small = [
                torch.ones(8192) for _ in range(100)
            ]  # no kernel that wants threads: they are not forked
            os._exit(0 if len(small) == 100 else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert tracked.run.oom is None


def test_inference_mode_sparse_and_wrapped_tensors_are_counted() -> None:
    with vramfit.track(device="cpu") as tracked, torch.inference_mode():
        before = tracked.allocated_bytes
        sparse = torch.eye(64).to_sparse()
        assert tracked.allocated_bytes - before == 64 * 16 + 512, (
            "two rows of int64, 64 floats in blocks of 512 B"
        )
        del sparse
        out = nn.Linear(8, 1024, bias=False)(torch.ones(1, 8))
        assert tracked.allocated_bytes - before >= out.nbytes


def test_nothing_stays_patched() -> None:
    from torch.nn.modules import module as registry
    from torch.optim import optimizer as optim

    def look() -> list[object]:
        hooks = (
            registry._global_forward_hooks,
            registry._global_forward_pre_hooks,
            registry._global_parameter_registration_hooks,
            registry._global_buffer_registration_hooks,
            optim._global_optimizer_pre_hooks,
            optim._global_optimizer_post_hooks,
        )
        return [
            nn.Module.__call__,
            torch.autograd.graph._engine_run_backward,
            torch.autograd._engine_run_backward,
            threading.Thread._bootstrap_inner,
            *[dict(hook) for hook in hooks],
            torch.utils._python_dispatch._get_current_dispatch_mode(),
        ]

    before = look()
    with pytest.raises(ZeroDivisionError), vramfit.track(device="cpu") as tracked:
        assert look() != before
        1 / 0  # noqa: B018
    assert look() == before
    assert tracked.run.error == "ZeroDivisionError: division by zero" and tracked.run.exit_code == 1
    assert threads.__name__  # the module that is undone


def test_a_recorder_can_be_asked_while_it_runs() -> None:
    recorder = CpuRecorder()
    recorder.start()
    try:
        held = torch.ones(256)
        assert recorder.run().trace.kind.tolist().count(EventKind.ALLOC) >= 1
        assert recorder.figures().allocated >= held.nbytes
    finally:
        run = recorder.stop()
    assert recorder.run() is run
