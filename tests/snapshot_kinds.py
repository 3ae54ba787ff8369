"""The kinds of snapshots that people share, as torch 2.0 to 2.6 write them, made up: small states and one history."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
BASE = 0x7F00_0000_0000
Snapshot = dict[str, Any]
Frames = list[dict[str, Any]]

_TORCH = "/opt/conda/lib/python3.10/site-packages/torch"


def cpp(*names: str) -> Frames:
    return [{"name": name, "filename": "??", "line": 0} for name in names]


def python(*places: tuple[str, str]) -> Frames:
    return [{"name": name, "filename": file, "line": 7} for file, name in places]


USER = ("/home/ada/train.py", "train")
ALLOCATOR = cpp(
    "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc", "at::detail::empty_generic"
)
STACKS: Mapping[str, Frames] = {
    "workspaces": ALLOCATOR
    + cpp(
        "at::cuda::getNewWorkspace()",
        "at::cuda::getCurrentCUDABlasHandle()",
        "at::native::addmm_out_cuda_impl",
    )
    + python((f"{_TORCH}/nn/modules/linear.py", "forward"), USER),
    "cudnn": ALLOCATOR
    + cpp("at::native::run_conv_plan(cudnnContext*, at::Tensor const&)", "at::native::cudnn_convolution")
    + python((f"{_TORCH}/nn/modules/conv.py", "forward"), USER),
    "gradients": ALLOCATOR
    + cpp(
        "at::native::structured_mm_out_cuda",
        "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)",
        "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)",
    ),
    "activations": ALLOCATOR
    + cpp("at::_ops::addmm::call", "torch::autograd::VariableType::(anonymous namespace)::addmm")
    + python(
        (f"{_TORCH}/nn/functional.py", "linear"), (f"{_TORCH}/nn/modules/module.py", "_call_impl"), USER
    ),
    "recomputed": ALLOCATOR
    + python((f"{_TORCH}/nn/modules/linear.py", "forward"), (f"{_TORCH}/utils/checkpoint.py", "backward"))
    + cpp("torch::autograd::PyNode::apply(std::vector<at::Tensor>&&)"),
    "optimizer_state": ALLOCATOR
    + cpp("at::native::zeros_like")
    + python((f"{_TORCH}/optim/adamw.py", "_init_group"), (f"{_TORCH}/optim/adamw.py", "step"), USER),
    "momentum": ALLOCATOR
    + cpp("at::_ops::clone::call")
    + python((f"{_TORCH}/optim/sgd.py", "_single_tensor_sgd"), USER),
    "temporaries": ALLOCATOR
    + cpp("at::_ops::_foreach_sqrt::call")
    + python((f"{_TORCH}/optim/adamw.py", "_multi_tensor_adamw"), USER),
    "parameters": ALLOCATOR
    + cpp("at::native::_to_copy")
    + python(
        (f"{_TORCH}/nn/modules/module.py", "convert"), (f"{_TORCH}/nn/modules/module.py", "_apply"), USER
    ),
    "communication_buffers": ALLOCATOR + cpp("c10d::Reducer::initialize_buckets") + python(USER),
    "other": ALLOCATOR + cpp("at::native::empty_cuda") + python(USER),
}
"""A stack for each thing that stacks tell."""


def block(size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {
        "size": size,
        "requested_size": 0 if state == "inactive" else size,
        "state": state,
        "frames": [],
        **more,
    }


def segment(number: int, blocks: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A segment as torch 2.6 writes it."""
    address, placed = BASE + (number << 32), []
    cursor = address
    for one in blocks:
        placed.append({"address": cursor, **one})
        cursor += one["size"]
    used = sum(one["size"] for one in blocks if one["state"] == "active_allocated")
    active = sum(one["size"] for one in blocks if one["state"] != "inactive")
    return {
        "device": 0,
        "address": address,
        "total_size": cursor - address,
        "allocated_size": used,
        "active_size": active,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": placed,
        **more,
    }


def segments(**more: Any) -> list[dict[str, Any]]:
    """Of 160 MiB: one full, one half free, one wholly free."""
    return [
        segment(0, [block(64 * MIB)], **more),
        segment(1, [block(24 * MIB), block(24 * MIB, "inactive")], **more),
        segment(2, [block(48 * MIB, "inactive")], **more),
    ]


