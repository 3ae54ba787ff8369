"""Small models of transformers and diffusers with tokenizers, saved as the hub has them; weights are random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stranger_runs.makers.texts import prose

CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A chat template of the usual form."""


def _byte_pairs(folder: Path, size: int = 1000) -> int:
    """A byte-level BPE tokenizer as GPT-2 and Llama 3 have one, saved; returns how many tokens it has."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    specials = ["<s>", "</s>", "<unk>", "<pad>", "<mask>", "<|user|>", "<|assistant|>"]
    trained.train_from_iterator(
        prose(60_000, words=300).splitlines(), vocab_size=size, special_tokens=specials
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _word_pieces(folder: Path) -> int:
    """A WordPiece tokenizer as BERT has one, saved; returns how many tokens it has."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(prose(60_000, words=300).splitlines(), vocab_size=800)
    tokenizer = BertTokenizerFast(tokenizer_object=trained._tokenizer, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def llama(folder: Path, hidden: str = "512", layers: str = "4") -> None:
    """A small Llama with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = int(hidden)
    config = LlamaConfig(
        vocab_size=_byte_pairs(folder),
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=int(layers),
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=3,
    )
    _save(LlamaForCausalLM(config), folder)


def gpt2(folder: Path) -> None:
    """A GPT-2 of six layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = _byte_pairs(folder)
    _save(GPT2LMHeadModel(GPT2Config(vocab_size=tokens, n_layer=6, bos_token_id=0, eos_token_id=1)), folder)


def encoder(folder: Path, kind: str = "bert") -> None:
    """A BERT, DistilBERT or RoBERTa of six layers with a WordPiece tokenizer."""
    import transformers

    names = {"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta", "mpnet": "MPNet"}
    tokens = _word_pieces(folder)
    config = getattr(transformers, f"{names[kind]}Config")(vocab_size=tokens)
    if kind == "distilbert":
        config.n_layers = 6
    else:
        config.num_hidden_layers = 6
    _save(getattr(transformers, f"{names[kind]}ForMaskedLM")(config), folder)


def t5(folder: Path) -> None:
    """A small T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_byte_pairs(folder),
        d_model=256,
        d_ff=1024,
        num_layers=4,
        decoder_start_token_id=3,
        pad_token_id=3,
    )
    _save(T5ForConditionalGeneration(config), folder)


def vit(folder: Path, labels: str = "2") -> None:
    """A ViT of six layers for pictures of 224 pixels, and its processor."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    ViTImageProcessor().save_pretrained(folder)
    config = ViTConfig(num_hidden_layers=6, num_labels=int(labels))
    _save(ViTForImageClassification(config), folder)


def wav2vec2(folder: Path) -> None:
    """A Wav2Vec2 of four layers and its feature extractor."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForSequenceClassification

    Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    config = Wav2Vec2Config(
        num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024
    )
    _save(Wav2Vec2ForSequenceClassification(config), folder)


def stable_diffusion(folder: Path, side: str = "64") -> None:
    """A small Stable Diffusion: CLIP text encoder, autoencoder, U-Net, scheduler."""
    from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    tokenizer = folder.with_name(f"{folder.name}-tokenizer")
    tokens = _clip_tokenizer(tokenizer)
    text = CLIPTextConfig(
        vocab_size=tokens,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        projection_dim=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    unet = UNet2DConditionModel(
        sample_size=int(side) // 8,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=256,
        attention_head_dim=8,
        norm_num_groups=32,
    )
    pipeline = StableDiffusionPipeline(
        vae=_autoencoder(),
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer.from_pretrained(tokenizer),
        unet=unet,
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)


def _autoencoder() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32, 64, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=32,
    )


def timm_weights(folder: Path, name: str) -> None:
    """A hub cache with random weights of a model of timm, where timm looks for its pretrained ones."""
    import timm
    from safetensors.torch import save_file

    model = timm.create_model(name)
    place = folder / "hub" / f"models--{model.pretrained_cfg['hf_hub_id'].replace('/', '--')}"
    commit = "0" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    save_file(model.state_dict(), snapshot / "model.safetensors")


def autoencoder(folder: Path) -> None:
    """The autoencoder of a small Stable Diffusion."""
    _autoencoder().save_pretrained(folder)


def _clip_tokenizer(folder: Path) -> int:
    """CLIP's tokenizer: byte pairs with an end-of-word mark."""
    import json

    letters = [chr(code) for code in range(33, 127)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters), "th</w>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h</w>\n")
    specials = {"bos_token": words[0], "eos_token": words[1], "unk_token": words[1], "pad_token": words[1]}
    settings = {**specials, "tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(specials))
    return len(words)


MAKERS = (llama, gpt2, encoder, t5, vit, wav2vec2, timm_weights, autoencoder, stable_diffusion)
