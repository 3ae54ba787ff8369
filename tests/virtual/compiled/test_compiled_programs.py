"""Programs that compile what they run, as people write them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import warm
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._inductor.codecache import CacheBase
from torch._inductor.graph import GraphLowering
from torch.utils.checkpoint import checkpoint

import vramfit
from vramfit.analysis import verdict
from vramfit.trace import Category, EventKind
from vramfit.trace.frames import user_frame
from vramfit.virtual.gpu import VirtualGPU

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo hides what is not an error
]


OURS = str(Path(vramfit.__file__).parent)
WORKSPACES = 80 << 20
"""More than cuBLAS keeps on these cards."""


class Block(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(F.gelu(self.norm(self.a(x))), 0.1)) + x


def step(run: Any, model: nn.Module, rows: int = 1024) -> int:
    """Peak of a training step after one that warmed up, in bytes."""
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        run(torch.randn(rows, 512, device="cuda")).pow(2).mean().backward()
        model.zero_grad()
    return torch.cuda.max_memory_allocated()


def codes(gpu: VirtualGPU) -> set[str]:
    return {warning.code for warning in gpu.run.warnings}


def test_a_compiled_step_is_labelled_attributed_and_smaller(gpu: VirtualGPU) -> None:
    model = Block().cuda()
    eager = step(model, model)
    compiled = torch.compile(model)
    assert step(compiled, model) < eager
    assert next(iter(compiled.state_dict())) == "_orig_mod.a.weight"
    assert codes(gpu) == {"compiled-estimate"}
    trace = gpu.trace
    fused = [
        row
        for row in range(len(trace.kind))
        if trace.kind[row] == EventKind.ALLOC and trace.ops[trace.op[row]].startswith("inductor: fused")
    ]
    forward = [row for row in fused if trace.phases[trace.phase[row]].endswith("forward")]
    backward = [row for row in fused if trace.phases[trace.phase[row]].endswith("backward")]
    assert any("gelu" in trace.ops[trace.op[row]] for row in forward)
    assert {Category(trace.category[row]) for row in forward} == {Category.ACTIVATIONS}
    kinds = {Category.TEMPORARIES, Category.GRADIENTS}
    assert {Category(trace.category[row]) for row in backward} == kinds
    lines = {user_frame([trace.frames[i] for i in trace.stacks[trace.stack[row]]]) for row in fused}
    assert {frame.filename for frame in lines if frame} == {__file__}
    assert {frame.name.rpartition(".")[2] for frame in lines if frame} == {"forward", "step"}


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile(module)": lambda module: torch.compile(module, fullgraph=True),
    "module.compile()": lambda module: module.compile(fullgraph=True) or module,
    "its bound __call__": lambda module: torch.compile(module.__call__, fullgraph=True),
    "its forward": lambda module: torch.compile(module.forward, fullgraph=True),
    "a function that calls it": lambda module: torch.compile(lambda x: module(x), fullgraph=True),
}


@pytest.mark.parametrize("way", COMPILED)
def test_blocks_are_compiled_one_by_one(gpu: VirtualGPU, way: str) -> None:
    """torchtitan's way: our stand-in for ``nn.Module.__call__`` is none to a compiler."""
    blocks = nn.ModuleList(Block() for _ in range(3)).cuda()

    def through(runs: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for one in runs:
                x = one(x)
            return x

        return run

    rows = 1 << 14
    eager = step(through(list(blocks)), blocks, rows)
    compiled = step(through([COMPILED[way](block) for block in blocks]), blocks, rows)
    # Of each block, what goes into gelu and into dropout is computed again.
    assert eager - compiled >= 2 * rows * 512 * 4
    assert codes(gpu) == {"compiled-estimate"}


def _constant(x: Tensor) -> Tensor:
    return x * torch.tensor(2.0, device=x.device) + torch.as_tensor([1.0] * 8, device=x.device)


def _listed(x: Tensor) -> Tensor:
    return x + torch.tensor([1.0] * 8, device=x.device)


def _one_hot(x: Tensor) -> Tensor:
    return x + F.one_hot(torch.arange(4, device=x.device), 8)


def _rows(x: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in x])


