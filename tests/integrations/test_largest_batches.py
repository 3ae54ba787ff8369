"""The largest batch in a DataLoader, Lightning, the Trainer and Accelerate: found, and all as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from vramfit.errors import UsageError
from vramfit.integrations.largest_batches import (
    largest_for_accelerator,
    largest_for_lightning,
    largest_for_loader,
    largest_for_trainer,
    loader_of_size,
    worst_batches,
)

MOST = 11


class Short(nn.Module):
    """Runs out of memory above a size, of the longest items."""

    def __init__(self, most_elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.most = most_elements

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        return (x * self.weight).square().mean()


def texts() -> list[torch.Tensor]:
    return [torch.full((1 + number % 7,), float(number)) for number in range(40)]


def padded(items: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(items, batch_first=True)


def test_a_loader() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(
        texts(),
        batch_size=2,
        shuffle=True,
        collate_fn=padded,
        generator=generator,
        drop_last=True,  # type: ignore[arg-type]
    )
    model = Short(MOST * 7)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        optimizer.step()

    before = generator.get_state()
    found, larger = largest_for_loader(loader, step, model=model, optimizer=optimizer)
    assert (found.size, found.failing) == (MOST, MOST + 1)
    assert torch.equal(before, generator.get_state())
    assert not optimizer.state
    assert float(model.weight.detach()) == 1
    assert [len(batch) for batch in larger] == [MOST] * 3  # the last 7 are dropped
    order = torch.cat([batch.max(1).values for batch in larger])
    generator.set_state(before)
    assert {len(batch) for batch in loader} == {2}
    assert len(set(order.tolist())) == 33


def test_a_loader_that_has_no_longest_item() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(UsageError, match="no items by number"):
        worst_batches(DataLoader(Stream()))
    with pytest.raises(UsageError, match="its own matter"):
        loader_of_size(DataLoader([1, 2], batch_sampler=[[0], [1]]), 3)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_lightning() -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Short(MOST * 7)

        def training_step(self, batch: torch.Tensor, _number: int) -> dict[str, torch.Tensor]:
            loss = self.model(batch)
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    module = Module()
    loader = DataLoader(texts(), batch_size=2, collate_fn=padded)  # type: ignore[arg-type]
    found = largest_for_lightning(module, loader, predicted=MOST)
    assert [trial.size for trial in found.trials] == [MOST, MOST + 1]
    assert found.size == MOST
    assert float(module.model.weight.detach()) == 1
    assert "log" not in vars(module)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(Short):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x)}

    model = Model(MOST * 7)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]),
        train_dataset=[{"x": text} for text in texts()],
        data_collator=lambda items: {"x": padded([item["x"] for item in items])},
    )
    found = largest_for_trainer(trainer, start=4)
    assert (found.size, found.failing) == (MOST, MOST + 1)
    assert trainer.optimizer is None
    assert float(model.weight.detach()) == 1
    assert model.weight.grad is None


@pytest.mark.filterwarnings("ignore")
def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Short(MOST)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(batch: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()

    before = accelerator.step, accelerator.sync_gradients
    found = largest_for_accelerator(
        accelerator, step, torch.ones, model=model, optimizer=optimizer, predicted=12
    )
    assert [trial.size for trial in found.trials] == [12, 11]
    assert found.size == MOST
    assert (accelerator.step, accelerator.sync_gradients) == before
    assert not optimizer.optimizer.state
