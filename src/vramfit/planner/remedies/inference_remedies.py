"""Remedies for a program that trains nothing: no gradients, half precision, caches, switches of pipelines."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from vramfit.planner.remedies.alteration import Alteration
from vramfit.planner.remedies.program_remedy import (
    AUTOCAST,
    AUTOCAST_CHANGES,
    HALF_CHANGES,
    HALF_WEIGHTS,
    NO_GRADIENTS,
    ProgramRemedy,
    TrainedProgram,
)
from vramfit.planner.remedies.source_edits import (
    SourceEdit,
    inserted_before,
    with_call_before,
    with_keyword,
    wrapped_alone,
)
from vramfit.trace.observed_program import CalledBy, UsedModel

_MOVES = frozenset({"to", "cuda"})
_GENERATE = frozenset({"generate"})
_LONG_PROMPT = 1024
"""Tokens from which on a prompt is also tried in chunks."""

_PIPELINE_SWITCHES = (
    ("attention in slices", ("enable_attention_slicing",), "sums of attention are rounded in another order"),
    ("VAE in slices", ("vae", "enable_slicing"), ""),
    ("VAE in tiles", ("vae", "enable_tiling"), "the VAE sees tiles, which are blended where they meet"),
    ("parts of the pipeline on the host", ("enable_model_cpu_offload",), ""),
)
"""Name, attributes from the pipeline to the method, and what it changes."""


def inference_remedies(subject: TrainedProgram) -> Iterator[ProgramRemedy]:
    """Those of the program's largest model, and of what calls it."""
    model = subject.seen.main_used
    if model is None:
        return
    for remedy in (_no_gradients(subject, model), _half(subject, model), _autocast(subject, model)):
        if remedy is not None:
            yield remedy
    if model.called_by is CalledBy.GENERATE:
        yield from _generation(subject, model)
    elif model.called_by is CalledBy.PIPELINE:
        yield from _pipeline(subject, model)


def _remedy(name: str, edit: SourceEdit | None, changes: str = "", *, weight: int) -> ProgramRemedy | None:
    if edit is None:
        return None
    alteration = Alteration(edits=(edit,))
    return ProgramRemedy(name=name, alteration=alteration, how=(edit.words,), changes=changes, weight=weight)


def _no_gradients(subject: TrainedProgram, model: UsedModel) -> ProgramRemedy | None:
    """Gradients off around the call, where they were on and nobody went backward."""
    if not model.with_gradients or model.called_at is None:
        return None
    edit = wrapped_alone(model.called_at, "with torch.no_grad():", subject.root)
    return _remedy(NO_GRADIENTS, edit, weight=0)


def _half(subject: TrainedProgram, model: UsedModel) -> ProgramRemedy | None:
    """Weights and activations in 16 bits, from before they reach the card."""
    if model.dtype != "float32" or model.moved_at is None:
        return None
    new = ".to(torch.bfloat16)" if model.called_by is CalledBy.PIPELINE else ".bfloat16()"
    edit = with_call_before(model.moved_at, _MOVES, new, subject.root)
    return _remedy(HALF_WEIGHTS, edit, HALF_CHANGES, weight=2)


def _autocast(subject: TrainedProgram, model: UsedModel) -> ProgramRemedy | None:
    """The call under autocast, for models whose inputs have to stay as they are."""
    if model.dtype != "float32" or model.called_at is None:
        return None
    edit = wrapped_alone(model.called_at, 'with torch.autocast("cuda", dtype=torch.bfloat16):', subject.root)
    return _remedy(AUTOCAST, edit, AUTOCAST_CHANGES, weight=1)


def _generation(subject: TrainedProgram, model: UsedModel) -> Iterator[ProgramRemedy]:
    """Settings of the key-value cache of `generate`."""
    if model.called_at is None:
        return
    words = [
        ("cache on the host", 'cache_implementation="offloaded"', ""),
    ]
    if any(importlib.util.find_spec(name) is not None for name in ("hqq", "optimum")):
        words.append(
            (
                "cache in 4 bits",
                'cache_implementation="quantized"',
                "the cache's older part is kept in 4 bits",
            )
        )
    if any(len(shape) == 2 and shape[1] >= _LONG_PROMPT for shape in model.shapes):
        words.append(
            ("prompt in chunks", "prefill_chunk_size=256", "sums of attention are rounded otherwise")
        )
    for name, keyword, changes in words:
        edit = with_keyword(model.called_at, _GENERATE, keyword, subject.root)
        if (remedy := _remedy(name, edit, changes, weight=3)) is not None:
            yield remedy


def _pipeline(subject: TrainedProgram, model: UsedModel) -> Iterator[ProgramRemedy]:
    """The switches of a diffusers pipeline, each where it is called."""
    if model.called_at is None or not model.called_as:
        return
    for name, path, changes in _PIPELINE_SWITCHES:
        line = f"{'.'.join((model.called_as, *path))}()"
        edit = inserted_before(model.called_at, (line,), subject.root)
        if (remedy := _remedy(name, edit, changes, weight=3)) is not None:
            yield remedy
