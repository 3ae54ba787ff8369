"""One family: built, trained for a step, run without gradients, asked to generate; on the CPU or the virtual GPU."""

from __future__ import annotations

import gc
import resource
import time
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import vramfit
from transformer_families.batches import batch_for
from transformer_families.kinds import Kind, families
from transformer_families.overrides import OVERRIDES
from transformer_families.realistic import configuration
from transformer_families.sizes import tiny

CARD = "1TiB"
GENERATES = (Kind.CAUSAL_LM, Kind.SEQ_TO_SEQ, Kind.SPEECH_TO_TEXT)


def build(name: str) -> tuple[nn.Module, dict[str, Any], Kind]:
    """A tiny model of a family on the CPU with a batch for it."""
    torch.manual_seed(0)
    if name.startswith("realistic:"):
        family, class_name, config = configuration(name.removeprefix("realistic:"))
        kind = families()[family][0]
    else:
        kind, class_name = families()[name]
        config = tiny(name, OVERRIDES.get(name, {}))
    model = getattr(transformers, class_name)(config)
    return model, batch_for(model, kind), kind


def on_virtual_gpu(name: str) -> dict[str, Any]:
    """What happens to a family on the virtual GPU."""
    started = time.perf_counter()
    with vramfit.VirtualGPU(CARD if name.startswith("realistic:") else "A100 80GB", alloc_conf="") as gpu:
        result = _try(name, "cuda", gpu)
    facts = gpu.run
    result["peak_bytes"] = facts.devices[0].peak_allocated_bytes
    result["warnings"] = sorted({warning.code for warning in facts.warnings})
    result["seconds"] = round(time.perf_counter() - started, 2)
    result["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gc.collect()
    return result


def on_cpu(name: str) -> dict[str, Any]:
    """The same for real on the CPU."""
    return _try(name, "cpu", None)


def _try(name: str, device: str, gpu: vramfit.VirtualGPU | None) -> dict[str, Any]:
    result: dict[str, Any] = {"family": name, "device": device}
    try:
        model, batch, kind = build(name)
    except Exception as error:
        return result | {"build": describe(error)}
    result["class"] = type(model).__name__
    result["parameters"] = sum(p.numel() for p in model.parameters())
    model.to(device)
    batch = {key: _moved(value, device) for key, value in batch.items()}
    for step in (_train, _infer, _generate):
        if step is _generate and kind not in GENERATES:
            continue
        try:
            result[step.__name__[1:]] = "ok"
            step(model, batch, result)
        except Exception as error:
            result[step.__name__[1:]] = describe(error)
        if gpu is not None:
            result[f"{step.__name__[1:]}_bytes"] = gpu.peak_allocated_bytes
    return result


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [{key: item.to(device) for key, item in entry.items()} for entry in value]
    return value


def _train(model: nn.Module, batch: dict[str, Any], result: dict[str, Any]) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = _loss(model(**batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    result["loss"] = str(loss.dtype)


def _loss(outputs: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next(t for t in _flat(outputs) if t.is_floating_point() and t.requires_grad)
    return first.float().square().mean()


def _infer(model: nn.Module, batch: dict[str, Any], result: dict[str, Any]) -> None:
    model.eval()
    with torch.no_grad():
        outputs = model(**batch)
    result["outputs"] = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _flat(outputs)]


def _generate(model: nn.Module, batch: dict[str, Any], result: dict[str, Any]) -> None:
    given = {key: value for key, value in batch.items() if not key.startswith(("labels", "decoder_"))}
    with torch.no_grad():
        tokens = model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    result["generated"] = list(tokens.shape)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _flat(item)] if isinstance(value, (list, tuple)) else []


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."
