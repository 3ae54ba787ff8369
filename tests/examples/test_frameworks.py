"""Scripts of other frameworks run unmodified, and hold on the card what those frameworks' own arithmetic says.

Every figure below is worked out from the shapes in a script and from how its framework stores things; what the
allocator adds is the rounding of a block to 512 bytes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout
from framework_cases import GROUPS, TRL
from tests import warm

SCRIPTS = Path(__file__).parents[2] / "examples" / "frameworks"
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}
MIB = 1 << 20
SEARCHES = {"trainer-search", "accelerate-search"}
GENERATES = ("big-model", "generate", "quantized", "graphs-inference")


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the cases leave their reports; one for all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "frameworks"
    folder.mkdir(exist_ok=True)
    return folder


def run_group(group: str, folder: Path, *, wait: bool) -> bool:
    """Run the scripts of a group in one interpreter, unless another process of this test run has.

    Returns:
        whether it is done; not if another process is at it and this one does not wait.
    """
    cases = folder / f"{group}.cases"
    try:
        with FileLock(folder / f"{group}.lock", timeout=-1 if wait else 0):
            if not cases.exists():
                _run_scripts(group, folder, cases)
    except Timeout:
        return False
    return True


def _run_scripts(group: str, folder: Path, cases: Path) -> None:
    cases.write_text(
        json.dumps(
            [
                {
                    "name": name,
                    "script": str(SCRIPTS / f"{case.script}.py"),
                    "arguments": case.arguments.split(),
                    "gpu": case.gpu,
                    "compiles": case.compiles,
                }
                for name, case in GROUPS[group].items()
            ]
        ),
        encoding="utf-8",
    )
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("CUBLAS", "PYTORCH"))
    }
    done = warm.run(
        [sys.executable, str(Path(__file__).with_name("framework_runs.py")), str(cases), str(folder)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    (folder / f"{group}.errors").write_text(done.stderr, encoding="utf-8")


def report(results: Path, name: str) -> dict[str, Any]:
    """What a case left."""
    group = next(group for group, cases in GROUPS.items() if name in cases)
    if not run_group(group, results, wait=False):
        for other in GROUPS:  # rather than idle while another process is at ours
            run_group(other, results, wait=False)
        run_group(group, results, wait=True)
    target = results / f"{name}.json"
    assert target.exists(), (results / f"{group}.errors").read_text(encoding="utf-8")[-2000:]
    found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return found


def figure(output: str, pattern: str) -> float:
    """The number that a pattern captures in what a script printed."""
    found = re.search(pattern, output)
    assert found is not None, output
    return float(found.group(1).replace(",", ""))


def blocks(sizes: list[int], itemsize: int = 4) -> int:
    """Bytes of one tensor for each number of elements, each in a block of its own."""
    return sum(-(-size * itemsize // 512) * 512 for size in sizes)


def mib(nbytes: float) -> float:
    return round(nbytes / MIB, 2)


def kept_by_forward(run: dict[str, Any]) -> int:
    """Bytes that the last forward pass before a backward pass left on the card."""
    phases = run["phases"]
    last = max(index for index, phase in enumerate(phases) if phase["part"] == "backward") - 1
    return int(phases[last]["end_allocated_bytes"] - phases[last]["start_allocated_bytes"])


# Elements of each parameter, from the shapes in the scripts.
QWEN = [1000 * 128, 128] + 4 * (
    2 * [128 * 128] + 2 * [64 * 128] + [128, 64, 64] + 3 * [128 * 512] + 2 * [128]
)
QWEN_MATRICES = [(1000, 128)] + 4 * (2 * [(128, 128)] + 2 * [(64, 128)] + 2 * [(512, 128)] + [(128, 512)])
QWEN_VECTORS = [128] + 4 * [128, 64, 64, 128, 128]
VIT = [128, 17 * 128, 128 * 3 * 256, 128, 128, 128, 100 * 128, 100] + 2 * (
    4 * [128 * 128, 128] + 4 * [128] + [128 * 512, 512, 512 * 128, 128]
)
TRANSFORMER = [512 * 128, 128 * 128, 384 * 128, 384, 128 * 128, 128, 512 * 128, 512, 128 * 512, 128]
TRANSFORMER += 4 * [128] + [512 * 128]
SMALL = [size for size in TRANSFORMER if size < 4096]
LLAMA_ROWS = [(256, 256), (128, 256), (128, 256), (256, 256), (1024, 256), (1024, 256), (256, 1024)]
LLAMA_REST = 2 * 16 * MIB + 5 * 512 + 2 * 512  # embeddings and head, norms, frequencies
QLORA_ADAPTERS = [128 * side for sides in 2 * LLAMA_ROWS for side in sides]  # of rank 128, float32


def low_bit(sizes: list[int], bits: int, block_size: int, table: int) -> int:
    """Two states of each parameter as torchao.optim keeps them: codes, a scale per block, a table of values.

    Parameters of fewer than 4096 elements keep float32 (torchao/optim/adam.py, ``_new_buffer``).
    """
    total = 0
    for size in sizes:
        if size >= 4096 and size % block_size == 0:
            total += 2 * (blocks([size * bits // 8], 1) + blocks([size // block_size]) + table)
        else:
            total += 2 * blocks([size])
    return total


def test_every_script_has_a_case_and_knows_nothing_of_vramfit() -> None:
    named = {case.script for case in (*CASES.values(), *TRL.values())}
    assert named == {script.stem for script in SCRIPTS.glob("*.py")}
    for script in SCRIPTS.glob("*.py"):
        source = script.read_text(encoding="utf-8")
        assert "vramfit" not in source.lower()
        assert '"--seed"' in source and "--batch-size" in source and source.startswith('"""')


