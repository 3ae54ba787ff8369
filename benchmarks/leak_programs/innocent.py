"""Innocent programs: what they hold rises at first, comes and goes, or fills up, and none of it is a leak."""

from __future__ import annotations

import collections
import copy
import io
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from leak_programs import EPOCH, PASSES, ROWS, WIDTH, Plant, Training, batch, net, planted

_innocent = planted(Plant.INNOCENT)

# -- Optimizers and how they are stepped --------------------------------------------------------------------------


def _with_optimizer(make: Any, **settings: Any) -> None:
    training = Training(make=lambda parameters, lr: make(parameters, lr=lr, **settings))
    for _ in training.steps():
        pass


@_innocent
def sgd() -> None:
    _with_optimizer(torch.optim.SGD)


@_innocent
def sgd_with_momentum() -> None:
    _with_optimizer(torch.optim.SGD, momentum=0.9)


@_innocent
def adam() -> None:
    _with_optimizer(torch.optim.Adam)


@_innocent
def adamw_in_a_loop() -> None:
    _with_optimizer(torch.optim.AdamW, foreach=False)


@_innocent
def fused_adamw() -> None:
    _with_optimizer(torch.optim.AdamW, fused=True)


@_innocent
def rmsprop() -> None:
    _with_optimizer(torch.optim.RMSprop, momentum=0.9)


@_innocent
def adagrad() -> None:
    _with_optimizer(torch.optim.Adagrad)


@_innocent
def lbfgs_with_a_closure() -> None:
    training = Training(
        make=lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr, max_iter=3, history_size=3)
    )

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss

    for _ in itertools.count():
        training.optimizer.step(closure)


@_innocent
def gradients_zeroed_in_place() -> None:
    training = Training()
    for _ in itertools.count():
        training.optimizer.zero_grad(set_to_none=False)
        training.loss().backward()
        training.optimizer.step()


@_innocent
def gradients_zeroed_at_the_end() -> None:
    training = Training()
    for _ in itertools.count():
        training.loss().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


@_innocent
def gradients_never_zeroed() -> None:
    training = Training()
    for _ in itertools.count():
        training.loss().backward()
        training.optimizer.step()


