"""What a program trains is seen while it runs, without its help."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from vramfit.api.program_run import run_program
from vramfit.attaching.attached_script import AttachedScript
from vramfit.capture.observing.training_finder import TrainingFinder
from vramfit.capture.observing.wrappers import own_class
from vramfit.options.run_options import KEYWORDS, read_options
from vramfit.report.program_words import program_words
from vramfit.trace.observed_program import ObservedProgram


def seen_in(*command: str, **options: object) -> ObservedProgram:
    run = run_program(command, read_options(KEYWORDS, {"gpu": "8GiB", **options}))
    assert run.observed is not None
    return run.observed


def test_model_batch_optimizer_loader_and_options_of_a_loop_are_seen(written: Callable[[str], str]) -> None:
    seen = seen_in(written("LOOP"), "--batch-size", "16")
    [model] = seen.models
    [optimizer] = seen.optimizers
    [loader] = seen.loaders
    assert (model.kind, model.called_as, model.shapes, model.calls) == ("Net", "model", ((16, 32),), 3)
    assert model.parameters == model.trained == 3_681_792
    assert (optimizer.kind, optimizer.model_as, optimizer.stepped) == ("AdamW", "model", True)
    assert (loader.batch_size, loader.batches) == (16, 3)
    assert {option.flag: option.value for option in seen.options} == {
        "--batch-size": 16,
        "--steps": 3,
        "--width": 256,
    }
    assert (seen.steps, seen.accumulation, seen.clipping, seen.scaler) == (3, 1, True, False)
    assert seen.schedulers == ("CosineAnnealingLR",)
    assert seen.unclear == ()
    assert program_words(seen) == (
        "trains Net, 3.7 M parameters, with AdamW; batch 16 x 32, no accumulation, clipped gradients"
    )


def test_both_models_of_a_gan_are_seen_with_their_optimizers(written: Callable[[str], str]) -> None:
    seen = seen_in(written("GAN"))
    assert [(model.parameters, model.optimizers, model.called_as) for model in seen.models] == [
        (3_168, (0,), "generator"),
        (2_177, (1,), "discriminator"),
    ]
    assert seen.accumulation == 1


def test_accumulation_scaler_autocast_and_an_untrained_teacher_are_told_apart(
    written: Callable[[str], str],
) -> None:
    seen = seen_in(written("ACCUMULATING"))
    assert [model.called_as for model in seen.models] == ["student"]
    assert (seen.accumulation, seen.steps, seen.scaler, seen.autocast) == (4, 4, True, "float16")


def test_what_cannot_be_told_is_named_with_what_to_do(written: Callable[[str], str]) -> None:
    [functional] = seen_in(written("FUNCTIONAL")).unclear
    [closure] = seen_in(written("LBFGS")).unclear
    assert "a functional loop" in functional and "call the model as a module" in functional
    assert closure.startswith("LBFGS runs the model several times in a step")


def test_the_same_is_seen_in_a_recording_on_the_cpu(written: Callable[[str], str]) -> None:
    script = written("LOOP")
    run = run_program(
        (script, "--batch-size", "4", "--width", "32"),
        read_options(KEYWORDS, {"device": "cpu", "budget": "4GiB"}),
    )
    assert run.observed is not None
    assert program_words(run.observed).startswith("trains Net, ")
    assert run.observed.steps == 3


def test_looking_at_a_functions_variables_keeps_none_of_them_alive(written: Callable[[str], str]) -> None:
    run = run_program((written("REBINDING"),), read_options(KEYWORDS, {"gpu": "8GiB"}))
    assert run.observed is not None and run.observed.models[0].called_as == "model"
    assert run.devices[0].peak_allocated_bytes < 300 << 20  # one of 256 MiB at a time


def test_a_model_is_named_as_the_scope_that_makes_its_optimizer_has_it(written: Callable[[str], str]) -> None:
    [optimizer] = seen_in(written("SHADOWED")).optimizers
    assert optimizer.model_as == "s.trained"  # a local name hides the module's own


def test_a_loader_that_accelerate_prepared_is_the_programs_own(written: Callable[[str], str]) -> None:
    script = written("PREPARED")
    seen = seen_in(script)
    [loader] = seen.loaders
    assert loader.batch_size == 8
    assert loader.at is not None and loader.at.line == 9
    assert len(seen.optimizers) == 1


def test_a_model_of_fully_shard_has_the_name_that_the_program_gave_its_class() -> None:
    model = nn.Linear(8, 8)
    model.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # as fully_shard does
    finder = TrainingFinder()
    optimizer = torch.optim.SGD(model.parameters())
    finder.meet(optimizer)
    script = AttachedScript((), None, finder)
    assert script.meet(model)
    assert [target.kind for target in script.seen] == ["Linear"]
    assert own_class(model) is nn.Linear


def test_an_optimizer_that_is_met_twice_is_known_once() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    finder = TrainingFinder()
    finder.meet(optimizer)
    finder.meet(optimizer)
    assert finder.optimizers == tuple(finder.owners(model)) == (optimizer,)