@pytest.mark.parametrize("name", CASES)
def test_a_script_runs_to_its_end(results: Path, name: str) -> None:
    run = report(results, name)
    assert run["traceback"] is None, run["traceback"]
    assert run["fits"] is True
    if name in SEARCHES:
        assert run["oom"]["handled"]
    else:
        assert run["oom"] is None
    assert sum(run["categories"].values()) == run["peak"]["allocated_bytes"] > 0
    assert "op-without-rule" not in {warning["code"] for warning in run["warnings"]}
    trains = not name.startswith(GENERATES) and name != "graphs-pool"
    parts = {phase["part"] for phase in run["phases"]}
    assert parts >= ({"forward", "backward", "optimizer"} if trains else {"forward"})


class TestTrainer:
    def test_adamw_holds_two_states_and_a_step_for_each_parameter(self, results: Path) -> None:
        categories = report(results, "trainer")["categories"]
        assert categories["gradients"] == blocks(QWEN)
        assert categories["parameters"] == blocks(QWEN) + 2 * 512  # with the rotary frequencies
        assert categories["optimizer_state"] == 2 * blocks(QWEN) + 512 * len(QWEN)  # fused: steps on the card

    def test_adafactor_holds_rows_and_columns(self, results: Path) -> None:
        factors = [side for shape in QWEN_MATRICES for side in shape]
        held = report(results, "trainer-fp16-adafactor")["categories"]["optimizer_state"]
        # Matrices keep the means of rows and columns, vectors all values, and each its root mean square.
        assert held == blocks(factors) + blocks(QWEN_VECTORS) + 512 * len(QWEN)

    def test_gradient_checkpointing_keeps_one_tensor_per_layer(self, results: Path) -> None:
        plain, checkpointed = report(results, "trainer"), report(results, "trainer-checkpointing")
        assert kept_by_forward(checkpointed) < kept_by_forward(plain) / 2
        assert checkpointed["peak"]["allocated_bytes"] < plain["peak"]["allocated_bytes"]

    def test_a_batch_that_fits_is_found(self, results: Path) -> None:
        assert figure(report(results, "trainer-search")["output"], r"batch (\d+)\n") < 18


class TestAccelerate:
    @pytest.mark.parametrize("name", ["accelerate", "accelerate-fp16"])
    def test_states(self, results: Path, name: str) -> None:
        categories = report(results, name)["categories"]
        assert categories["parameters"] == categories["gradients"] == blocks(VIT)
        assert categories["optimizer_state"] == 2 * blocks(VIT)

    def test_a_batch_that_fits_is_found(self, results: Path) -> None:
        output = report(results, "accelerate-search")["output"]
        tried = [int(size) for size in re.findall(r"trying batch (\d+)", output)]
        assert len(tried) > 1 and tried[0] == 120
        assert all(after == int(before * 0.9) for before, after in pairwise(tried))
        assert figure(output, r"batch (\d+) fits") == tried[-1]

    def test_a_model_is_spread_over_card_and_host(self, results: Path) -> None:
        run = report(results, "big-model")
        assert "4 of 10 parts on the card" in run["output"]  # the embeddings and three layers
        layer = blocks(4 * [256 * 256] + 3 * [256 * 1024] + 2 * [256], 2)
        assert figure(run["output"], r"weights on the card ([\d.]+)") == mib(16 * MIB + 3 * layer)

    def test_a_model_on_the_host_leaves_the_card_empty(self, results: Path) -> None:
        run = report(results, "big-model-host")
        assert "weights on the card 0.00 MiB" in run["output"]
        assert 16 * MIB < run["peak"]["allocated_bytes"] < 32 * MIB  # one of the two largest at a time