@_innocent
def gradients_accumulated() -> None:
    training = Training()
    for _ in itertools.count():
        for _piece in range(4):
            training.loss(ROWS // 4).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


@_innocent
def gradients_clipped() -> None:
    training = Training()
    for _ in itertools.count():
        training.optimizer.zero_grad()
        training.loss().backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()


@_innocent
def an_optimizer_for_each_half() -> None:
    model = net(layers=4)
    optimizers = [
        torch.optim.SGD(model[:4].parameters(), 0.1, 0.9),
        torch.optim.AdamW(model[4:].parameters()),
    ]
    for _ in itertools.count():
        model(batch()).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@_innocent
def optimizers_in_the_backward_pass() -> None:
    model = net(layers=3)
    optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in itertools.count():
        model(batch()).mean().backward()


@_innocent
def an_optimizer_that_never_steps() -> None:
    training, other = Training(), Training()
    for _ in training.steps():
        assert other.optimizer is not None


# -- Several networks ---------------------------------------------------------------------------------------------


@_innocent
def gan() -> None:
    generator, critic = Training(), Training()
    for _ in itertools.count():
        fake = generator.model(batch())
        critic.optimizer.zero_grad()
        (critic.model(batch()).mean() - critic.model(fake.detach()).mean()).backward()
        critic.optimizer.step()
        generator.optimizer.zero_grad()
        critic.model(fake).mean().backward()
        generator.optimizer.step()


@_innocent
def gan_that_validates_in_its_first_round() -> None:
    generator, critic = Training(), Training(net(layers=4))

    def features(values: Tensor) -> list[Tensor]:
        kept = []
        for layer in critic.model:  # type: ignore[attr-defined]
            values = layer(values)
            kept.append(values)
        return kept

    for number in itertools.count():
        real = batch()
        fake = generator.model(batch())
        critic.optimizer.zero_grad()
        (features(real)[-1] - features(fake.detach())[-1]).mean().backward()
        critic.optimizer.step()
        generator.optimizer.zero_grad()
        of_real, of_fake = features(real), features(fake)
        sum((one - two).abs().mean() for one, two in zip(of_real, of_fake, strict=True)).backward()  # type: ignore[union-attr]
        generator.optimizer.step()
        if number == 0:
            with torch.no_grad():
                of_real = of_fake = features(real[:8])


@_innocent
def five_steps_of_a_critic() -> None:
    generator, critic = Training(), Training()
    for _ in itertools.count():
        for _critic in range(5):
            critic.optimizer.zero_grad()
            critic.model(generator.model(batch()).detach()).mean().backward()
            critic.optimizer.step()
        generator.optimizer.zero_grad()
        critic.model(generator.model(batch())).mean().backward()
        generator.optimizer.step()


@_innocent
def gradient_penalty() -> None:
    critic = Training()
    for _ in itertools.count():
        inputs = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(critic.model(inputs).sum(), inputs, create_graph=True)
        critic.optimizer.zero_grad()
        (gradient.square().sum() + critic.model(inputs).mean()).backward()
        critic.optimizer.step()


@_innocent
def teacher_and_student() -> None:
    teacher, student = net(layers=4).eval(), Training()
    for _ in itertools.count():
        inputs = batch()
        with torch.no_grad():
            wanted = teacher(inputs)
        student.optimizer.zero_grad()
        (student.model(inputs) - wanted).square().mean().backward()
        student.optimizer.step()


@_innocent
def momentum_contrast_with_a_queue() -> None:
    training, keys = Training(), net()
    queue, at = torch.zeros(8 * ROWS, WIDTH, device="cuda"), 0
    for _ in training.steps():
        with torch.no_grad():
            queue[at : at + ROWS] = keys(batch())
        at = (at + ROWS) % len(queue)


# -- Precision and schedules --------------------------------------------------------------------------------------


@_innocent
def bfloat16_autocast() -> None:
    training = Training()
    for _ in itertools.count():
        training.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = training.loss()
        loss.backward()
        training.optimizer.step()


@_innocent
def float16_with_a_scaler() -> None:
    training, scaler = Training(), torch.amp.GradScaler("cuda")
    for _ in itertools.count():
        training.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = training.loss()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()


def _scheduled(make: Any) -> None:
    training = Training()
    schedule = make(training.optimizer)
    for _ in training.steps():
        schedule.step()


@_innocent
def cosine_schedule() -> None:
    _scheduled(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))


@_innocent
def linear_warm_up() -> None:
    _scheduled(lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5))


@_innocent
def schedule_that_watches_the_loss() -> None:
    training = Training()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer, patience=2)
    for _ in itertools.count():
        schedule.step(float(training.step().detach()))


@_innocent
def averaged_weights_from_the_start() -> None:
    training = Training()
    average = torch.optim.swa_utils.AveragedModel(training.model)
    for _ in training.steps():
        average.update_parameters(training.model)


@_innocent
def averaged_weights_from_the_third_step() -> None:
    training, average = Training(), None
    for number in training.steps():
        if number == 3:
            average = copy.deepcopy(training.model)
        elif average is not None:
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), training.model.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)


@_innocent
def layers_unfrozen_at_the_fourth_step() -> None:
    model = net(layers=4)
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    training = Training(model)
    for number in training.steps():
        if number == 4:
            for parameter in model.parameters():
                parameter.requires_grad_(True)


# -- Batches ------------------------------------------------------------------------------------------------------


def _of_lengths(lengths: Any) -> None:
    training = Training()
    for rows in lengths:
        training.step(rows)


@_innocent
def batches_of_any_length() -> None:
    _of_lengths(itertools.cycle([512, 1024, 768, 256, 1000, 333, 897]))


@_innocent
def batches_that_become_longer() -> None:
    _of_lengths(256 * number for number in itertools.count(1))


@_innocent
def batches_that_become_shorter() -> None:
    _of_lengths(max(64, 4096 - 192 * number) for number in itertools.count())


