"""Shapes of Llama decoders, for the examples beside this file."""

from transformers import LlamaConfig

SHAPES = {  # width, width within feed-forward, layers, heads, heads of keys and values, vocabulary
    "tiny": (256, 688, 2, 4, 4, 32000),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "70b": (8192, 28672, 80, 64, 8, 128256),
}


def llama(size: str) -> LlamaConfig:
    """The configuration of a decoder of that size, to be trained: without a key-value cache."""
    width, inner, layers, heads, kv_heads, vocabulary = SHAPES[size]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=size == "1b",  # as Llama 3.2
        use_cache=False,
    )