class TestGenerate:
    # Bytes of keys and values of one token: 2 of them, 2 layers, batch 2, 4 heads of 32 elements, bfloat16.
    TOKEN = 2 * 2 * 2 * 4 * 32 * 2
    TOKENS = 48 + 4 - 1  # the last new token is never fed back

    def cache(self, run: dict[str, Any], name: str) -> float:
        return figure(run["output"], rf"{name} +\w+ +4 new tokens, cache +([\d.]+) MiB")

    def test_caches_hold_what_their_shapes_say(self, results: Path) -> None:
        run = report(results, "generate")
        held = {
            "dynamic": self.TOKENS * self.TOKEN,
            "static": (self.TOKENS + 1) * self.TOKEN,
            "offloaded": self.TOKENS * self.TOKEN / 2,  # one layer at a time
            "quantized": self.TOKENS * self.TOKEN / 2,  # float8
            "sliding": (16 - 1) * self.TOKEN,
            "none": 0,
        }
        for name, nbytes in held.items():
            assert self.cache(run, name) == round(nbytes / MIB, 3), name

    def test_beams_multiply_the_cache(self, results: Path) -> None:
        run = report(results, "generate-beams")
        assert self.cache(run, "dynamic") == round(4 * self.TOKENS * self.TOKEN / MIB, 3)
        assert self.cache(run, "quantized") == round(2 * self.TOKENS * self.TOKEN / MIB, 3)

    def test_sampling_and_assistants_hold_no_other_cache(self, results: Path) -> None:
        sampled, assisted = report(results, "generate-sample"), report(results, "generate-assisted")
        assert self.cache(sampled, "dynamic") == round(self.TOKENS * self.TOKEN / MIB, 3)
        assert self.cache(sampled, "static") == round((self.TOKENS + 1) * self.TOKEN / MIB, 3)
        assert self.cache(assisted, "dynamic") == round(self.TOKENS * self.TOKEN / 2 / MIB, 3)  # one prompt


class TestPeft:
    ADAPTERS = 2 * sum(16 * (rows + columns) for rows, columns in LLAMA_ROWS[:4])  # of rank 16, in two layers
    MAGNITUDES = 2 * sum(rows for rows, _ in LLAMA_ROWS[:4])

    @pytest.mark.parametrize(
        ("name", "count"), [("lora", ADAPTERS), ("lora-int8", ADAPTERS), ("dora", ADAPTERS + MAGNITUDES)]
    )
    def test_only_the_adapters_are_trained(self, results: Path, name: str, count: int) -> None:
        run = report(results, name)
        assert f"trainable params: {count:,} ||" in run["output"]
        assert run["categories"]["optimizer_state"] == 8 * count  # every adapter fills whole blocks

    def test_adapters_need_less_than_the_whole(self, results: Path) -> None:
        peaks = [report(results, name)["peak"]["allocated_bytes"] for name in ("lora-int8", "lora", "full")]
        assert peaks == sorted(peaks) and peaks[2] > 2 * peaks[1]