@_innocent
def a_short_last_batch() -> None:
    _of_lengths(itertools.cycle([1024, 1024, 1024, 100]))


@_innocent
def a_buffer_as_large_as_the_largest_batch() -> None:
    training, buffer = Training(), batch(1)
    for rows in itertools.cycle([256, 1024, 512, 2048, 300, 1500, 700]):
        training.step(rows)
        if rows > len(buffer):
            buffer = torch.empty(rows, WIDTH, device="cuda")


@_innocent
def batches_from_a_loader() -> None:
    training = Training()
    loader = DataLoader(TensorDataset(torch.zeros(EPOCH * 64, WIDTH)), 64)
    while True:
        for (inputs,) in loader:
            training.optimizer.zero_grad()
            training.model(inputs.cuda(non_blocking=True)).mean().backward()
            training.optimizer.step()


@_innocent
def a_batch_ahead() -> None:
    training, following = Training(), batch()
    for _ in itertools.count():
        inputs, following = following, batch()
        training.optimizer.zero_grad()
        training.model(inputs).mean().backward()
        training.optimizer.step()


# -- What is held for a while -------------------------------------------------------------------------------------


@_innocent
def the_last_loss_is_held() -> None:
    training, loss = Training(), None
    for _ in itertools.count():
        loss = training.loss()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()


@_innocent
def numbers_of_losses_in_a_list() -> None:
    training, losses = Training(), []
    for _ in itertools.count():
        losses.append(float(training.step().detach()))


@_innocent
def small_losses_on_the_card_in_a_list() -> None:
    training, losses = Training(), []
    for _ in itertools.count():
        losses.append(training.step().detach())


@_innocent
def a_cache_that_fills_in_three_steps() -> None:
    training, masks = Training(), {}
    for number in training.steps():
        if number % 3 not in masks:
            masks[number % 3] = batch()


@_innocent
def a_ring_of_three() -> None:
    training, ring = Training(), collections.deque(maxlen=3)
    for _ in training.steps():
        ring.append(batch())


@_innocent
def a_list_emptied_each_epoch() -> None:
    training, outputs = Training(), []
    for number in training.steps():
        outputs.append(batch())
        if number % EPOCH == 0:
            outputs.clear()


@_innocent
def a_replay_buffer() -> None:
    training = Training()
    memory = torch.zeros(16 * ROWS, WIDTH, device="cuda")
    for number in training.steps():
        at = number % 16 * ROWS
        memory[at : at + ROWS] = batch()


@_innocent
def workspaces_made_in_the_second_step() -> None:
    training, scratch = Training(), []
    for number in training.steps():
        if number == 2:
            scratch = [batch() for _ in range(4)]
        for one in scratch:
            one.zero_()


@_innocent
def a_hook_that_keeps_the_last_output() -> None:
    training, seen = Training(), {}
    training.model[0].register_forward_hook(lambda _, args, output: seen.update(last=output.detach()))  # type: ignore[index]
    for _ in training.steps():
        pass


@_innocent
def the_best_model_is_kept() -> None:
    training, best = Training(), None
    for number in training.steps():
        if number % EPOCH == 0:
            best = copy.deepcopy(training.model)
    assert best is not None


@_innocent
def checkpoints_in_a_file() -> None:
    training = Training()
    for number in training.steps():
        if number % EPOCH == 0:
            torch.save({"model": training.model.state_dict()}, io.BytesIO())


@_innocent
def checkpoints_on_the_host() -> None:
    training, saved = Training(), []
    for number in training.steps():
        if number % EPOCH == 0:
            saved.append({name: value.cpu() for name, value in training.model.state_dict().items()})


@_innocent
def an_error_caught_in_each_step() -> None:
    training = Training()
    for _ in training.steps():
        try:
            held = batch()
            raise ValueError(held.shape)
        except ValueError:
            pass


# -- Evaluations --------------------------------------------------------------------------------------------------


def _evaluated(every: int, evaluate: Any, context: Any = torch.no_grad) -> None:
    training = Training()
    for number in training.steps():
        if number % every == 0:
            training.model.eval()
            with context():
                evaluate(training.model)
            training.model.train()


