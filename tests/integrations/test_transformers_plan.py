from __future__ import annotations

import copy
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.integrations.training import check_same, check_trained, plan_with
from tests.virtual.conftest import fit_interpreter  # noqa: F401

from vramfit import Plan
from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload
from vramfit.workload.makers import own_loss

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402  # it may be missing

from vramfit.integrations.transformers import PlanCallback  # noqa: E402  # it needs transformers

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # the Trainer advises on data loaders, devices and its own renames

VOCABULARY = 96
PIECES = {"count": 3}


def language_model(dropout: float = 0.0) -> Any:
    """Its loss divides by the items of a step."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def classifier(dropout: float = 0.0) -> Any:
    """It takes the items of a step, and its loss is the mean over examples all the same."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        num_labels=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


def examples(model: Any, count: int = 17, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Some labels of each example do not count, another number in every one."""
    tokens = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(5))
    if model.__class__.__name__ == "BertForSequenceClassification":
        return [{"input_ids": row, "labels": row[0] % 4} for row in tokens]
    labels = tokens.clone()
    for number, row in enumerate(labels):
        row[: number % (length - 1)] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def trainer_for(model: Any, folder: Path, plan: Plan | Path | None = None, **options: Any) -> Any:
    """Of 17 examples: the last batch is smaller, and can be cut into unequal pieces alone."""
    kind, rows = options.pop("kind", transformers.Trainer), options.pop("rows", None) or examples(model)
    parts = {
        name: options.pop(name)
        for name in ("compute_loss_func", "optimizer_cls_and_kwargs")
        if name in options
    }
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 6,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 7,
        **options,
    }
    trainer = kind(
        model=model,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=rows,
        **parts,
    )
    if plan is not None:
        trainer.add_callback(PlanCallback(plan, trainer))
    return trainer


def trained(folder: Path, model: Any, plan: Plan | None = None, **options: Any) -> Any:
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_for(model, folder, plan, **options)
    trainer.train()
    check_trained(before, model.state_dict())
    return trainer


def losses(trainer: Any) -> list[float]:
    return [
        line[name] for line in trainer.state.log_history for name in ("loss", "grad_norm") if name in line
    ]


class OwnLoss(transformers.Trainer):
    """The mean over labels, computed by hand, as people override it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def own_function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / float(num_items_in_batch)


# -- the same training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "plan", "options"),
    [
        (language_model, plan_with(micro_batching=PIECES, activation_checkpointing={}), {}),
        (
            language_model,
            plan_with(micro_batching={"count": 2}, chunked_loss={"chunk_rows": 5}),
            {"gradient_accumulation_steps": 2},
        ),
        (classifier, plan_with(micro_batching=PIECES), {"gradient_accumulation_steps": 2}),
        (language_model, plan_with(micro_batching=PIECES), {"label_smoothing_factor": 0.1}),
        (language_model, plan_with(micro_batching=PIECES), {"kind": OwnLoss}),
        (language_model, plan_with(micro_batching=PIECES), {"compute_loss_func": own_function}),
    ],
    ids=["checkpointing", "chunked-loss", "mean", "smoothing", "own-method", "own-function"],
)
def test_micro_batches_train_as_the_whole_batch(
    tmp_path: Path, make: Any, plan: Plan, options: dict[str, Any]
) -> None:
    expected, found = trained(tmp_path, make(), **options), trained(tmp_path, make(), plan, **options)
    check_same(found.model.state_dict(), expected.model.state_dict(), exact=False)
    assert len(losses(expected)) >= 4
    assert losses(found) == pytest.approx(losses(expected), rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_checkpointing_alone_draws_the_same_dropout_and_changes_no_bit(tmp_path: Path, options: Any) -> None:
    plan = plan_with(activation_checkpointing={})
    expected = trained(tmp_path, language_model(0.2), **options)
    found = trained(tmp_path, language_model(0.2), plan, **options)
    check_same(found.model.state_dict(), expected.model.state_dict(), exact=True)
    assert losses(found) == losses(expected)


def adafactor() -> tuple[Any, dict[str, Any]]:
    return torch.optim.Adafactor, {"lr": 1e-2}


def eight_bits() -> tuple[Any, dict[str, Any]]:
    optim = pytest.importorskip("torchao.optim")
    return optim.AdamW8bit, {"lr": 3e-3, "block_size": 16, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        (plan_with(lean_optimizer={"kind": "adafactor"}), adafactor),
        (plan_with(low_bit_optimizer={"block_size": 16}), eight_bits),
    ],
    ids=["adafactor", "eight-bits"],
)
def test_exchanged_optimizers_train_as_if_the_trainer_had_made_them(
    tmp_path: Path, plan: Plan, optimizer: Any
) -> None:
    """With the Trainer's schedule and clipping. Compiled, torchao's optimizer wants a C++ compiler on the CPU."""
    with torch.compiler.set_stance("force_eager"):
        expected = trained(tmp_path, language_model(), optimizer_cls_and_kwargs=optimizer())
    found = trained(tmp_path, language_model(), plan)
    check_same(found.model.state_dict(), expected.model.state_dict(), exact=False)


