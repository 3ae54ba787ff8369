"""Small workloads whose gradients are easily got wrong: coupled examples, uneven masks, steps of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vramfit.workload import State, Workload

WIDTH, LENGTH, WORDS, EXAMPLES = 32, 64, 97, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A workload, and what is known of it.

    Attributes:
        make: the workload.
        couples: whether its loss or model couples examples, so that micro-batches would be wrong.
        on_card: whether it is planned for a virtual card; else its values decide what it does, and it is planned for
            the CPU.
    """

    make: Callable[[], Workload]
    couples: bool = False
    on_card: bool = True


def _workload(
    model: Callable[[], nn.Module],
    batch: Callable[..., Any],
    loss: Callable[[Any, Any], torch.Tensor] | None,
    step: Callable[[State, Any], Any] | None = None,
    *,
    examples: int = EXAMPLES,
) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return model().train()

    return Workload(
        model=seeded, batch=batch, sizes={"batch_size": examples}, loss=loss, optimizer=_adamw, step=step
    )


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _own(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model(**batch).loss
    return found


# -- losses of one's own ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer that keeps four times its input, with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class CoupledInTraining(nn.Module):
    """Takes the mean over the batch away, in training alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True) if self.training else x


def _layers(*more: nn.Module) -> nn.Module:
    return nn.Sequential(Layer(), Layer(), *more, Layer())


def _vectors(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, LENGTH, WIDTH), torch.randn(batch_size, LENGTH, WIDTH)


def _masked_vectors(batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = torch.randint(2, LENGTH + 1, (batch_size, 1))
    return (*_vectors(batch_size), (torch.arange(LENGTH) < lengths).float())


def _squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _masked_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    off = (model(batch[0]) - batch[1]).square().mean(-1)
    return (off * batch[2]).sum() / batch[2].sum()


def _with_variance(model: nn.Module, batch: Any) -> torch.Tensor:
    found = model(batch[0])
    deviation = (found.mean(1).var(0) + 1e-4).sqrt()
    return F.mse_loss(found, batch[1]) + F.relu(1 - deviation).mean()


def _batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def _images(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, 16, 16), torch.randint(10, (batch_size,))


def _classes(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Recurrent(nn.Module):
    """Two LSTM layers over words, and the classes of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 10)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(self.embed(words))[0][:, -1])
        return found


def _words_and_classes(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (batch_size, LENGTH)), torch.randint(10, (batch_size,))


class Adversaries(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = _layers(), nn.Sequential(*_layers(), nn.Linear(WIDTH, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.critic(self.generator(noise))
        return found


def _adversarial_step(state: State, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    model: Any = state.model
    assert state.optimizer is not None
    real, noise = batch
    false = model.critic(model.generator(noise).detach())
    critic = F.softplus(-model.critic(real)).mean() + F.softplus(false).mean()
    critic.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    generator = F.softplus(-model(noise)).mean()
    generator.backward()
    model.critic.zero_grad()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return critic.detach() + generator.detach()


# -- models of transformers ------------------------------------------------------------------------------------------


def _tokens(batch_size: int, *, ignored: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    if not ignored:
        return {"input_ids": tokens, "labels": tokens.clone()}
    lengths = torch.randint(4, LENGTH + 1, (batch_size, 1))
    mask = torch.arange(LENGTH) < lengths
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def _mixture() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    made: nn.Module = MixtralForCausalLM(config)
    return made


def _clip(width: int, layers: int) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    common = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    common |= {"num_attention_heads": 2}
    config = CLIPConfig(
        text_config=common
        | {"vocab_size": WORDS, "eos_token_id": WORDS - 1, "max_position_embeddings": LENGTH},
        vision_config=common | {"image_size": 32, "patch_size": 8},
        projection_dim=width,
    )
    made: nn.Module = CLIPModel(config)
    return made


def _captions(batch_size: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(1, WORDS, (batch_size, LENGTH)),
        "pixel_values": torch.randn(batch_size, 3, 32, 32),
    }


def _contrastive(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model(**batch, return_loss=True).loss
    return found


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        vocab_size=WORDS,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    made: nn.Module = WhisperForConditionalGeneration(config)
    return made


def _speech(batch_size: int) -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.randn(batch_size, 8, 2 * LENGTH),
        "labels": _tokens(batch_size, ignored=True)["labels"],
    }


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=WORDS, decoder_start_token_id=0
    )
    made: nn.Module = T5ForConditionalGeneration(config)
    return made


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    adapted = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    made: nn.Module = get_peft_model(LlamaForCausalLM(config), adapted)
    return made


def _detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=6,
        num_labels=5,
    )
    made: nn.Module = DetrForObjectDetection(config)
    return made


def _boxes(batch_size: int) -> dict[str, Any]:
    labels = []
    for _ in range(batch_size):
        count = int(torch.randint(1, 5, ()))
        middle = 0.3 + 0.4 * torch.rand(count, 2)
        sides = torch.full((count, 2), 0.2)
        labels.append({"class_labels": torch.randint(5, (count,)), "boxes": torch.cat([middle, sides], 1)})
    return {"pixel_values": torch.randn(batch_size, 3, 64, 64), "labels": labels}


SUBJECTS: dict[str, Subject] = {
    "mean": Subject(make=lambda: _workload(_layers, _vectors, _squares)),
    "masked mean, ragged": Subject(make=lambda: _workload(_layers, _masked_vectors, _masked_mean)),
    "variance regularisation": Subject(
        make=lambda: _workload(_layers, _vectors, _with_variance), couples=True
    ),
    "coupled in training": Subject(
        make=lambda: _workload(lambda: _layers(CoupledInTraining()), _vectors, _squares), couples=True
    ),
    "batch norm": Subject(make=lambda: _workload(_batch_norm, _images, _classes), couples=True),
    "LSTM": Subject(make=lambda: _workload(Recurrent, _words_and_classes, _classes)),
    "GAN": Subject(make=lambda: _workload(Adversaries, _vectors, None, _adversarial_step), couples=True),
    "mixture of experts, balanced": Subject(make=lambda: _workload(_mixture, _tokens, _own), couples=True),
    "CLIP, 1 + 1 layers": Subject(
        make=lambda: _workload(partial(_clip, 16, 1), _captions, _contrastive), couples=True
    ),
    "CLIP, 4 + 4 layers": Subject(
        make=lambda: _workload(partial(_clip, 64, 4), _captions, _contrastive), couples=True
    ),
    "Whisper": Subject(make=lambda: _workload(_whisper, _speech, _own)),
    "T5": Subject(make=lambda: _workload(_t5, partial(_tokens, ignored=True), _own)),
    "Llama with LoRA": Subject(make=lambda: _workload(_lora, partial(_tokens, ignored=True), _own)),
    "DETR": Subject(make=lambda: _workload(_detr, _boxes, _own, examples=16), on_card=False),
}
"""By name, in the order of the table."""
