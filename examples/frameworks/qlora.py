"""Fine-tune low-rank adapters over a 4-bit base (QLoRA), with bitsandbytes or torchao.

Usage:

    python qlora.py                                         # the shape of Llama 2 70B, NF4, batch 1 x 1024
    python qlora.py --size 8b --batch-size 4 --optimizer paged
    python qlora.py --size 8b --base int8
    python qlora.py --checkpoint PATH                       # your own weights instead of random ones
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

SIZES = {
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
BASES = ("nf4", "fp4", "int8", "torchao-nf4")


def parse_args():
    parser = argparse.ArgumentParser(description="Fine-tune low-rank adapters over a 4-bit base.")
    parser.add_argument("--size", choices=sorted(SIZES), default="70b")
    parser.add_argument("--checkpoint", help="a folder with weights; without, random ones of the size")
    parser.add_argument("--base", choices=BASES, default="nf4")
    parser.add_argument("--no-double-quantization", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--optimizer", choices=["adamw", "8bit", "paged"], default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(args):
    """The base on the card, loaded as transformers loads a checkpoint: weight by weight, each quantised there."""
    options = {"dtype": torch.bfloat16, "device_map": {"": 0}}
    if args.base == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif args.base in ("nf4", "fp4"):
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=args.base,
            bnb_4bit_use_double_quant=not args.no_double_quantization,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if args.checkpoint:
        return LlamaForCausalLM.from_pretrained(args.checkpoint, **options)
    config = LlamaConfig(vocab_size=32000, **SIZES[args.size])
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    weights = model.to_empty(device="cpu").state_dict()
    for weight in weights.values():
        nn.init.normal_(weight, std=0.02)
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, **options)


def quantize_with_torchao(model):
    """Turn the weights of the decoder's linear layers into torchao's NF4 tensors, ready to be trained around."""
    from torchao.quantization import NF4Tensor

    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(NF4Tensor.from_tensor(module.weight, 64, 256), requires_grad=False)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_optimizer(name, parameters):
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=2e-4)
    import bitsandbytes

    if name == "paged":
        return bitsandbytes.optim.PagedAdamW32bit(parameters, lr=2e-4)
    return bitsandbytes.optim.AdamW8bit(parameters, lr=2e-4)


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    model = load(args)
    model.config.use_cache = False
    if args.base == "torchao-nf4":
        model = quantize_with_torchao(model)
    print(f"base {torch.cuda.memory_allocated()} bytes, {torch.cuda.max_memory_allocated()} while loading")
    if args.base != "torchao-nf4":  # whose tensors PEFT would turn into float32 ones
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(
        model,
        LoraConfig(
            r=args.rank,
            lora_alpha=2 * args.rank,
            lora_dropout=0.05,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    )
    model.print_trainable_parameters()
    print(f"with adapters {torch.cuda.memory_allocated()} bytes")
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(args.optimizer, trainable)
    for step in range(args.steps):
        tokens = torch.randint(3, 32000, (args.batch_size, args.seq_len)).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