def test_float16_scales_clips_and_leaves_steps_out_as_a_loop_of_ones_own(tmp_path: Path) -> None:
    plan = plan_with(mixed_precision={"dtype": "float16", "initial_scale": 2.0**19})
    options: dict[str, Any] = {
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
        "max_grad_norm": 0.01,
    }
    found = trainer_for(classifier(), tmp_path, plan, **options)
    found.train()
    other = trainer_for(classifier(), tmp_path, **options)
    schedule = transformers.get_linear_schedule_with_warmup(other.create_optimizer(), 1, 6)
    live = AttachedProgram(other.model.train(), other.optimizer)
    live.attach(plan.choices)
    assert live.scaler is not None
    left_out = 0
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(examples(other.model), batch_size=6):  # type: ignore[arg-type]
            live.backward(live.surrounded(lambda batch=batch: other.model(**batch).loss))
            before = live.scaler.get_scale()  # type: ignore[attr-defined]
            live.step(clip_norm=0.01)
            if live.scaler.get_scale() < before:  # type: ignore[attr-defined]
                left_out += 1
            else:
                schedule.step()
    assert 1 <= left_out <= 4
    check_same(found.model.state_dict(), other.model.state_dict(), exact=True)


# -- checkpoints, and the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "techniques",
    [
        {"low_bit_optimizer": {"block_size": 16}},
        {"lean_optimizer": {"kind": "adafactor"}},
        {"mixed_precision": {"dtype": "float16"}},
        {"low_precision_training": {}},
    ],
    ids=lambda techniques: "+".join(techniques),
)
def test_a_training_goes_on_from_a_checkpoint(tmp_path: Path, techniques: dict[str, Any]) -> None:
    if "low_bit_optimizer" in techniques:
        pytest.importorskip("torchao")
    plan = plan_with(micro_batching=PIECES, **techniques)
    whole = trainer_for(language_model(), tmp_path, plan, save_strategy="epoch")
    whole.train()
    saved = tmp_path / "checkpoint-3"
    loaded = transformers.GPT2LMHeadModel.from_pretrained(saved)
    assert list(loaded.state_dict()) == list(whole.model.state_dict())
    resumed = trainer_for(language_model(), tmp_path, plan)
    resumed.train(resume_from_checkpoint=str(saved))
    check_same(resumed.model.state_dict(), whole.model.state_dict(), exact=True)


def plain(trainer: Any) -> bool:
    """Whether nothing of a plan is left on a trainer and its model."""
    return not {"training_step", "compute_loss"} & set(vars(trainer)) and not any(
        name.startswith("_vramfit") for part in trainer.model.modules() for name in vars(part)
    )


def test_everything_is_as_before_after_the_training(tmp_path: Path) -> None:
    plan_with(micro_batching=PIECES, activation_checkpointing={}, lean_optimizer={}).save(
        tmp_path / "plan.toml"
    )
    trainer = trainer_for(language_model(), tmp_path, tmp_path / "plan.toml")
    inside: list[tuple[bool, type]] = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inside.append((plain(trainer), type(trainer.optimizer.optimizer)))

    trainer.add_callback(Look())
    for _ in range(2):  # the same trainer trains on
        trainer.train()
        assert inside == [(False, torch.optim.Adafactor)] * 6
        inside.clear()
        assert plain(trainer)
        assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
        assert trainer.accelerator.scaler is None
    trainer.remove_callback(PlanCallback)
    trainer.train()
    assert inside == [(True, torch.optim.AdamW)] * 6


def test_a_training_that_fails_can_be_undone(tmp_path: Path) -> None:
    class Failing(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of luck")

    trainer = trainer_for(language_model(), tmp_path, kind=Failing)
    callback = PlanCallback(plan_with(micro_batching=PIECES, activation_checkpointing={}), trainer)
    trainer.add_callback(callback)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            trainer.train()
    assert not plain(trainer)
    callback.undo()
    assert plain(trainer)
    callback.undo()  # nothing is left to undo


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_training_on_the_virtual_gpu_needs_what_the_plan_says(tmp_path: Path) -> None:
    """To the byte, but for the batch, which is on the device as a whole, and the Trainer's own counters."""
    plan = plan_with(
        micro_batching={"count": 2}, activation_checkpointing={}, chunked_loss={"chunk_rows": 256}
    )
    tokens = torch.randint(2048, (16, 128))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    rows = [{name: value[number] for name, value in batch.items()} for number in range(16)]
    config = transformers.GPT2Config(
        vocab_size=2048,
        n_positions=128,
        n_embd=32,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )

    def peak(plan: Plan | None) -> int:
        PartialState._reset_state()
        with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0):
            model = transformers.GPT2LMHeadModel(config)
            options = {
                "per_device_train_batch_size": 16,
                "use_cpu": False,
                "max_grad_norm": 0.0,
                "bf16": False,
            }
            trainer_for(model, tmp_path, plan, rows=rows, **options).train()
            assert model.device.type == "cuda"
            return torch.cuda.max_memory_allocated()

    workload = plan.apply(
        Workload(
            model=lambda: transformers.GPT2LMHeadModel(config),
            batch=lambda batch_size: {name: value[:batch_size] for name, value in batch.items()},
            sizes={"batch_size": 16},
            loss=own_loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        )
    )
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0):
        state = workload.start("cuda")
        for _ in range(2):
            workload.run_step(state, workload.sizes)
        planned = torch.cuda.max_memory_allocated()
    try:
        plain, found = peak(None), peak(plan)
    finally:
        PartialState._reset_state()  # later trainers look for their device anew
    assert planned <= found <= planned + 2 * tokens.nbytes + 16 * 1024
    assert found < 0.4 * plain


