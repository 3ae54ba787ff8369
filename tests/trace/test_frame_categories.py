from __future__ import annotations

from typing import Any

import pytest
from tests.snapshot_kinds import BASE, MIB, STACKS, Frames, block, cpp, python, segment, with_stacks

from vramfit.analysis import peak
from vramfit.trace import Category, Frame, MemoryTrace, trace_from_snapshot
from vramfit.trace.frame_categories import BY_FRAMES, category_of

_AS = {"cudnn": Category.WORKSPACES, "momentum": Category.OPTIMIZER_STATE, "recomputed": Category.ACTIVATIONS}
SGD = ("/usr/lib/python3/dist-packages/torch/optim/sgd.py", "_multi_tensor_sgd")
SITE = "/usr/lib/python3/dist-packages"


def stack(frames: Frames) -> tuple[Frame, ...]:
    return tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in frames)


def wanted(name: str) -> Category:
    return _AS.get(name) or Category[name.upper()]


@pytest.mark.parametrize("name", STACKS)
def test_what_stacks_tell(name: str) -> None:
    assert category_of(stack(STACKS[name])) is wanted(name)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (cpp("at::cuda::blas::gemm_and_bias<float>(bool)", "at::native::addmm"), Category.WORKSPACES),
        (cpp("at::native::raw_cudnn_convolution_forward_out"), Category.WORKSPACES),
        (cpp("c10d::ProcessGroupNCCL::allgather"), Category.COMMUNICATION_BUFFERS),
        (cpp("torch::autograd::AccumulateGrad::apply"), Category.GRADIENTS),
        (cpp("torch::autograd::THPVariable_add(_object*)"), Category.OTHER),
        (python(SGD), Category.OTHER),
        (
            cpp("at::_ops::mul::call") + python(SGD),
            Category.TEMPORARIES,
        ),
        (python((f"{SITE}/bitsandbytes/optim/optimizer.py", "init_state")), Category.OPTIMIZER_STATE),
        (python((f"{SITE}/transformers/modeling_utils.py", "from_pretrained")), Category.PARAMETERS),
        (python((f"{SITE}/torch/nn/modules/linear.py", "__init__")), Category.PARAMETERS),
        (python((f"{SITE}/torch/nn/modules/loss.py", "forward")), Category.OTHER),
        (python((f"{SITE}/transformers/trainer.py", "_prepare_input")), Category.INPUTS),
        (python(("/home/ada/optimus/prime.py", "step")), Category.OTHER),
        (python(("/home/ada/model.py", "forward")), Category.OTHER),
        ([], Category.OTHER),
    ],
)
def test_others_of_each_kind(frames: Frames, expected: Category) -> None:
    assert category_of(stack(frames)) is expected


def _with_history() -> dict[str, Any]:
    """The blocks of `with_stacks` with the requests that made them."""
    found = with_stacks()
    events = []
    for one, frames in zip(found["segments"], STACKS.values(), strict=True):
        events.append({"action": "segment_alloc", "addr": one["address"], "size": 24 * MIB, "stream": 0})
        events.append(
            {"action": "alloc", "addr": one["address"], "size": 24 * MIB, "stream": 0, "frames": frames}
        )
    return {**found, "device_traces": [events]}


@pytest.mark.parametrize("snapshot", [with_stacks(), _with_history()], ids=["state", "history"])
def test_categories_of_a_snapshot(snapshot: dict[str, Any]) -> None:
    trace = trace_from_snapshot(snapshot)
    expected = dict.fromkeys(Category, 0)
    for name in STACKS:
        expected[wanted(name)] += 24 * MIB
    assert peak(trace).categories == expected
    assert trace.meta["categories"] == BY_FRAMES


def test_blocks_of_a_state_keep_their_lines_and_categories_in_a_file(tmp_path: Any) -> None:
    trace = trace_from_snapshot(with_stacks())
    trace.save(tmp_path / "state.vft")
    loaded = MemoryTrace.load(tmp_path / "state.vft")
    assert loaded.equals(trace)
    assert peak(loaded).categories == peak(trace).categories
    lines = {group.line.filename for group in peak(loaded).tensors if group.line}
    assert lines == {"/home/ada/train.py"}


def test_a_category_that_the_file_names_wins() -> None:
    frames = STACKS["workspaces"]
    event = {"action": "alloc", "addr": BASE, "size": 512, "category": "inputs", "frames": frames}
    trace = trace_from_snapshot({"segments": [segment(0, [block(512)])], "device_traces": [[event]]})
    assert trace.category.tolist() == [Category.INPUTS]


def test_a_snapshot_without_telling_stacks_has_no_categories() -> None:
    trace = trace_from_snapshot({"segments": [segment(0, [block(512)])], "device_traces": [[]]})
    assert "categories" not in trace.meta
