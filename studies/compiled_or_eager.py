"""What activations and temporaries take under ``torch.compile``, of what they take eagerly.

    python studies/compiled_or_eager.py              # nine models in two precisions: ten minutes
    python studies/compiled_or_eager.py llama vit    # some

Each model is trained for two steps on a virtual A100, eagerly and compiled whole. What stays between steps (parameters,
optimizer states) is the same and is left out; gradients are in both. From the range follows how far a peak may be off
where a program ran eagerly that is to be compiled (NOTE [Programs that ran eagerly]).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from vramfit import VirtualGPU

MIB = 1 << 20
CARD = "A100 80GB"

Made = tuple[nn.Module, Mapping[str, Tensor]]


def _tokens(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def _images(rows: int) -> Tensor:
    return torch.zeros(rows, 3, 224, 224)


def _gpt2() -> Made:
    config = transformers.GPT2Config(n_layer=4, n_embd=512, n_head=8)
    return transformers.GPT2LMHeadModel(config), {"input_ids": _tokens(8, 512)}


def _llama() -> Made:
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=32_000,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": _tokens(8, 512)}


def _bert() -> Made:
    config = transformers.BertConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048
    )
    return transformers.BertForMaskedLM(config), {"input_ids": _tokens(8, 512)}


def _t5() -> Made:
    config = transformers.T5Config(
        d_model=512, num_layers=3, num_heads=8, decoder_start_token_id=0, pad_token_id=0
    )
    inputs = {"input_ids": _tokens(8, 256), "labels": _tokens(8, 64)}
    return transformers.T5ForConditionalGeneration(config), inputs


def _vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": _images(32)}


def _swin() -> Made:
    config = transformers.SwinConfig(depths=[2, 2, 2, 2])
    return transformers.SwinForImageClassification(config), {"pixel_values": _images(16)}


def _resnet() -> Made:
    config = transformers.ResNetConfig(
        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], embedding_size=64, layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config), {"pixel_values": _images(32)}


def _convnext() -> Made:
    config = transformers.ConvNextConfig(depths=[2, 2, 3, 2], hidden_sizes=[64, 128, 256, 512])
    return transformers.ConvNextForImageClassification(config), {"pixel_values": _images(32)}


def _mlp() -> Made:
    blocks = [
        nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024), nn.LayerNorm(1024))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks), {"input": torch.zeros(4096, 1024)}


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "swin": _swin,
    "resnet": _resnet,
    "convnext": _convnext,
    "mlp": _mlp,
}


def peak_and_held(make: Callable[[], Made], *, half: bool, compiled: bool) -> tuple[int, int, set[str]]:
    """Bytes at the peak of a second step, bytes after it, and the codes of the run's warnings."""
    torch._dynamo.reset()
    with VirtualGPU(CARD) as gpu:
        model, inputs = make()
        model.cuda()
        batch = {name: value.cuda() for name, value in inputs.items()}
        optimizer = torch.optim.AdamW(model.parameters())
        run: Callable[..., Any] = torch.compile(model) if compiled else model
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                out = run(**batch)
            getattr(out, "logits", out).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        figures = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return *figures, {warning.code for warning in gpu.run.warnings}


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"one of {', '.join(MODELS)}; all by default"
    )
    names = parser.parse_args(arguments).models or list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}: there are {', '.join(MODELS)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("model", "precision", "eagerly, MiB", "compiled, MiB", "share", ""):
        table.add_column(head, justify="left" if head in ("model", "precision", "") else "right")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            for half in (False, True):
                eager, held, _ = peak_and_held(MODELS[name], half=half, compiled=False)
                peak, _, codes = peak_and_held(MODELS[name], half=half, compiled=True)
                table.add_row(
                    name,
                    "bfloat16" if half else "float32",
                    f"{(eager - held) / MIB:,.0f}",
                    f"{(peak - held) / MIB:,.0f}",
                    f"{(peak - held) / (eager - held):.2f}",
                    "ran eagerly in part" if "compile-ran-eagerly" in codes else "",
                )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