# -- what cannot go together ------------------------------------------------------------------------------------


def spread(trainer: Any) -> None:
    trainer.is_model_parallel = True


def compile_too(trainer: Any) -> None:
    trainer.args.torch_compile = True


def scale(trainer: Any) -> None:
    """As ``fp16=True``, which Accelerate refuses without an accelerator."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.accelerator.state._mixed_precision = "fp16"


def add_another(trainer: Any) -> None:
    trainer.add_callback(PlanCallback(plan_with(), trainer))


@pytest.mark.parametrize(
    ("techniques", "options", "change", "message"),
    [
        (
            {"micro_batching": PIECES},
            {},
            add_another,
            "the Trainer has two callbacks with a plan. Remove one: trainer.pop_callback(PlanCallback)",
        ),
        (
            {"micro_batching": PIECES},
            {},
            spread,
            "the Trainer spreads the training over several devices, and a plan is for one. "
            "Start one process with one visible device, CUDA_VISIBLE_DEVICES=0",
        ),
        (
            {"activation_checkpointing": {}},
            {"activation_checkpointing": True},
            None,
            "the model checkpoints its own layers (activation_checkpointing=True), and the plan checkpoints blocks. "
            "Leave activation_checkpointing out of the TrainingArguments: the plan does it",
        ),
        (
            {"compile": {}},
            {},
            compile_too,
            "torch_compile=True and compile of the plan both compile the model. "
            "Leave torch_compile=True out: the plan does it",
        ),
        (
            {"low_precision_training": {}},
            {"bf16": True},
            None,
            "bf16=True and low-precision-training of the plan both lower the precision. "
            "Leave bf16=True out: the plan does it",
        ),
        (
            {"optimizer_offload": {}},
            {},
            scale,
            "fp16=True scales losses, and optimizer-offload of the plan uses gradients before they are divided "
            "again. Train in bfloat16, or forbid optimizer-offload in the plan",
        ),
        (
            {"step_in_backward": {}},
            {"gradient_accumulation_steps": 2, "max_grad_norm": 0},
            None,
            "gradient_accumulation_steps=2 adds up gradients, and step-in-backward of the plan does not keep them. "
            "Leave gradient_accumulation_steps=2 out, or forbid step-in-backward in the plan",
        ),
        (
            {"step_in_backward": {}},
            {},
            None,
            "max_grad_norm=0.5 clips all gradients together, and step-in-backward of the plan never has them "
            "together. Set max_grad_norm=0, or forbid step-in-backward in the plan",
        ),
    ],
    ids=["two", "spread", "checkpointing", "compile", "bf16", "fp16", "accumulation", "clipping"],
)
def test_what_cannot_go_with_a_plan_is_told(
    tmp_path: Path, techniques: Any, options: Any, change: Any, message: str
) -> None:
    trainer = trainer_for(language_model(), tmp_path, plan_with(**techniques), **options)
    if change is not None:
        change(trainer)
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        trainer.train()
    assert plain(trainer)
    AcceleratorState._reset_state(True)


def test_half_precision_of_a_trainer_that_prepares_the_model_later_is_refused(tmp_path: Path) -> None:
    """Releases before 5.23 make the schedule before Accelerate wraps model and optimizer, as here."""
    trainer = trainer_for(language_model(), tmp_path, plan_with(activation_checkpointing={}), bf16=True)
    trainer.create_optimizer()
    with pytest.raises(
        UsageError, match=r"for bf16=True after its schedule is made, .*Use transformers 5\.23 or later"
    ):
        trainer.create_scheduler(3)
    AcceleratorState._reset_state(True)


def test_steps_in_the_backward_pass_change_no_bit(tmp_path: Path) -> None:
    expected = trained(tmp_path, language_model(), max_grad_norm=0)
    found = trained(tmp_path, language_model(), plan_with(step_in_backward={}), max_grad_norm=0)
    check_same(found.model.state_dict(), expected.model.state_dict(), exact=True)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "vramfit.integrations.transformers")
    with pytest.raises(UsageError, match=r"which is not installed. pip install vramfit\[transformers\]$"):
        importlib.import_module("vramfit.integrations.transformers")
