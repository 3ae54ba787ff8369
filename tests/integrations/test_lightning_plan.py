from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.integrations.training import check_same, check_trained, plan_with
from tests.virtual.conftest import fit_interpreter  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader

from vramfit import Plan, VirtualGPU, lightning_workload
from vramfit.errors import UsageError

lightning = pytest.importorskip("lightning")

from vramfit.integrations.lightning import PlanCallback  # noqa: E402  # it needs lightning

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises on data loaders, logging and devices

VOCABULARY = 96
CHECKPOINTING: Mapping[str, Any] = {}
PIECES = {"count": 3}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Speaker(lightning.LightningModule):
    """A small language model; some labels of each batch do not count, another number in every example."""

    def __init__(
        self, dropout: float = 0.0, width: int = 16, blocks: int = 2, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)
        self.seen: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("examples", float(len(batch["tokens"])), reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss, "tokens": batch["tokens"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))
        self.seen.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.25)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def examples(count: int = 17, length: int = 8, vocabulary: int = VOCABULARY) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(5))
    labels = tokens.roll(-1, 1)
    for number, row in enumerate(labels):
        row[: number % (length - 1)] = -100
    return [{"tokens": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]


def fit(
    module: Any,
    plan: Plan | Path | None = None,
    *,
    batch_size: int = 6,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """Train on 17 examples: the last batch is smaller, and can be cut into unequal pieces alone."""
    callbacks, rows = options.pop("callbacks", []), options.pop("rows", None) or examples()
    if plan is not None:
        callbacks = [PlanCallback(plan), *callbacks]
    options = {"max_epochs": 2, "gradient_clip_val": 0.5, "accelerator": "cpu", **options}
    trainer = lightning.Trainer(
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=options.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    torch.manual_seed(7)
    trainer.fit(module, DataLoader(rows, batch_size=batch_size), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return trainer


def trained(plan: Plan | None = None, *, dropout: float = 0.0, **options: Any) -> Speaker:
    module = Speaker(dropout)
    before = copy.deepcopy(module.state_dict())
    fit(module, plan, **options)
    check_trained(before, module.state_dict())
    return module


# -- the same training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (plan_with(micro_batching=PIECES, activation_checkpointing=CHECKPOINTING), {}),
        (
            plan_with(micro_batching={"count": 2}, chunked_loss={"chunk_rows": 5}),
            {"accumulate_grad_batches": 2},
        ),
        (
            plan_with(micro_batching={"count": 6}),
            {"precision": "64-true", "gradient_clip_algorithm": "value"},
        ),
    ],
    ids=["checkpointing", "chunked-loss", "float64"],
)
def test_micro_batches_train_as_the_whole_batch(plan: Plan, options: dict[str, Any]) -> None:
    expected, found = trained(**options), trained(plan, **options)
    check_same(found.state_dict(), expected.state_dict(), exact=False)
    assert found.seen == pytest.approx(expected.seen, rel=1e-5)


def test_checkpointing_alone_draws_the_same_dropout_and_changes_no_bit() -> None:
    plan = plan_with(activation_checkpointing=CHECKPOINTING)
    expected, found = trained(dropout=0.2), trained(plan, dropout=0.2)
    check_same(found.state_dict(), expected.state_dict(), exact=True)
    assert found.seen == expected.seen


def by_hand(plan: Plan) -> Speaker:
    """The same training by a loop of one's own, with the plan."""
    module = Speaker()
    made = module.configure_optimizers()
    torch.manual_seed(7)
    plan.apply(module, made["optimizer"])
    names = [choice.name for choice in plan.choices]
    for _ in range(2):
        for batch in DataLoader(examples(), batch_size=6):  # type: ignore[arg-type]
            for piece in plan.split(batch):
                logits = module(piece["tokens"]).flatten(0, 1)
                plan.backward(F.cross_entropy(logits, piece["labels"].flatten()))
            plan.step(clip_norm=None if "step-in-backward" in names else 0.5)
            made["lr_scheduler"]["scheduler"].step()
    plan.undo(module)
    return module


@pytest.mark.parametrize(
    "techniques",
    [
        {"low_bit_optimizer": {"block_size": 16}},
        {"lean_optimizer": {"kind": "adafactor"}},
        {"lean_optimizer": {"kind": "sgd"}, "step_in_backward": {}},
        {"mixed_precision": {"dtype": "float16", "initial_scale": 2.0**21}},
        {"low_precision_training": {}},
    ],
    ids=lambda techniques: "+".join(techniques),
)
def test_exchanged_optimizers_and_scaled_losses_train_as_in_a_loop_of_ones_own(
    techniques: dict[str, Any],
) -> None:
    """They follow the schedule, clip the true gradients, and leave out the first steps, whose scale is too large."""
    if "low_bit_optimizer" in techniques:
        pytest.importorskip("torchao")
    options: dict[str, Any] = {}
    if "step_in_backward" in techniques:
        options["gradient_clip_val"] = None
    else:
        techniques = {"micro_batching": PIECES, **techniques}
    plan = plan_with(**techniques)
    expected = by_hand(plan)
    found = trained(plan, **options)
    check_same(found.state_dict(), expected.state_dict(), exact=True)


# -- checkpoints, and the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("techniques", "later"),
    [
        ({"activation_checkpointing": CHECKPOINTING}, False),
        ({"low_bit_optimizer": {"block_size": 16}}, False),
        ({"lean_optimizer": {"kind": "adafactor"}}, False),
        ({"lean_optimizer": {"kind": "adafactor"}}, True),
        ({"mixed_precision": {"dtype": "float16"}}, False),
        ({"low_precision_training": {"master": "float32"}}, False),
        ({"low_precision_training": {"master": "float32"}}, True),
    ],
    ids=lambda value: (
        "+".join(value) if isinstance(value, dict) else "after-the-fit" if value else "in-the-fit"
    ),
)
def test_a_fit_goes_on_from_a_checkpoint(tmp_path: Path, techniques: dict[str, Any], later: bool) -> None:
    if "low_bit_optimizer" in techniques:
        pytest.importorskip("torchao")
    plan = plan_with(micro_batching=PIECES, **techniques)
    whole = Speaker()
    fit(whole, plan)
    half, path = Speaker(), tmp_path / "half.ckpt"

    class Save(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if not later:
                trainer.save_checkpoint(path)

    trainer = fit(half, plan, max_epochs=1, callbacks=[Save()])
    if later:
        trainer.save_checkpoint(path)
    assert list(torch.load(path, weights_only=False)["state_dict"]) == list(Speaker().state_dict())
    resumed = Speaker()
    fit(resumed, plan, ckpt_path=path)
    check_same(resumed.state_dict(), whole.state_dict(), exact=True)


def plain(module: Any) -> bool:
    """Whether nothing of a plan is left on a module."""
    names = {"optimizer_zero_grad", "log", "training_step"}
    return not names & set(vars(module)) and not any(
        name.startswith("_vramfit") for part in module.modules() for name in vars(part)
    )


def test_everything_is_as_before_after_the_fit(tmp_path: Path) -> None:
    plan_with(micro_batching=PIECES, activation_checkpointing={}, lean_optimizer={}).save(
        tmp_path / "plan.toml"
    )
    module = Speaker()
    inside: list[bool] = []

    class Look(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            inside.append(plain(module))

    strategy_before = set(vars(fit(Speaker()).strategy))
    callback = PlanCallback(tmp_path / "plan.toml")
    for _ in range(2):  # the same callback serves another fit
        trainer = fit(module, callbacks=[callback, Look()])
        assert inside and not any(inside)
        assert plain(module)
        assert set(vars(trainer.strategy)) == strategy_before
        assert all(parameter.grad is None for parameter in module.parameters())
        assert type(trainer.optimizers[0]) is torch.optim.Adafactor  # for a checkpoint that is saved now
        assert "step" not in vars(trainer.optimizers[0]) or hasattr(
            trainer.optimizers[0].step, "_wrapped_by_lr_sched"
        )


def test_a_fit_that_fails_leaves_nothing_behind() -> None:
    class Failing(Speaker):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and float(batch["tokens"][0, 0]) == 19.0:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    module = Failing()
    rows = examples()
    rows[8]["tokens"][0] = 19  # the second piece of the second batch
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(module, plan_with(micro_batching=PIECES, activation_checkpointing={}), rows=rows)
    assert plain(module)


def test_pieces_are_logged_as_one_batch_and_steps_are_counted_once() -> None:
    seen: list[tuple[str, Any]] = []

    class Hooks(lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])
            seen.append(("norm", float(norm)))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(("examples", float(trainer.callback_metrics["examples"])))
            seen.append(("loss", float(trainer.callback_metrics["loss_epoch"])))
            seen.append(("steps", trainer.global_step))

    found = []
    for plan in (None, plan_with(micro_batching=PIECES)):
        seen = []
        fit(Speaker(), plan, callbacks=[Hooks()])
        found.append(seen)
    assert ("examples", 17.0) in found[0]
    assert [name for name, _ in found[1]] == [name for name, _ in found[0]]
    assert [value for _, value in found[1]] == pytest.approx([value for _, value in found[0]], rel=1e-5)


def test_a_batch_that_is_skipped_moves_nothing() -> None:
    class Skipping(Speaker):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs == {}

    module = Skipping()
    before = copy.deepcopy(module.state_dict())
    fit(module, plan_with(micro_batching=PIECES, mixed_precision={"dtype": "float16"}))
    check_same(module.state_dict(), before, exact=True)


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_fit_on_the_virtual_gpu_needs_what_the_plan_says() -> None:
    """To the byte, but for the batch, which Lightning holds as a whole, and its own counters."""
    plan = plan_with(
        micro_batching={"count": 2}, activation_checkpointing={}, chunked_loss={"chunk_rows": 256}
    )
    rows = examples(16, 128, 2048)

    def module() -> Speaker:
        return Speaker(width=32, blocks=3, vocabulary=2048)

    def peak(plan: Plan | None) -> int:
        with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0):
            fit(
                module(),
                plan,
                rows=rows,
                batch_size=16,
                max_epochs=2,
                accelerator="gpu",
                gradient_clip_val=None,
            )
            return torch.cuda.max_memory_allocated()

    quiet = module()
    quiet.log = lambda *_, **__: None  # type: ignore[method-assign]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    workload = plan.apply(lightning_workload(quiet, batch))
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0):
        state = workload.start("cuda")
        for _ in range(2):
            workload.run_step(state, workload.sizes)
        planned = torch.cuda.max_memory_allocated()
    held = sum(tensor.nbytes for tensor in batch.values()) + 16 * 1024
    plain, found = peak(None), peak(plan)
    assert planned <= found <= planned + held
    assert found < 0.4 * plain