def without(found: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Segments and blocks without some keys."""
    return [
        {
            **{key: value for key, value in one.items() if key not in keys},
            "blocks": [
                {key: value for key, value in part.items() if key not in keys} for part in one["blocks"]
            ],
        }
        for one in found
    ]


def _settings(**more: Any) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "roundup_power2_divisions": {},
        **more,
    }


def torch_26() -> Snapshot:
    return {
        "segments": segments(),
        "device_traces": [[]],
        "allocator_settings": _settings(),
        "external_annotations": [],
    }


def torch_25_with_more_cards_than_used() -> Snapshot:
    return {**torch_26(), "device_traces": [[] for _ in range(8)]}


def torch_24_private_pool() -> Snapshot:
    found = [*segments(), segment(3, [block(32 * MIB, "inactive")], segment_pool_id=(0, 1))]
    return {"segments": found, "device_traces": [[]], "allocator_settings": _settings()}


def torch_23_settings() -> Snapshot:
    settings = _settings(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512", max_split_size=512 * MIB)
    return {"segments": segments(), "device_traces": [[]], "allocator_settings": settings}


def torch_22_without_settings() -> Snapshot:
    return {"segments": segments(), "device_traces": [[]]}


def torch_21_without_pools() -> Snapshot:
    return {"segments": without(segments(), "segment_pool_id", "is_expandable"), "device_traces": [[]]}


def torch_20_history_of_blocks() -> Snapshot:
    found = without(segments(), "segment_pool_id", "is_expandable", "requested_size", "frames", "address")
    for number, one in enumerate(found):
        one["address"] = BASE + (number << 32)
        for part in one["blocks"]:
            if part["state"] != "inactive":
                part["history"] = [
                    {"addr": one["address"], "real_size": part["size"] - 100, "frames": STACKS["parameters"]}
                ]
    return {"segments": found, "device_traces": [[]]}


def bare_list() -> list[dict[str, Any]]:
    """What ``torch.cuda.memory_snapshot()`` returns."""
    return segments()


def bare_list_torch_1() -> list[dict[str, Any]]:
    found = without(
        segments(), "segment_pool_id", "is_expandable", "requested_size", "frames", "address", "active_size"
    )
    return [{**one, "address": BASE + (number << 32)} for number, one in enumerate(found)]


def segments_alone() -> Snapshot:
    return {"segments": segments()}


def expandable() -> Snapshot:
    """Pages of 20 MiB: 44 MiB at the start live, then 96 MiB free, of which four pages are whole."""
    found = segment(0, [block(44 * MIB), block(96 * MIB, "inactive")], is_expandable=True)
    return {
        "segments": [found],
        "device_traces": [[]],
        "allocator_settings": _settings(
            PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", expandable_segments=True
        ),
    }


def two_cards() -> Snapshot:
    smaller = [{**one, "device": 1, "address": one["address"] + (1 << 40)} for one in segments()[:1]]
    for one in smaller:
        one["blocks"] = [{**part, "address": one["address"]} for part in one["blocks"]]
    return {**torch_26(), "segments": [*segments(), *smaller], "device_traces": [[], []]}


def history_of_one_card() -> Snapshot:
    """GPU 0 has a history of one request, GPU 1 none."""
    found = two_cards()
    at = found["segments"][0]["address"]
    events = [
        {"action": "segment_alloc", "addr": at, "size": 64 * MIB, "stream": 0, "frames": []},
        {"action": "alloc", "addr": at, "size": 64 * MIB, "stream": 0, "frames": STACKS["activations"]},
    ]
    return {**found, "segments": [one for one in found["segments"] if one["device"] or one["address"] == at],
            "device_traces": [events, []]}  # fmt: skip


def with_stacks() -> Snapshot:
    """A block of 24 MiB for each of `STACKS`, in segments of their own."""
    return {
        "segments": [
            segment(number, [block(24 * MIB, frames=stack)]) for number, stack in enumerate(STACKS.values())
        ],
        "device_traces": [[]],
    }


def waiting_for_a_stream() -> Snapshot:
    found = [segment(0, [block(64 * MIB), block(32 * MIB, "active_pending_free")])]
    return {**torch_26(), "segments": found}


def two_streams() -> Snapshot:
    found = [*segments()[:2], segment(2, [block(48 * MIB, "inactive")], stream=94_200_000)]
    return {**torch_26(), "segments": found}


def small_pool() -> Snapshot:
    small = segment(3, [block(512 * 1024), block(2 * MIB - 512 * 1024, "inactive")], segment_type="small")
    return {**torch_26(), "segments": [*segments(), small]}


STATES: Mapping[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        torch_26,
        torch_25_with_more_cards_than_used,
        torch_24_private_pool,
        torch_23_settings,
        torch_22_without_settings,
        torch_21_without_pools,
        torch_20_history_of_blocks,
        bare_list,
        bare_list_torch_1,
        segments_alone,
        expandable,
        two_cards,
        with_stacks,
        waiting_for_a_stream,
        two_streams,
        small_pool,
    )
}
"""Snapshots without history."""


def write(snapshot: Any, path: Path) -> Path:
    """Write a snapshot in the form that the name's endings ask for: .pickle, .json, and .gz of either."""
    text = ".json" in path.suffixes
    data = json.dumps(snapshot).encode() if text else pickle.dumps(snapshot)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
