"""Makes workloads of what people have: a model with a batch, a transformers model, a Lightning module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from vramfit.arguments import shown
from vramfit.errors import UsageError
from vramfit.workload import Batch, Workload

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def plain_workload(
    model: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    loss: Callable[[nn.Module, Batch], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
) -> Workload:
    """A workload of a model, one of its batches, a loss and an optimizer, as a training loop has them.

    >>> model = torch.nn.Linear(1024, 10)
    >>> workload = vramfit.plain_workload(
    ...     model,
    ...     batch=(torch.randn(32, 1024), torch.randint(10, (32,))),
    ...     loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    ...     optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    ... )
    >>> workload.sizes
    {'batch_size': 32}

    Args:
        model: the model, which is copied for each run and left as it is, or a function that makes it.
        batch: an example: other batch sizes are made by repeating it, or taking a part, along its first dimension.
        loss: of a batch; None where the model returns its own (``output.loss``) or the loss alone.
        optimizer: the model's, of which the kind and the settings of its first group are taken, or a function that
            makes one; None leaves the parameters as they are.

    Returns:
        a workload with the size ``batch_size``.

    Raises:
        UsageError: the batch has no tensor with a first dimension.
    """
    size = _batch_size(batch)
    example = _on_cpu(batch)
    return Workload(
        model=_copies(model) if isinstance(model, nn.Module) else model,
        batch=lambda batch_size: _resized(example, size, batch_size),
        sizes={"batch_size": size},
        loss=own_loss if loss is None else loss,
        optimizer=_maker(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer,
    )


def transformers_workload(
    model: Any,
    *,
    batch_size: int = 8,
    sequence_length: int = 512,
    optimizer: MakeOptimizer | None = None,
) -> Workload:
    """A training workload of a Hugging Face transformers model, on made-up inputs of its kind.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2))
    >>> vramfit.transformers_workload(model, batch_size=4, sequence_length=256).sizes
    {'batch_size': 4, 'sequence_length': 256}

    Args:
        model: a model, of which the class and the configuration are taken, or a function that makes one.
        batch_size: the usual one.
        sequence_length: of text; models of images have none.
        optimizer: makes the optimizer; AdamW without it.

    Returns:
        a workload with the size ``batch_size``, and ``sequence_length`` for text.

    Raises:
        UsageError: the model takes neither text nor images, or computes no loss.
    """
    config, kind = _configuration(model)
    make: Callable[[], nn.Module] = model if not isinstance(model, nn.Module) else lambda: kind(config)
    common: dict[str, Any] = {"loss": own_loss, "optimizer": optimizer or torch.optim.AdamW}
    label = _labels(kind.__name__, config)
    if kind.main_input_name == "pixel_values":

        def images(batch_size: int) -> dict[str, torch.Tensor]:
            side = config.image_size
            height, width = (side, side) if isinstance(side, int) else side
            pixels = torch.zeros(batch_size, getattr(config, "num_channels", 3), height, width)
            return {"pixel_values": pixels, "labels": label(batch_size, None)}

        return Workload(model=make, batch=images, sizes={"batch_size": batch_size}, **common)
    if kind.main_input_name != "input_ids":
        raise UsageError(
            f"{kind.__name__} takes {kind.main_input_name}, which is neither text nor an image",
            "Write a vramfit.Workload with a batch function of your own",
        )

    def text(batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(config.vocab_size, (batch_size, sequence_length))
        return {"input_ids": tokens, "labels": label(batch_size, tokens)}

    sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
    return Workload(model=make, batch=text, sizes=sizes, **common)


def lightning_workload(module: Any, batch: Batch) -> Workload:
    """A workload of a LightningModule: its ``training_step`` and the first optimizer of ``configure_optimizers``.

    >>> import lightning
    >>> class Classifier(lightning.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(1024, 10)
    ...     def training_step(self, batch, _index):
    ...         return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
    >>> batch = torch.randn(32, 1024), torch.randint(10, (32,))
    >>> vramfit.lightning_workload(Classifier(), batch).sizes
    {'batch_size': 32}

    Args:
        module: the module, which is copied for each run and left as it is, or a function that makes it.
        batch: an example, as its data loader gives it.

    Returns:
        a workload with the size ``batch_size``.

    Raises:
        UsageError: it optimizes by hand: its step is its own, so write a `Workload` with ``step``; or the batch has no
            tensor with a first dimension.
    """
    if not getattr(module, "automatic_optimization", True):
        raise UsageError(
            f"{type(module).__name__} optimizes by hand", "Write a vramfit.Workload with a step of your own"
        )
    make = _copies(module) if isinstance(module, nn.Module) else module
    made: list[Any] = []

    def model() -> nn.Module:
        made[:] = [make()]  # the optimizer is the newest model's
        found: nn.Module = made[0]
        return found

    def optimizer(_parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return _first_optimizer(made[0].configure_optimizers())

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        found = model.training_step(batch, 0)  # type: ignore[operator]  # a LightningModule's
        return found["loss"] if isinstance(found, Mapping) else found  # type: ignore[no-any-return]

    size = _batch_size(batch)
    example = _on_cpu(batch)
    return Workload(
        model=model,
        batch=lambda batch_size: _resized(example, size, batch_size),
        sizes={"batch_size": size},
        loss=loss,
        optimizer=optimizer,
    )


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that a model computes itself: ``output.loss``, ``output["loss"]``, or its output."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*batch)
    else:
        output = model(batch)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    found: torch.Tensor = getattr(output, "loss", output)
    return found


def _configuration(model: Any) -> tuple[Any, Any]:
    found = model
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise UsageError(
                f"model={shown(model)} is no model of transformers, and no function that makes one",
                "Give the model, or lambda: AutoModel.from_config(config)",
            )
        with torch.device("meta"):
            found = model()
    config, kind = getattr(found, "config", None), type(found)
    if config is None or not hasattr(kind, "main_input_name"):
        raise UsageError(
            f"{kind.__name__} is no model of transformers", "Use vramfit.plain_workload for other models"
        )
    return config, kind


def _labels(kind: str, config: Any) -> Callable[[int, torch.Tensor | None], torch.Tensor]:
    """What makes the labels of a kind of model."""
    if kind.endswith(
        ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
    ):
        return lambda _size, tokens: _tokens(kind, tokens)
    if kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        return lambda size, _tokens: torch.randint(config.num_labels, (size,))
    if kind.endswith("ForTokenClassification"):
        return lambda _size, tokens: _tokens(kind, tokens) % config.num_labels
    raise UsageError(
        f"{kind} computes no loss of labels that can be made up",
        "Take the model with a head (...ForCausalLM, ...ForSequenceClassification), or write a vramfit.Workload",
    )


def _tokens(kind: str, tokens: torch.Tensor | None) -> torch.Tensor:
    if tokens is None:
        raise UsageError(
            f"{kind} has no text for labels", "Write a vramfit.Workload with a batch of your own"
        )
    return tokens


def _copies(model: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(model).cpu()


def _maker(optimizer: torch.optim.Optimizer) -> MakeOptimizer:
    kind = type(optimizer)
    settings = {
        name: value for name, value in optimizer.param_groups[0].items() if name in optimizer.defaults
    }
    return lambda parameters: kind(parameters, **settings)


def _first_optimizer(found: Any) -> torch.optim.Optimizer:
    """The first optimizer in any of the forms that ``configure_optimizers`` may return."""
    while not isinstance(found, torch.optim.Optimizer):
        if isinstance(found, Mapping):
            found = found["optimizer"]
        elif isinstance(found, list | tuple) and found:
            found = found[0]
        else:
            raise UsageError(
                "configure_optimizers gives no optimizer", "Return one, or write a vramfit.Workload"
            )
    return found


def _batch_size(batch: Batch) -> int:
    for tensor in _tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise UsageError("the batch has no tensor with a first dimension", "Give one as the data loader makes it")


def _tensors(batch: Batch) -> list[torch.Tensor]:
    from vramfit.torch_internals.pytree import tree_leaves

    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _on_cpu(batch: Batch) -> Batch:
    return _mapped(batch, lambda tensor: tensor.detach().cpu())


def _resized(batch: Batch, size: int, wanted: int) -> Batch:
    """A batch with another number of examples: the same ones over and over."""

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor.clone()
        return tensor[torch.arange(wanted) % size]

    return _mapped(batch, resize)


def _mapped(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    from vramfit.torch_internals.pytree import tree_map_only

    return tree_map_only(torch.Tensor, change, batch)