# -- what cannot go together ------------------------------------------------------------------------------------


class ByHand(Speaker):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Idle(Speaker):
    def configure_optimizers(self) -> Any:
        return None


class Lines(Speaker):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Fetching(Speaker):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class Clipping(Speaker):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError


def wrapping() -> Any:
    class Wrapping(lightning.pytorch.strategies.SingleDeviceStrategy):
        def _setup_model(self, model: Any) -> Any:
            return nn.Sequential(model)

    return Wrapping(torch.device("cpu"))


def scaling() -> Any:
    return lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu")


@pytest.mark.parametrize(
    ("kind", "techniques", "options", "message"),
    [
        (
            ByHand,
            {"micro_batching": PIECES},
            {"gradient_clip_val": None},
            "ByHand optimizes manually, so a plan cannot make its steps. Call plan.apply, plan.split, plan.backward "
            "and plan.step in its training_step instead",
        ),
        (
            Speaker,
            {"micro_batching": PIECES},
            {"strategy": wrapping},
            "Wrapping spreads the training over processes or wraps the module, and a plan is for one device. "
            "Use Trainer(devices=1) with the default strategy",
        ),
        (
            Idle,
            {"micro_batching": PIECES},
            {},
            "configure_optimizers of Idle returns no optimizer of its parameters. Return one: a plan is for training",
        ),
        (
            Lines,
            {"micro_batching": PIECES},
            {},
            "LBFGS runs the forward and backward pass inside of its step, which a plan cannot split. "
            "Use an optimizer that steps once with given gradients, such as torch.optim.AdamW",
        ),
        (
            Fetching,
            {"micro_batching": PIECES},
            {},
            "training_step of Fetching takes its batches from dataloader_iter itself, so that none can be split. "
            "Let it take batch and batch_idx, or forbid micro-batching in the plan",
        ),
        (
            Speaker,
            {"mixed_precision": {}},
            {"precision": "bf16-mixed"},
            'precision="bf16-mixed" and mixed-precision of the plan both lower the precision. '
            'Leave precision="bf16-mixed" out: the plan does it',
        ),
        (
            Speaker,
            {"step_in_backward": {}},
            {"plugins": scaling},
            'precision="16-mixed" scales losses, and step-in-backward of the plan uses gradients before they are '
            "divided again. Train in bfloat16, or forbid step-in-backward in the plan",
        ),
        (
            Speaker,
            {"optimizer_offload": {"offload_gradients": True}},
            {"accumulate_grad_batches": 2},
            "accumulate_grad_batches=2 adds up gradients, and optimizer-offload of the plan does not keep them. "
            "Leave accumulate_grad_batches=2 out, or forbid optimizer-offload in the plan",
        ),
        (
            Speaker,
            {"step_in_backward": {}},
            {},
            "gradient_clip_val=0.5 clips all gradients together, and step-in-backward of the plan never has them "
            "together. Leave it out, or forbid step-in-backward in the plan",
        ),
        (
            Clipping,
            {"step_in_backward": {}},
            {"gradient_clip_val": None},
            "configure_gradient_clipping of Clipping clips all gradients together, and step-in-backward of the plan "
            "never has them together. Leave it out, or forbid step-in-backward in the plan",
        ),
        (
            Speaker,
            {"optimizer_offload": {}},
            {"gradient_clip_algorithm": "value"},
            'gradient_clip_algorithm="value" clips gradients on the device, and optimizer-offload of the plan has them '
            'on the host. Clip by "norm", or forbid optimizer-offload in the plan',
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_cannot_go_with_a_plan_is_told(kind: Any, techniques: Any, options: Any, message: str) -> None:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    module = kind()
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        fit(module, plan_with(**techniques), **options)
    assert plain(module)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "vramfit.integrations.lightning")
    with pytest.raises(UsageError, match=r"which is not installed. pip install vramfit\[lightning\]$"):
        importlib.import_module("vramfit.integrations.lightning")