@_innocent
def validation_in_every_second_step() -> None:
    _evaluated(2, lambda model: [float(model(batch()).mean()) for _ in range(PASSES)])


@_innocent
def validation_once_an_epoch() -> None:
    _evaluated(
        EPOCH, lambda model: [float(model(batch()).mean()) for _ in range(PASSES)], torch.inference_mode
    )


@_innocent
def validation_with_outputs_on_the_host() -> None:
    _evaluated(2, lambda model: torch.cat([model(batch(64)).cpu() for _ in range(PASSES)]).mean())


@_innocent
def validation_with_small_sums_on_the_card() -> None:
    _evaluated(2, lambda model: sum(model(batch()).mean() for _ in range(PASSES)))


@_innocent
def validation_of_larger_batches() -> None:
    _evaluated(2, lambda model: [model(batch(4 * ROWS)).mean() for _ in range(PASSES)])


@_innocent
def validation_that_keeps_its_last_output() -> None:
    held: dict[str, Tensor] = {}
    _evaluated(2, lambda model: [held.update(last=model(batch())) for _ in range(PASSES)])


@_innocent
def generation_with_a_growing_cache() -> None:
    def generate(model: nn.Module) -> None:
        cache = model(batch(64))
        for _ in range(PASSES):
            cache = torch.cat([cache, model(batch(64))])

    _evaluated(2, generate)


# -- Other networks -----------------------------------------------------------------------------------------------


@_innocent
def convolutions_with_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for _ in itertools.count():
        optimizer.zero_grad()
        model(torch.randn(16, 3, 64, 64, device="cuda")).mean().backward()
        optimizer.step()


@_innocent
def transformer_encoder() -> None:
    model = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in itertools.count():
        optimizer.zero_grad()
        model(torch.randn(8, 64 + 16 * (number % 4), 256, device="cuda")).mean().backward()
        optimizer.step()


@_innocent
def embeddings_and_a_recurrent_net() -> None:
    words, model = nn.Embedding(5000, 256).cuda(), nn.LSTM(256, 256, batch_first=True).cuda()
    optimizer = torch.optim.AdamW([*words.parameters(), *model.parameters()])
    state = None
    for _ in itertools.count():
        output, state = model(words(torch.randint(5000, (32, 64), device="cuda")), state)
        state = tuple(one.detach() for one in state)
        optimizer.zero_grad()
        output.mean().backward()
        optimizer.step()


@_innocent
def activations_recomputed() -> None:
    model = net(layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in itertools.count():
        optimizer.zero_grad()
        checkpoint(model, batch(), use_reentrant=False).mean().backward()
        optimizer.step()


@_innocent
def policy_gradient_over_an_episode() -> None:
    training = Training(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4)).cuda())
    for number in itertools.count():
        losses = []
        for _ in range(8 + number % 5):
            policy = torch.distributions.Categorical(logits=training.model(batch(256, 64)))
            losses.append(policy.log_prob(policy.sample()).mean())
        training.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        training.optimizer.step()


# -- Frameworks ---------------------------------------------------------------------------------------------------


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": torch.zeros(WIDTH), "labels": torch.zeros(WIDTH)}


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.net(inputs)
        return {"loss": (output - labels).square().mean(), "logits": output}


@_innocent
def trainer_of_transformers() -> None:
    import tempfile

    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            num_train_epochs=40,
            save_strategy="no",
            report_to="none",
            eval_strategy="epoch",
            disable_tqdm=True,
        )
        Trainer(_WithLoss(), settings, train_dataset=_Rows(), eval_dataset=_Rows()).train()


@_innocent
def lightning_with_validation() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, rows: list[Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(rows[0]).square().mean()
            return loss

        def validation_step(self, rows: list[Tensor], index: int) -> None:
            self.log("loss", self.net(rows[0]).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    rows = TensorDataset(torch.zeros(EPOCH * 64, WIDTH))
    trainer = lightning.Trainer(
        max_epochs=40,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(rows, 64), DataLoader(rows, 64))