class TestQlora:
    """bitsandbytes/functional.py (``quantize_4bit``), its optim/optimizer.py, and torchao's nf4_tensor.py."""

    REST = 2 * blocks([32000 * 256], 2) + 5 * 512 + 2 * 512  # embeddings and head, norms, frequencies

    @staticmethod
    def four_bit(n: int) -> int:
        """A weight of ``n`` elements: packed, scales of 64 of a byte, their own scales of 256, two tables, a mean."""
        scales = n // 64
        return blocks([n // 2, scales, 4 * -(-scales // 256), 16 * 4, 256 * 4, 4], 1)

    @pytest.mark.parametrize(
        ("base", "held"),
        [
            ("nf4", lambda rows, columns: TestQlora.four_bit(rows * columns)),
            ("fp4", lambda rows, columns: TestQlora.four_bit(rows * columns)),
            ("int8", lambda rows, columns: blocks([rows * columns, 4 * rows], 1)),
            (
                "torchao-nf4",  # a factor for 256 scales, in the type of the weight, as are the mean and the table
                lambda rows, columns: blocks(
                    [rows * columns // 2, rows * columns // 64, rows * columns // 64 // 256 * 2, 2, 16 * 2], 1
                ),
            ),
        ],
    )
    def test_the_base_keeps_its_packed_weights(
        self, results: Path, base: str, held: Callable[[int, int], int]
    ) -> None:
        run = report(results, f"qlora-{base}")
        expected = self.REST + sum(held(rows, columns) for rows, columns in 2 * LLAMA_ROWS)
        if base in ("nf4", "fp4"):
            expected += 256 * 4  # bitsandbytes keeps one table for scales per process
        assert figure(run["output"], r"base (\d+) bytes") == expected
        assert f"trainable params: {sum(QLORA_ADAPTERS):,} ||" in run["output"]

    def test_states_lie_where_the_optimizer_puts_them(self, results: Path) -> None:
        states = {
            name: report(results, f"qlora-{name}")["categories"]["optimizer_state"]
            for name in ("nf4", "fp4", "int8")
        }
        assert states["int8"] == 2 * blocks(QLORA_ADAPTERS)
        # paged: those of 100,000 elements or more are managed memory, none of PyTorch's
        assert states["nf4"] == 2 * blocks([size for size in QLORA_ADAPTERS if size < 100_000])
        # eight bits: a byte each, a scale for 256, and two tables for all
        codes = blocks(QLORA_ADAPTERS, 1) + blocks([size // 256 for size in QLORA_ADAPTERS])
        assert 0 <= states["fp4"] - 2 * codes <= 2 * 1024
        paged = {warning["code"] for warning in report(results, "qlora-nf4")["warnings"]}
        assert "managed-memory" in paged

    def test_a_smaller_base_needs_less(self, results: Path) -> None:
        peaks = [
            report(results, f"qlora-{name}")["categories"]["parameters"]
            for name in ("torchao-nf4", "nf4", "int8")
        ]
        assert peaks == sorted(peaks)


class TestTorchao:
    def weights(self, results: Path, method: str) -> float:
        return figure(report(results, f"quantized-{method}")["output"], r"and ([\d.]+) MiB after, by torch\n")

    def test_quantised_weights(self, results: Path) -> None:
        layers = 2 * LLAMA_ROWS
        codes = blocks([rows * columns for rows, columns in layers], 1)
        scales = blocks([rows for rows, _ in layers])
        zeros = blocks([rows for rows, _ in layers], 1)
        assert self.weights(results, "int8") == mib(LLAMA_REST + codes + scales + zeros)
        assert self.weights(results, "int8-dynamic") == mib(LLAMA_REST + codes + scales + zeros)
        assert self.weights(results, "float8-dynamic") == mib(LLAMA_REST + codes + scales)

    def test_four_bit_weights_are_padded_to_tiles(self, results: Path) -> None:
        packed = sum(rows * 1024 // 2 for rows, _ in 2 * LLAMA_ROWS)  # all have at most 1024 columns
        scales_and_zeros = sum(rows * 1024 // 128 * 2 * 2 for rows, _ in 2 * LLAMA_ROWS)
        assert self.weights(results, "int4") == mib(LLAMA_REST + packed + scales_and_zeros)

    @pytest.mark.parametrize(
        ("name", "held"),
        [
            ("adamw", 2 * blocks(TRANSFORMER)),
            ("adamw8bit", low_bit(TRANSFORMER, 8, 256, 1024)),
            ("adamw4bit", low_bit(TRANSFORMER, 4, 128, 512)),
            ("adamwfp8", low_bit(TRANSFORMER, 8, 256, 0)),
            ("adamw-bf16", 2 * blocks(TRANSFORMER, 2)),
            ("offload", 2 * blocks(SMALL) + 512 * len(SMALL)),  # fused: with steps on the card
        ],
    )
    def test_optimizer_states(self, results: Path, name: str, held: int) -> None:
        run = report(results, f"optimizer-{name}")
        assert run["categories"]["optimizer_state"] == held

    def test_an_offloaded_optimizer_pins_parameters_and_gradients(self, results: Path) -> None:
        pinned = sum(2 << (4 * size - 1).bit_length() for size in TRANSFORMER if size >= 4096)
        output = report(results, "optimizer-offload")["output"]
        assert figure(output, r"pinned on the host ([\d.]+)") == mib(pinned)


class TestTorch:
    # One activation of the residual stream: 2 sequences of 64 tokens, 128 wide; four layers.
    TOKENS = 2 * 64
    STREAM = TOKENS * 128 * 4

    def kept(self, results: Path, way: str) -> float:
        return figure(report(results, "activations")["output"], rf"\n{way} +kept +([\d.]+) MiB")

    def test_checkpointing_keeps_the_input_of_each_layer(self, results: Path) -> None:
        assert self.kept(results, "checkpoint") == mib(4 * self.STREAM)
        assert self.kept(results, "checkpoint-reentrant") == mib(4 * self.STREAM)

    def test_selective_checkpointing_keeps_the_products_too(self, results: Path) -> None:
        products = self.TOKENS * (3 + 1 + 4 + 1) * 128 * 2
        assert self.kept(results, "selective") == mib(4 * (self.STREAM + products))

    def test_offloading_keeps_nothing_on_the_card(self, results: Path) -> None:
        output = report(results, "activations")["output"]
        assert self.kept(results, "offload") == self.kept(results, "offload-pageable") == 0
        assert figure(output, r"\noffload .*pinned on the host +([\d.]+)") >= self.kept(results, "plain")
        assert figure(output, r"\noffload-pageable .*pinned on the host +([\d.]+)") == 0

    def test_channels_last_is_kept_through_the_network(self, results: Path) -> None:
        shapes = [(8, 16), (16, 8), (32, 4), (32, 2)]  # channels and side after each convolution
        last = " ".join(str((c * s * s, 1, s * c, c)) for c, s in shapes)
        first = " ".join(str((c * s * s, s * s, s, 1)) for c, s in shapes)
        assert f"activation strides {last}\n" in report(results, "channels-last")["output"]
        assert f"activation strides {first}\n" in report(results, "contiguous")["output"]

    def test_parametrizations_are_trained_and_baked_in(self, results: Path) -> None:
        output = report(results, "channels-last")["output"]
        convolutions = 9 * (3 * 8 + 8 * 16 + 16 * 32 + 32 * 32) + 2 * (8 + 16 + 32 + 32)
        assert f"{convolutions + 33 * 32 + 33 * 10} parameters once" in output

    def test_a_graph_replays_without_new_memory(self, results: Path) -> None:
        output = report(results, "graphs-graph")["output"]
        assert "replays took 0.00 MiB more" in output
        # Gradients of two 4 MiB matrices, the optimizer's temporaries and small blocks: whole segments of their own.
        assert figure(output, r"pool holds ([\d.]+)") >= 2 * 20 + 2

    def test_graphs_that_share_a_pool_reuse_it(self, results: Path) -> None:
        output = report(results, "graphs-inference")["output"]
        assert len(set(re.findall(r"batch \d+: ([\d.]+) MiB reserved", output))) == 1

    def test_a_pool_holds_segments_of_its_own(self, results: Path) -> None:
        # Two matrices of 4 MiB share a segment of 20 MiB; biases and the head share one of 2 MiB.
        assert "the pool holds 22.00 MiB in 2 segments" in report(results, "graphs-pool")["output"]


class TestLightning:
    def test_momentum_is_as_large_as_the_gradients(self, results: Path) -> None:
        run = report(results, "lightning")
        assert run["categories"]["optimizer_state"] == run["categories"]["gradients"] > 0
        assert any(change["path"].endswith(".ckpt") for change in run["files"]["changes"])
        assert "'val_loss'" in run["output"]  # validated from its best checkpoint


class TestMonai:
    def test_stitching_on_the_host_spares_the_card(self, results: Path) -> None:
        pattern = r"peak memory of validation ([\d.]+)"
        on_card, on_host = (
            figure(report(results, name)["output"], pattern) for name in ("monai", "monai-host")
        )
        assert on_host < on_card


class TestDiffusers:
    def test_an_average_is_one_more_copy(self, results: Path) -> None:
        plain, averaged = report(results, "diffusers"), report(results, "diffusers-ema")
        unet = report(results, "diffusers-checkpointing")["categories"]["gradients"]
        assert averaged["peak"]["allocated_bytes"] - plain["peak"]["allocated_bytes"] == unet > 3 * 10**6

    def test_gradient_checkpointing(self, results: Path) -> None:
        plain, checkpointed = report(results, "diffusers"), report(results, "diffusers-checkpointing")
        spared = kept_by_forward(plain) - kept_by_forward(checkpointed)
        assert spared > plain["categories"]["activations"] / 2

    def test_slices_and_tiles_are_decoded_with_less(self, results: Path) -> None:
        pattern = r"decoded, peak memory ([\d.]+)"
        whole, pieces = (
            figure(report(results, name)["output"], pattern) for name in ("diffusers", "diffusers-ema")
        )
        assert pieces < whole
