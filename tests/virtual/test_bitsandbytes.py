"""bitsandbytes on the virtual card: the bytes of quantised weights, and what its kernels take while they run.

Expected figures follow bitsandbytes/functional.py (`quantize_4bit`, `quantize_blockwise`, `dequantize_4bit`),
bitsandbytes/backends/cuda/ops.py (`gemm_4bit`) and bitsandbytes/autograd/_functions.py (`MatMul4Bit`); one sequence is
that of a recording of a card.
"""

from __future__ import annotations

import copy
import gc
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vramfit.trace import Category, EventKind
from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.usefixtures("kept_workspaces")

pytest.importorskip("bitsandbytes")

ROWS, COLUMNS = 1024, 2048
N = ROWS * COLUMNS
RECORDING = Path(__file__).parents[1] / "data" / "traces" / "finetune-course.json.gz"


@pytest.fixture
def bnb(gpu: VirtualGPU) -> Iterator[Any]:
    """bitsandbytes, used once so that nothing is made for the first time later."""
    import bitsandbytes

    bitsandbytes.functional.quantize_blockwise(torch.zeros(64, device="cuda"))
    a = torch.zeros(8, 8, device="cuda")
    a @ a  # the workspace of cuBLAS
    del a
    gc.collect()
    yield bitsandbytes


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def blocks(*sizes: int) -> int:
    """Bytes of tensors of these many bytes, each in a block of its own."""
    return sum(-(-size // 512) * 512 for size in sizes)


def held(n: int, *, blocksize: int = 64, nested: bool) -> list[int]:
    """Bytes of each tensor that a 4-bit weight of ``n`` elements keeps."""
    scales = -(-n // blocksize)
    packed, code = (n + 1) // 2, 16 * 4
    if not nested:
        return [packed, 4 * scales, code]
    return [
        packed,
        scales,
        code,
        4,
        4 * -(-scales // 256),
        256 * 4,
    ]  # offset; scales of the scales; their code


def linear(bnb: Any, rows: int = ROWS, columns: int = COLUMNS, **options: Any) -> Any:
    options = {"bias": False, "compute_dtype": torch.bfloat16, **options}
    return bnb.nn.Linear4bit(columns, rows, **options).to(torch.bfloat16).cuda()


class Requests:
    """What is requested from the allocator and given back inside a block, in order."""

    def __init__(self, gpu: VirtualGPU) -> None:
        self.gpu = gpu

    def __enter__(self) -> list[int]:
        self.found: list[int] = []
        self.start = len(self.gpu.trace)
        return self.found

    def __exit__(self, *error: object) -> None:
        trace = self.gpu.trace
        for row in range(self.start, len(trace)):
            if trace.kind[row] == EventKind.ALLOC:
                self.found.append(int(trace.size[row]))


# -- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 2048), (96, 100), (4096, 8192)])
def test_a_weight_keeps_its_packed_bytes(
    gpu: VirtualGPU, bnb: Any, kind: str, nested: bool, rows: int, columns: int
) -> None:
    nothing = allocated()
    layer = linear(bnb, rows, columns, quant_type=kind, compress_statistics=nested)
    assert allocated() - nothing == blocks(*held(rows * columns, nested=nested))
    assert layer.weight.dtype is torch.uint8 and layer.weight.shape == (rows * columns // 2, 1)
    assert isinstance(layer.weight, bnb.nn.Params4bit) and isinstance(layer.weight, nn.Parameter)
    assert layer.weight.device == layer.weight.quant_state.absmax.device == torch.device("cuda", 0)


@pytest.mark.parametrize("blocksize", [64, 128, 4096])
def test_blocks_of_other_sizes(gpu: VirtualGPU, bnb: Any, blocksize: int) -> None:
    weight = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.float16)
    nothing = allocated()
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=blocksize, quant_type="nf4", compress_statistics=True
    )
    assert allocated() - nothing == blocks(*held(N, blocksize=blocksize, nested=True))
    restored = bnb.functional.dequantize_4bit(packed, state)
    assert (restored.shape, restored.dtype) == (weight.shape, torch.float16)


def test_a_weight_goes_to_the_host_and_back_with_its_state(gpu: VirtualGPU, bnb: Any) -> None:
    nothing = allocated()
    layer = linear(bnb)
    weight, there = layer.weight, allocated()
    layer.to("cpu")
    # QuantState.to moves neither the code of the type nor that of the scales (functional.py)
    codes = blocks(256 * 4) if weight.quant_state.state2.code.is_cuda else 0
    assert allocated() - nothing == codes
    layer.to("cuda")
    assert allocated() == there and layer.weight is weight
    twin = copy.deepcopy(layer)
    assert type(twin.weight) is type(weight) and twin.weight.quant_state is not weight.quant_state
    assert allocated() - there == there - nothing


def test_a_weight_is_made_again_by_its_class(gpu: VirtualGPU, bnb: Any) -> None:
    """As PEFT does for OLoRA and PiSSA, which take something out of the base."""
    nothing = allocated()
    layer = linear(bnb)
    there = allocated()
    restored = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    layer.weight = type(layer.weight)(restored, quant_type="nf4", compress_statistics=True, module=layer).to(
        "cuda"
    )
    del restored
    assert isinstance(layer.weight, bnb.nn.Params4bit) and layer.weight.dtype is torch.uint8
    assert allocated() == there > nothing
    assert layer(torch.zeros(2, COLUMNS, device="cuda")).shape == (2, ROWS)


def test_weights_count_as_parameters(gpu: VirtualGPU, bnb: Any) -> None:
    layer = linear(bnb, compress_statistics=False)
    trace = gpu.trace
    categories = {
        int(trace.size[row]): Category(int(trace.category[row]))
        for row in range(len(trace))
        if trace.kind[row] == EventKind.ALLOC
    }
    assert categories[N // 2] == categories[N // 64 * 4] == Category.PARAMETERS
    del layer


# -- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_a_large_product_takes_the_whole_weight_for_its_duration(
    gpu: VirtualGPU, bnb: Any, nested: bool
) -> None:
    layer = linear(bnb, compress_statistics=nested)
    tokens = 2048  # above the 1536 up to which the fused kernel may be taken
    x = torch.zeros(tokens, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales = [N // 64 * 4] * 2 if nested else []  # restored, and moved by their mean
    with Requests(gpu) as forward:
        y = layer(x)
    assert forward == [*scales, 2 * N, 2 * tokens * ROWS]
    gradient = torch.zeros_like(y)
    before = allocated()
    y.backward(gradient)  # brings up the workspace of autograd's thread
    x.grad = None
    y = layer(x)
    torch.cuda.reset_peak_memory_stats()
    with Requests(gpu) as backward:
        y.backward(gradient)
    # dequantize_4bit adds the mean in place
    assert backward == [*scales[:1], 2 * N, 2 * tokens * COLUMNS]
    workspace = 8_519_680
    # the scales are gone when the product begins, the weight when it ends
    assert torch.cuda.max_memory_allocated() - before - workspace == blocks(*backward[-2:])


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_small_product_takes_the_fused_kernel(gpu: VirtualGPU, bnb: Any, tokens: int) -> None:
    layer = linear(bnb)
    x = torch.zeros(tokens, COLUMNS, device="cuda", dtype=torch.bfloat16)
    with Requests(gpu) as forward, torch.no_grad():
        layer(x)
    assert forward == [2 * tokens * ROWS]


def test_cards_differ_in_which_product_is_fused() -> None:
    """bitsandbytes asks the card for its multiprocessors and capability, and remembers the answer."""
    import bitsandbytes

    seen = {}
    for card in ("RTX 4090", "H100 80GB"):
        with VirtualGPU(card, alloc_conf="") as gpu:
            layer = linear(bitsandbytes, 8192, 8192)
            x = torch.zeros(64, 8192, device="cuda", dtype=torch.bfloat16)
            with Requests(gpu) as forward, torch.no_grad():
                layer(x)
            seen[card] = 2 * 8192 * 8192 in forward
            assert 2 * 64 * 8192 in forward
    assert seen == {"RTX 4090": False, "H100 80GB": True}


def test_a_gradient_passes_as_on_a_recorded_card(gpu: VirtualGPU, bnb: Any) -> None:
    """A 4-bit TinyLlama, float16 weights under float32 activations of 1,000 tokens: its ``down_proj`` going back."""
    recorded = json.loads(gzip.decompress(RECORDING.read_bytes()))["device_traces"][0]
    inner, outer, tokens = 5632, 2048, 1000
    half, whole, gradient = 2 * inner * outer, 4 * inner * outer, 4 * inner * tokens
    expected = [
        ("alloc", half),
        ("alloc", whole),
        ("free_requested", half),
        ("alloc", gradient),
        ("free_requested", whole),
    ]
    steps = [(e["action"], e["size"]) for e in recorded if e["action"] in ("alloc", "free_requested")]
    windows = [steps[at : at + 5] for at in range(len(steps)) if steps[at] == expected[0]]
    assert len(windows) == 132 and windows.count(expected) == 66
    # and its weights and scales, as the snapshot holds them at its end and before (22 layers)
    sizes = [size for action, size in steps if action == "alloc"]
    assert sizes.count(half) == 2 * 3 * 22

    layer = bnb.nn.Linear4bit(inner, outer, bias=False, quant_type="nf4", compress_statistics=False)
    layer = layer.to(torch.float16).cuda()
    x = torch.zeros(tokens, inner, device="cuda", requires_grad=True)
    y = layer(x)
    after = torch.zeros_like(y)
    y.backward(after)
    x.grad = None
    y = layer(x)
    start = len(gpu.trace)
    y.backward(after)
    trace = gpu.trace
    ours = [
        (EventKind(int(trace.kind[row])).name.lower(), int(trace.size[row]))
        for row in range(start, len(trace))
        if trace.kind[row] in (EventKind.ALLOC, EventKind.FREE_REQUESTED)
    ]
    assert ours[:5] == expected


# -- eight bits ----------------------------------------------------------------------------------------------------


def test_eight_bit_weights(gpu: VirtualGPU, bnb: Any) -> None:
    nothing = allocated()
    layer = bnb.nn.Linear8bitLt(COLUMNS, ROWS, bias=False, has_fp16_weights=False).cuda()
    assert allocated() - nothing == blocks(N, 4 * ROWS)  # one byte each, and a scale for each row
    assert layer.weight.dtype is torch.int8
    x = torch.zeros(8, COLUMNS, device="cuda", dtype=torch.float16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


STATES = {
    # two states of a byte each, a scale for 256 elements of each, and the two maps of the optimizer
    "AdamW8bit": blocks(N, N, N // 256 * 4, N // 256 * 4, 1024, 1024),
    "Lion8bit": blocks(N, N // 256 * 4, 1024),
    "AdamW32bit": blocks(4 * N, 4 * N),
    "PagedAdamW32bit": 0,
    "PagedAdamW8bit": blocks(N // 256 * 4, N // 256 * 4, 1024, 1024),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_optimizers(gpu: VirtualGPU, bnb: Any, name: str) -> None:
    weight = nn.Parameter(torch.zeros(N, device="cuda"))
    optimizer = getattr(bnb.optim, name)([weight])
    weight.grad = torch.zeros_like(weight)
    before = allocated()
    optimizer.step()
    optimizer.step()
    assert allocated() - before == STATES[name]
    told = {warning.code for warning in gpu.run.warnings}
    assert ("managed-memory" in told) == name.startswith("Paged")


# -- the whole way -------------------------------------------------------------------------------------------------


def test_values_that_no_kernel_computed_are_unknown(gpu: VirtualGPU, bnb: Any) -> None:
    packed, state = bnb.functional.quantize_4bit(torch.zeros(64, 64, device="cuda"), quant_type="nf4")
    assert gpu.mode.shadows.find(packed) is None and gpu.mode.shadows.find(state.absmax) is None


def test_tensors_on_the_host_are_quantised_for_real(gpu: VirtualGPU, bnb: Any) -> None:
    weight = torch.linspace(-1, 1, 4096).reshape(64, 64)
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    restored = bnb.functional.dequantize_4bit(packed, state)
    assert type(restored) is Tensor and torch.allclose(restored, weight, atol=0.15)
    assert float(restored.abs().max()) == 1.0


def test_leaving_gives_the_library_back() -> None:
    import bitsandbytes
    from bitsandbytes import cextension, functional

    with VirtualGPU("RTX 4090"):
        linear(bitsandbytes)
    modules = [
        cextension,
        functional,
        *(sys.modules[f"bitsandbytes.backends.{b}.ops"] for b in ("cpu", "cuda")),
    ]
    before = [vars(module)["lib"] for module in modules]
    tables = functional.name2qmap
    with VirtualGPU("RTX 4090"):
        linear(bitsandbytes)
        assert all(type(vars(module)["lib"]).__name__ == "NativeLibrary" for module in modules)
        assert functional.name2qmap is not tables
    assert [vars(module)["lib"] for module in modules] == before
    assert all(type(library).__name__ != "NativeLibrary" for library in before)
    assert functional.name2qmap is tables and all(not t.is_cuda for t in tables.values())
    assert functional.CUBLAS_Context._instance is None