def _nothing(x: Tensor) -> Tensor:
    return torch.cat([x, torch.tensor([], device=x.device).view(0, 8)])  # as caches of keys begin


def _described(x: Tensor) -> Tensor:
    return x * torch.cuda.get_device_properties(0).multi_processor_count


def _counted(x: Tensor) -> Tensor:
    return x * torch.cuda.current_device() if torch.cuda.is_available() else x


@pytest.mark.parametrize("function", [_constant, _listed, _nothing, _one_hot, _rows, _described, _counted])
def test_functions_that_we_stand_in_for_are_torchs_to_a_compiler(
    gpu: VirtualGPU, function: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    out.sum().backward()
    assert (out.shape, out.device.type) == ((4, 8), "cuda") and x.grad is not None
    assert codes(gpu) == set()


def test_dynamos_table_of_functions_holds_torchs_own_wherever_it_is_made() -> None:
    trace_rules.get_torch_obj_rule_map.cache_clear()
    for _ in range(2):  # made in the first run, and used in the second
        with VirtualGPU("RTX 4090") as gpu:
            x = torch.randn(4, 8, device="cuda")
            for function in (_constant, _listed, _one_hot):
                torch._dynamo.reset()
                torch.compile(function, fullgraph=True, backend="aot_eager")(x)
        assert codes(gpu) == set()
    table = trace_rules.get_torch_obj_rule_map()
    assert {torch.tensor, torch.as_tensor, F.one_hot} <= table.keys()
    held = [getattr(getattr(one, "__code__", None), "co_filename", "") for one in table]
    assert not [file for file in held if file.startswith(OURS)], "something of ours stays"


def test_one_hot_that_a_program_has_taken_up_is_torchs_to_a_compiler(gpu: VirtualGPU) -> None:
    taken = F.one_hot
    out = torch.compile(lambda x: taken(x, 8), fullgraph=True, backend="aot_eager")(
        torch.arange(4, device="cuda")
    )
    assert out.shape == (4, 8) and codes(gpu) == set()


class Attention(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_checkpointed_attention_is_compiled_and_keeps_its_inputs(gpu: VirtualGPU, dropout: float) -> None:
    """Its kernel draws random numbers: AOTAutograd emits ``graphsafe_run_with_rng_state``."""
    blocks = nn.ModuleList(Attention() for _ in range(4)).to("cuda", torch.bfloat16)

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(lambda x, block=block: F.dropout(block(x), dropout), x, use_reentrant=False)
        return x

    x = torch.randn(4, 512, 256, device="cuda", dtype=torch.bfloat16)
    held = torch.cuda.memory_allocated()
    out = torch.compile(run, fullgraph=True)(x)
    kept = torch.cuda.memory_allocated() - held
    out.sum().backward()
    assert codes(gpu) == {"compiled-estimate"}
    nbytes = x.numel() * x.element_size()
    assert 4 * nbytes <= kept < 5 * nbytes + WORKSPACES
    assert all(parameter.grad is not None for parameter in blocks.parameters())


def test_an_operator_over_functions_without_a_rule_leaves_the_run_uncertain(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = torch.ops.higher_order.associative_scan
    dense = torch._C.DispatchKey.CompositeExplicitAutograd
    monkeypatch.delitem(scan.py_kernels, dense)
    x = torch.randn(8, 128, device="cuda")
    with torch.no_grad():
        (out,) = scan(lambda a, b: [a + b], [x], ())
    assert (out.shape, out.device.type) == (x.shape, "cuda")
    (warning,) = gpu.run.warnings
    assert warning.code == "op-without-rule" and "associative_scan" in warning.message
    found = verdict(gpu.run)
    assert not found.certain and not found.bounded


def test_what_ran_eagerly_is_not_certain_and_has_a_bar(gpu: VirtualGPU) -> None:
    @torch.compile(fullgraph=True)
    def loud(x: Tensor) -> Tensor:
        print("seen")
        return (x * 2).relu()

    weight = torch.randn(512, 512, device="cuda", requires_grad=True)
    loud(weight @ weight).sum().backward()
    found = verdict(gpu.run)
    held = found.device.breakdown.categories
    decided = held[Category.ACTIVATIONS] + held[Category.TEMPORARIES]
    assert not found.certain and found.within_bar and found.fits
    assert (found.device.error_below, found.device.error_above) == (decided * 2 // 3, decided // 4)
    bar = found.device.reserved_bar
    assert (bar.below, bar.above) == (decided * 2 // 3, decided // 4)


@pytest.mark.parametrize("graphs", [False, True])
def test_what_was_compiled_has_a_bar_and_is_certain_within_it(gpu: VirtualGPU, graphs: bool) -> None:
    model = Block().cuda()
    step(torch.compile(model, mode="reduce-overhead" if graphs else None), model)
    found = verdict(gpu.run)
    held = found.device.breakdown.categories
    decided = held[Category.ACTIVATIONS] + held[Category.TEMPORARIES]
    assert decided and found.certain and found.fits
    assert (found.device.error_below, found.device.error_above) == (decided // 32, decided // 32)
    bar = found.device.reserved_bar
    assert (bar.below, bar.above) == (decided // 8, decided // (2 if graphs else 8))


@pytest.mark.parametrize("beyond", [1 << 22, 1 << 33], ids=["by less than the bar", "by far"])
def test_compiled_code_that_runs_out_is_certain_only_beyond_its_bar(beyond: int) -> None:
    with pytest.raises(torch.OutOfMemoryError), VirtualGPU("RTX 4090") as gpu:
        model = Block().cuda()
        kept = torch.compile(model)(torch.randn(1 << 20, 512, device="cuda")).pow(2)
        torch.empty(torch.cuda.mem_get_info()[0] + beyond, dtype=torch.uint8, device="cuda")
        del kept
    found = verdict(gpu.run)
    assert found.fits is False and found.certain is (beyond > 1 << 32)


def test_products_are_tried_padded_while_they_are_compiled(gpu: VirtualGPU) -> None:
    """A vocabulary of 8,191 in half precision: both results and a padded weight, as recorded on cards."""
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.float16)
    weight = torch.randn(8191, 1024, device="cuda", dtype=torch.float16)
    before = torch.cuda.memory_allocated()
    compiled = torch.compile(lambda x: F.linear(x, weight))
    with torch.no_grad():
        assert compiled(x).shape == (4096, 8191)
    trace = gpu.trace
    sizes = [int(size) for size in trace.size[trace.kind == EventKind.ALLOC]]
    assert sizes.count(4096 * 8192 * 2) == 3 and sizes.count(8192 * 1024 * 2) == 3
    assert torch.cuda.memory_allocated() - before < WORKSPACES, "what was tried is gone"
    with torch.no_grad():
        compiled(x)
    again = gpu.trace
    assert int(((again.kind == EventKind.ALLOC) & (again.size == 4096 * 8192 * 2)).sum()) == 3, (
        "it is tried once"
    )


def test_the_compiler_may_be_reset_before_its_first_use() -> None:
    # In an interpreter of its own: torch 2.10 and 2.11 do not survive a second import of the module.
    code = (
        "import sys, torch._dynamo\n"
        "from vramfit import VirtualGPU\n"
        "sys.modules.pop('torch._inductor.cudagraph_trees', None)\n"
        "original = torch._dynamo.reset\n"
        "with VirtualGPU('H100'):\n"
        "    torch._dynamo.reset()\n"
        "assert 'torch._inductor.cudagraph_trees' in sys.modules\n"
        "assert torch._dynamo.reset is original\n"
    )
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_fuse_nothing_need_what_the_program_needs(gpu: VirtualGPU, backend: str) -> None:
    model = Block().cuda()
    assert step(torch.compile(model, backend=backend), model) == step(model, model)
    assert codes(gpu) == set(), "nothing of it is an estimate"


def test_kernels_that_would_be_timed_are_those_of_the_default_mode_and_a_warning_says_so(
    gpu: VirtualGPU,
) -> None:
    model = Block().cuda()
    usual = step(torch.compile(model), model)
    assert codes(gpu) == {"compiled-estimate"}
    torch._dynamo.reset()
    assert step(torch.compile(model, mode="max-autotune-no-cudagraphs"), model) == usual
    assert codes(gpu) == {"compiled-estimate", "compiled-autotune"}
    assert not verdict(gpu.run).certain, "no recording tells how far they are off"


def test_values_are_not_followed_through_compiled_programs(gpu: VirtualGPU) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(3, device="cuda")
    assert double(x).tolist() == [2.0, 2.0, 2.0] and codes(gpu) == set()
    assert len(torch.compile(double)(x).tolist()) == 3
    assert codes(gpu) == {"compiled-estimate", "guessed-value"}


def test_graph_breaks_new_shapes_and_disabled_functions(gpu: VirtualGPU) -> None:
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)

    @torch.compiler.disable
    def apart(x: Tensor) -> Tensor:
        return x.sin()

    @torch.compile
    def run(x: Tensor) -> Tensor:
        return apart((x @ weight).cos()) * 2

    for rows in (8, 16, 24):  # the second size makes it dynamic
        run(torch.randn(rows, 64, device="cuda")).sum().backward()
    assert weight.grad is not None and weight.grad.shape == (64, 64)
    trace = gpu.trace
    ops = {trace.ops[trace.op[row]] for row in range(len(trace.kind)) if trace.kind[row] == EventKind.ALLOC}
    assert "aten.sin" in ops, "not compiled"
    assert "inductor: mm" in ops


def test_what_cannot_be_compiled_runs_eagerly_and_says_why(
    gpu: VirtualGPU, capsys: pytest.CaptureFixture[str]
) -> None:
    @torch.compile(fullgraph=True)
    def loud(x: Tensor) -> Tensor:
        print("seen")
        return x * 2

    for _ in range(2):
        assert loud(torch.ones(3, device="cuda")).shape == (3,)
    assert capsys.readouterr().out == "seen\nseen\n"
    (warning,) = gpu.run.warnings
    assert warning.code == "compile-ran-eagerly"
    assert "print" in warning.message and "a card would raise this" in warning.message
    assert warning.location is not None and warning.location.startswith(__file__)


def test_an_optimizer_that_is_compiled_keeps_its_states(gpu: VirtualGPU) -> None:
    model = Block().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    update = torch.compile(optimizer.step)
    x = torch.randn(64, 512, device="cuda")
    for _ in range(2):
        model(x).sum().backward()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        update()
        extra = torch.cuda.max_memory_allocated() - held
        model.zero_grad()
    parameters = sum(p.numel() for p in model.parameters()) * 4
    categories = gpu.run.trace
    states = sum(
        int(categories.size[row])
        for row in range(len(categories.kind))
        if categories.kind[row] == EventKind.ALLOC and categories.category[row] == Category.OPTIMIZER_STATE
    )
    assert states >= 2 * parameters
    assert extra < parameters // 8, "a fused update needs no copies of the parameters"


def test_the_budget_for_activations_is_respected(gpu: VirtualGPU) -> None:
    from torch._functorch import config

    def saved(budget: float) -> int:
        model = Block().cuda()
        torch._dynamo.reset()
        x = torch.randn(2048, 512, device="cuda")
        before = torch.cuda.memory_allocated()
        with config.patch(activation_memory_budget=budget):
            y = torch.compile(model)(x)
        return torch.cuda.memory_allocated() - before - y.numel() * 4

    _ = torch.randn(8, 8, device="cuda") @ torch.randn(8, 8, device="cuda")  # cuBLAS takes its workspace
    assert saved(0.0) < saved(1.0)


def test_reduced_overhead_keeps_its_memory_in_a_pool(gpu: VirtualGPU) -> None:
    model = Block().cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(3):
        compiled(torch.randn(1024, 512, device="cuda")).sum().backward()
        model.zero_grad()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    assert len(pools) == 2 and (0, 0) in pools
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    ours = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )
    assert 0 < ours <= torch.cuda.memory_reserved() <= held


def test_a_compiled_program_runs_out_at_its_own_line() -> None:
    with VirtualGPU("1GiB", alloc_conf="", context_bytes=0) as small:
        model = Block().cuda()
        compiled = torch.compile(model)
        with pytest.raises(torch.OutOfMemoryError):
            compiled(torch.randn(200_000, 512, device="cuda"))
        report = small.run.oom
    assert report is not None and report.op.startswith("inductor: ")
    assert report.user_line is not None and report.user_line.filename == __file__
    assert report.user_line.name == "forward"


def test_flex_attention_makes_no_scores_when_compiled(gpu: VirtualGPU) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    mask = create_block_mask(causal, None, None, 1024, 1024, device="cuda")
    query, key, value = (
        torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    before = torch.cuda.memory_allocated()
    out = torch.compile(flex_attention)(query, key, value, block_mask=mask)
    logsumexp = 2 * 8 * 1024 * 4
    assert torch.cuda.memory_allocated() - before == out.numel() * 2 + logsumexp
    torch.cuda.reset_peak_memory_stats()
    out.sum().backward()
    scores = 2 * 8 * 1024 * 1024 * 2
    assert torch.cuda.max_memory_allocated() - before < scores
    assert codes(gpu) == {"compiled-estimate"}


def test_the_host_computes_for_real(gpu: VirtualGPU) -> None:
    @torch.compile
    def total(x: Tensor) -> Tensor:
        return (x + 1).square().sum()

    assert total(torch.arange(3.0)).item() == 14.0


def test_the_next_card_of_a_process_compiles_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[GraphLowering] = []
    codegen = GraphLowering.codegen

    def counted(self: GraphLowering) -> Any:
        written.append(self)
        return codegen(self)

    def traced(card: str, width: int) -> tuple[Any, ...]:
        with VirtualGPU(card) as gpu:
            model = Block(width).cuda()
            compiled = torch.compile(model)
            for _ in range(2):
                compiled(torch.randn(96, width, device="cuda")).sum().backward()
        run, trace = gpu.run, gpu.trace
        lines = [user_frame([trace.frames[i] for i in trace.stacks[stack]]) for stack in trace.stack]
        return run.warnings, list(trace.address), list(trace.size), [trace.ops[op] for op in trace.op], lines

    CacheBase.get_system.cache_clear()
    here = CacheBase.get_system()
    CacheBase.get_system.cache_clear()
    monkeypatch.setattr(GraphLowering, "codegen", counted)
    before = traced("RTX 4090", 224)
    assert len(written) == 2
    assert traced("RTX 4090", 224) == before and before[0]
    assert len(written) == 2, "the forward and the backward pass were known"
    traced("RTX 4090", 192)
    traced("H100 80GB SXM", 192)
    assert len(written) == 6, "other sizes and other cards are compiled for by themselves"
    assert CacheBase.get_system() == here, "torch's own cache knows nothing of cards that are gone"


def test_constants_that_a_compiler_meets_lie_on_the_card(gpu: VirtualGPU) -> None:
    """As decompositions of torch's own make them (torch/_inductor/decomposition.py: ``scalar_tensor``, since 2.14)."""
    library = torch.library.Library("vramfit_constants", "DEF")
    library.define("scaled(Tensor x) -> Tensor")

    def scaled(x: Tensor) -> Tensor:
        return x * torch.tensor(2.0, device=x.device) + torch.tensor([1.0, 2.0], device=x.device)

    library.impl("scaled", scaled, "CompositeImplicitAutograd")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = torch.compile(lambda x: torch.ops.vramfit_constants.scaled(x))(
                torch.ones(3, 2, device="cuda")
            )
    finally:
        library._destroy()
    assert (out.shape, out.device.type) == ((3, 2), "cuda")
    assert [warned.code for warned in gpu.run.warnings] == ["compiled-estimate"]
