"""Four trainings that do not fit the card that people have, for vramfit plan.

vramfit plan examples/plans/workloads.py:bert_large --gpu "RTX 4090" --budget 12GiB -o bert_large.toml
"""

import torch
import torch.nn.functional as F
from torch import nn

from vramfit import Workload


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def labelled_loss(model, batch):
    return model(**batch).loss


def llama(num_hidden_layers=32, hidden_size=4096, intermediate_size=11008, num_attention_heads=32):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_batch(batch_size, sequence_length):
    tokens = torch.randint(32000, (batch_size, sequence_length))
    return {"input_ids": tokens, "labels": tokens}


llama_7b = Workload(
    model=llama,
    batch=llama_batch,
    sizes={"batch_size": 1, "sequence_length": 2048},
    loss=labelled_loss,
    optimizer=adamw,
)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=2
    )
    return BertForSequenceClassification(config)


def bert_batch(batch_size, sequence_length):
    return {
        "input_ids": torch.randint(30522, (batch_size, sequence_length)),
        "attention_mask": torch.ones(batch_size, sequence_length, dtype=torch.long),
        "labels": torch.randint(2, (batch_size,)),
    }


bert_large = Workload(
    model=bert,
    batch=bert_batch,
    sizes={"batch_size": 32, "sequence_length": 512},
    loss=labelled_loss,
    optimizer=adamw,
)


def unet():
    from monai.networks.nets import BasicUNet

    # The first and the last level have 16 channels at full resolution: 2 GiB for each of their results in float32.
    return BasicUNet(spatial_dims=3, in_channels=1, out_channels=4, features=(16, 32, 64, 128, 256, 16))


def volumes(batch_size, side, depth):
    shape = (batch_size, side, side, depth)
    return torch.zeros(batch_size, 1, side, side, depth), torch.zeros(shape, dtype=torch.long)


def voxel_loss(model: nn.Module, batch):
    volume, label = batch
    return F.cross_entropy(model(volume), label)


unet_3d = Workload(
    model=unet,
    batch=volumes,
    sizes={"batch_size": 1, "side": 512, "depth": 128},
    loss=voxel_loss,
    optimizer=adamw,
)


def gpt2(n_layer=48):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=n_layer, n_head=25, n_embd=1600, use_cache=False))


def gpt2_batch(batch_size, sequence_length):
    tokens = torch.randint(50257, (batch_size, sequence_length))
    return {"input_ids": tokens, "labels": tokens}


gpt2_xl = Workload(
    model=gpt2,
    batch=gpt2_batch,
    sizes={"batch_size": 64, "sequence_length": 1024},
    loss=labelled_loss,
    optimizer=adamw,
)
