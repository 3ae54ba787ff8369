"""Workloads of what people have: the same losses and sizes as their own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.virtual.conftest import fit_interpreter
from torch import nn

from vramfit.errors import UsageError
from vramfit.workload.makers import lightning_workload, plain_workload, transformers_workload

__all__ = ["fit_interpreter"]

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def test_a_plain_model_is_copied_and_trained_with_its_own_settings() -> None:
    model = nn.Linear(6, 3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.25)
    workload = plain_workload(model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer)
    assert workload.sizes == {"batch_size": 4}
    state = workload.start("cpu")
    assert state.optimizer is not None
    assert (type(state.optimizer), state.optimizer.defaults["momentum"]) == (torch.optim.SGD, 0.25)
    loss = workload.run_step(state, workload.sizes)
    assert torch.equal(loss, F.cross_entropy(model(batch[0]), batch[1]).detach())
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert not torch.equal(state.model.weight, model.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "rows"), [(2, [0, 1]), (7, [0, 1, 2, 0, 1, 2, 0])])
def test_other_batch_sizes_are_parts_or_repeats_of_the_example(wanted: int, rows: list[int]) -> None:
    batch = {"x": torch.arange(3.0), "table": torch.ones(5, 2), "scale": torch.tensor(2.0)}
    made = plain_workload(nn.Identity(), batch).batch(batch_size=wanted)
    assert made["x"].tolist() == rows
    assert made["table"].shape == (5, 2)
    assert made["scale"] == 2


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=97))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**TINY, vocab_size=97, num_labels=3))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**TINY, image_size=32, patch_size=16, num_labels=4))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (_gpt2, {"batch_size", "sequence_length"}),
        (_bert, {"batch_size", "sequence_length"}),
        (_vit, {"batch_size"}),
    ],
)
def test_models_of_transformers_train_on_inputs_of_their_kind(model: Any, sizes: set[str]) -> None:
    for given in (model, model()):
        workload = transformers_workload(given, batch_size=2, sequence_length=8)
        assert set(workload.sizes) == sizes
        state = workload.start("cpu")
        assert type(state.optimizer) is torch.optim.AdamW
        assert float(workload.run_step(state, workload.sizes)) > 0
        assert workload.batch(**{**workload.sizes, "batch_size": 3})["labels"].shape[0] == 3


def test_a_model_without_a_loss_is_refused() -> None:
    from transformers import BertConfig, BertModel

    with pytest.raises(UsageError, match="BertModel computes no loss"):
        transformers_workload(BertModel(BertConfig(**TINY, vocab_size=97)))
    with pytest.raises(UsageError, match="Linear is no model of transformers"):
        transformers_workload(nn.Linear(2, 2))


def _classifier(*, by_hand: bool = False) -> Any:
    """A module as people write it."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.automatic_optimization = not by_hand

        def training_step(self, batch: Any, index: int) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.layer(batch[0]), batch[1])}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.125)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}

    return Classifier()


def test_a_lightning_module_trains_by_its_own_step_and_optimizer() -> None:
    module, batch = _classifier(), [torch.randn(4, 6), torch.tensor([0, 1, 2, 0])]
    workload = lightning_workload(module, batch)
    state = workload.start("cpu")
    assert state.optimizer is not None
    assert state.optimizer.param_groups[0]["lr"] == 0.125
    assert state.optimizer.param_groups[0]["params"][0] is state.model.layer.weight  # type: ignore[union-attr]
    loss = workload.run_step(state, workload.sizes)
    assert torch.equal(loss, module.training_step(batch, 0)["loss"].detach())


def test_a_lightning_module_that_optimizes_by_hand_is_refused() -> None:
    with pytest.raises(UsageError, match="Classifier optimizes by hand"):
        lightning_workload(_classifier(by_hand=True), torch.ones(2, 2))


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(UsageError, match="no tensor with a first dimension"):
        plain_workload(nn.Identity(), {"a": 3})
