"""A model's parameters in files: which tensor is whose, and models that were made without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.streaming.layer_weights import uses
from vramfit.inference.streaming.weight_files import StoredTensor, store
from vramfit.writing import check_writable


def located(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[int, StoredTensor]:
    """Where the values of a model's parameters are, by their ids; those of which no file tells are left out.

    Raises:
        UsageError: a tensor has another shape or dtype than its parameter.
    """
    found: dict[int, StoredTensor] = {}
    for name, parameter in uses(model):
        tensor = stored.get(name)
        if tensor is None:
            continue
        if (tensor.shape, tensor.dtype) != (tuple(parameter.shape), parameter.dtype):
            raise UsageError(
                f"{name} is {tensor.dtype} of {list(tensor.shape)} in {tensor.path}, and {parameter.dtype} of "
                f"{list(parameter.shape)} in the model",
                "Give the weights of this model, and make the model in their dtype",
            )
        found.setdefault(id(parameter), tensor)
    return found


def require(
    model: nn.Module, parameters: Sequence[nn.Parameter], known: Mapping[int, StoredTensor], path: Path
) -> None:
    """Make sure that files tell the values of some parameters.

    Raises:
        UsageError: they do not of one.
    """
    missing = {id(parameter) for parameter in parameters} - set(known)
    name = next((name for name, parameter in uses(model) if id(parameter) in missing), None)
    if name is not None:
        raise UsageError(f"{path} has no weights named {name}", "Give the weights of this model")


def given_values(model: nn.Module, known: Mapping[int, StoredTensor]) -> Callable[[], None]:
    """Let parameters that were made without memory, on ``meta``, be ones over the files; gives the undo.

    Raises:
        UsageError: a buffer is on ``meta``, of which no file tells.
    """
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            raise UsageError(
                f"the buffer {name} was made without values, on the device meta",
                "Make the model so that only parameters are there: init_empty_weights(include_buffers=False)",
            )
    made: dict[int, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.device.type != "meta" or id(parameter) not in known:
                continue
            if id(parameter) not in made:
                values = known[id(parameter)].mapped()
                made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            replaced.append((module, name, parameter))
            module._parameters[name] = made[id(parameter)]

    def undo() -> None:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter

    return undo


def layer_file(folder: Path, number: int) -> Path:
    """The file of a layer in a folder of our own."""
    return folder / f"layer-{number:04d}.safetensors"


def check_folder(folder: Path) -> None:
    """Make sure that layers can be written into a folder.

    Raises:
        UsageError: there are some already.
        WriteError: they cannot.
    """
    check_writable(layer_file(folder, 0))
    found = min(folder.glob("layer-*.safetensors"), default=None)
    if found is not None:
        raise UsageError(
            f"{found} is there already, and would be written over",
            "Give each model a folder of its own; after a program that was killed, remove what it left",
        )


def stored_layers(
    folder: Path, layers: Sequence[tuple[nn.Module, tuple[str, ...]]]
) -> tuple[dict[int, StoredTensor], list[Path]]:
    """Write the parameters of layers into a folder, a file for each; gives where they are, and the files.

    Raises:
        UsageError: files of other layers are there already, which stay as they are.
        WriteError: no space, or no permission; what was written before is gone again.
    """
    check_folder(folder)
    found: dict[int, StoredTensor] = {}
    files: list[Path] = []
    try:
        for number, (layer, names) in enumerate(layers):
            named = {name: layer.get_parameter(name) for name in names}
            files.append(layer_file(folder, number))
            tensors = {name: parameter.detach().cpu() for name, parameter in named.items()}
            written = store(files[-1], tensors)
            found |= {id(named[name]): written[name] for name in names}
    except BaseException:
        removed(files)
        raise
    return found, files


def removed(files: Sequence[Path]) -> None:
    """Remove files that were written."""
    for file in files:
        file.unlink(missing_ok=True)


def has_no_memory(model: nn.Module) -> bool:
    """Whether some of a model's parameters were made without values."""
    return any(parameter.device == torch.device("meta") for parameter in model.parameters())
