"""Programs that leak: with each step, once an epoch, in their evaluation, or on the host."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leak_programs import EPOCH, PASSES, Plant, Training, batch, net, planted

_by_step = planted(Plant.STEP)
_by_epoch = planted(Plant.EPOCH)
_in_evaluation = planted(Plant.EVALUATION)
_on_host = planted(Plant.HOST)

_GLOBAL: list[Tensor] = []

# -- With each step -------------------------------------------------------------------------------------------


@_by_step
def losses_with_their_graphs() -> None:
    training, losses = Training(), []
    for _ in itertools.count():
        losses.append(training.step(retain=True))


@_by_step
def sum_of_losses_with_graph() -> None:
    training, total = Training(), torch.zeros((), device="cuda")
    for _ in itertools.count():
        total = total + training.step(retain=True)


@_by_step
def outputs_in_a_list() -> None:
    training, outputs = Training(), []
    for _ in training.steps():
        outputs.append(training.model(batch()).detach())


@_by_step
def batches_in_a_global() -> None:
    training = Training()
    for _ in training.steps():
        _GLOBAL.append(batch())


@_by_step
def outputs_in_a_dictionary_by_step() -> None:
    training, outputs = Training(), {}
    for number in training.steps():
        outputs[number] = batch() * 2


@_by_step
def closures_that_hold_a_batch() -> None:
    training, callbacks = Training(), []
    for _ in training.steps():
        inputs = batch()
        callbacks.append(lambda held=inputs: held.sum())


@_by_step
def nested_function_that_holds_a_batch() -> None:
    training, callbacks = Training(), []

    def make(inputs: Tensor) -> Any:
        def report() -> Tensor:
            return inputs.mean()

        return report

    for _ in training.steps():
        callbacks.append(make(batch()))


@_by_step
def caught_errors_in_a_list() -> None:
    training, errors = Training(), []

    def fail() -> None:
        held = batch()
        raise ValueError(held.shape)

    for _ in training.steps():
        try:
            fail()
        except ValueError as error:
            errors.append(error)


@_by_step
def error_chained_to_the_last() -> None:
    training, last = Training(), None
    for _ in training.steps():
        try:
            held = batch()
            raise RuntimeError(f"{held.shape}") from last
        except RuntimeError as error:
            error.held = held  # type: ignore[attr-defined]
            last = error


@_by_step
def objects_in_a_cycle() -> None:
    import gc

    gc.disable()
    training = Training()
    for _ in training.steps():
        node: dict[str, Any] = {"batch": batch()}
        node["self"] = node


@_by_step
def module_in_a_cycle() -> None:
    import gc

    gc.disable()
    training = Training()
    for _ in training.steps():
        module = nn.Linear(1024, 512, device="cuda")
        module.owner = [module]  # type: ignore[assignment]


@_by_step
def hook_that_appends() -> None:
    training, seen = Training(), []
    training.model.register_forward_hook(lambda _, args, output: seen.append(output.detach()))
    for _ in training.steps():
        pass


@_by_step
def hooks_registered_again_and_again() -> None:
    training = Training()
    for _ in training.steps():
        held = batch()
        training.model[0].register_forward_hook(lambda *_, held=held: None)  # type: ignore[index]


@_by_step
def attribute_of_the_model() -> None:
    training = Training()
    training.model.history = []  # type: ignore[assignment]
    for _ in training.steps():
        training.model.history.append(batch())  # type: ignore[operator, union-attr]


@_by_step
def cache_of_functools() -> None:
    @functools.cache
    def mask(step: int) -> Tensor:
        return torch.full((1024, 512), float(step), device="cuda")

    training = Training()
    for number in training.steps():
        mask(number)


@_by_step
def default_argument_that_gathers() -> None:
    def note(value: Tensor, seen: list[Tensor] = []) -> None:  # noqa: B006
        seen.append(value)

    training = Training()
    for _ in training.steps():
        note(batch())


@_by_step
def class_attribute_that_gathers() -> None:
    class Log:
        seen: list[Tensor] = []  # noqa: RUF012

    training = Training()
    for _ in training.steps():
        Log.seen.append(batch())


@_by_step
def generators_left_suspended() -> None:
    def pieces() -> Any:
        inputs = batch()
        yield inputs.shape
        yield inputs

    training, open_ones = Training(), []
    for _ in training.steps():
        one = pieces()
        next(one)
        open_ones.append(one)


@_by_step
def gradients_kept() -> None:
    training, norms = Training(net(layers=3)), []
    for _ in training.steps():
        norms.append([parameter.grad.clone() for parameter in training.model.parameters()])


@_by_step
def weights_kept() -> None:
    training, states = Training(net(layers=3)), []
    for _ in training.steps():
        states.append({name: value.clone() for name, value in training.model.state_dict().items()})


@_by_step
def hidden_state_never_detached() -> None:
    cell = nn.GRUCell(512, 512).cuda()
    optimizer, hidden = torch.optim.SGD(cell.parameters(), lr=1e-3), torch.zeros(1024, 512, device="cuda")
    for _ in itertools.count():
        hidden = cell(batch(), hidden)
        optimizer.zero_grad()
        hidden.mean().backward(retain_graph=True)
        optimizer.step()


@_by_step
def graph_of_gradients_kept() -> None:
    training, penalties = Training(), []
    for _ in itertools.count():
        loss = training.loss()
        gradients = torch.autograd.grad(loss, list(training.model.parameters()), create_graph=True)
        penalties.append(sum(gradient.square().sum() for gradient in gradients))
        training.step()


@_by_step
def accumulated_losses_of_a_gan() -> None:
    generator, critic = Training(), Training()
    total: Any = 0.0
    for _ in itertools.count():
        fake = generator.model(batch())
        critic.optimizer.zero_grad()
        critic.model(fake.detach()).mean().backward()
        critic.optimizer.step()
        loss = critic.model(fake).mean()
        generator.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        generator.optimizer.step()
        total = total + loss


@_by_step
def a_leak_beside_batches_of_any_length() -> None:
    training, kept = Training(), []
    lengths = itertools.cycle([512, 1024, 768, 256, 896])
    for length in lengths:
        training.step(length)
        kept.append(batch())


@_by_step
def two_lines_that_keep() -> None:
    training, inputs, outputs = Training(), [], []
    for _ in training.steps():
        inputs.append(batch())
        outputs.append(batch(512) + 1)


@_by_step
def accumulation_that_keeps_each_batch() -> None:
    training, seen = Training(), []
    for _ in itertools.count():
        for _piece in range(4):
            inputs = batch(512)
            training.model(inputs).mean().backward()
            seen.append(inputs)
        training.optimizer.step()
        training.optimizer.zero_grad()


# -- Once an epoch --------------------------------------------------------------------------------------------


@_by_epoch
def a_batch_each_epoch() -> None:
    training, kept = Training(), []
    for number in training.steps():
        if number % EPOCH == 0:
            kept.append(batch())


@_by_epoch
def a_copy_of_the_model_each_epoch() -> None:
    training, copies = Training(net(layers=3)), []
    for number in training.steps():
        if number % EPOCH == 0:
            copies.append(copy.deepcopy(training.model))


@_by_epoch
def a_checkpoint_each_epoch() -> None:
    training, saved = Training(net(layers=3)), []
    for number in training.steps():
        if number % EPOCH == 0:
            saved.append({name: value.clone() for name, value in training.model.state_dict().items()})


@_by_epoch
def the_last_output_of_each_epoch() -> None:
    training, outputs = Training(), {}
    for number in training.steps():
        output = training.model(batch())
        if number % EPOCH == 0:
            outputs[number // EPOCH] = output.detach()


@_by_epoch
def a_buffer_for_each_epoch_in_a_closure() -> None:
    training, schedules = Training(), []
    for number in training.steps():
        if number % EPOCH == 0:
            noise = batch()
            schedules.append(lambda noise=noise: noise.sum())


@_by_epoch
def an_error_of_each_epoch() -> None:
    training, errors = Training(), []

    def fail() -> None:
        held = batch()
        raise ValueError(held.shape)

    for number in training.steps():
        if number % EPOCH == 0:
            try:
                fail()
            except ValueError as error:
                errors.append(error)


# -- In evaluation --------------------------------------------------------------------------------------------


@_in_evaluation
def running_loss_with_its_graph() -> None:
    training = Training()
    for number in training.steps():
        if number % 2 == 0:
            total = torch.zeros((), device="cuda")
            for _ in range(PASSES):
                total = total + training.model(batch()).square().mean()
            del total


@_in_evaluation
def outputs_in_a_list_that_nobody_empties() -> None:
    training, outputs = Training(), []
    for number in training.steps():
        if number % 2 == 0:
            with torch.no_grad():
                for _ in range(PASSES):
                    outputs.append(training.model(batch()))


@_in_evaluation
def features_gathered_by_a_hook() -> None:
    training, features = Training(), []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        if not module.training:
            features.append(output.detach())

    training.model[0].register_forward_hook(keep)  # type: ignore[index]
    for number in training.steps():
        if number % 2 == 0:
            training.model.eval()
            with torch.no_grad():
                for _ in range(PASSES):
                    training.model(batch())
            training.model.train()


@_in_evaluation
def a_metric_that_is_never_reset() -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def update(self, values: Tensor) -> None:
            self.seen.append(values)

    training, metric = Training(), Metric()
    for number in training.steps():
        if number % 2 == 0:
            for _ in range(PASSES):
                metric.update(training.model(batch()).detach())


@_in_evaluation
def predictions_gathered_with_their_graphs() -> None:
    training = Training()
    for number in training.steps():
        if number % 2 == 0:
            predictions = [training.model(batch()) for _ in range(PASSES)]
            torch.cat(predictions).mean()
            del predictions


@_in_evaluation
def inputs_that_a_cache_keeps() -> None:
    training, cache = Training(), {}
    for number in training.steps():
        if number % 2 == 0:
            with torch.inference_mode():
                for index in range(PASSES):
                    inputs = cache[number, index] = batch()
                    training.model(inputs)


# -- On the host ----------------------------------------------------------------------------------------------


@_on_host
def arrays_in_a_list() -> None:
    training, arrays = Training(), []
    for _ in training.steps():
        arrays.append(np.ones(1 << 18))


@_on_host
def strings_in_a_log() -> None:
    training, log = Training(), []
    for number in training.steps():
        log.append(str(number) * (1 << 18))


@_on_host
def records_in_a_dictionary() -> None:
    training, records = Training(), {}
    for number in training.steps():
        records[number] = [float(index) for index in range(20_000)]


@_on_host
def images_kept_by_closures() -> None:
    training, drawers = Training(), []
    for _ in training.steps():
        image = np.zeros((256, 256, 3))
        drawers.append(lambda image=image: image.sum())
