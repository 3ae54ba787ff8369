"""Stands in for tiktoken, whose vocabularies are downloaded: words as tokens, the sizes of its encodings."""

from __future__ import annotations

import re
import zlib

_SIZES = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}
_PIECES = re.compile(r" ?\w+|\s+|[^\w\s]")


class Encoding:
    """An encoding of ``n_vocab`` tokens: single bytes first, special ones last, words by a checksum in between."""

    def __init__(self, name, **kwargs):
        self.name = name
        specials = kwargs.get("special_tokens")
        self.n_vocab = _SIZES.get(name) or len(kwargs["mergeable_ranks"]) + len(specials)
        self.eot_token = self.n_vocab - 1
        self._special_tokens = specials or {"<|endoftext|>": self.eot_token}
        self.max_token_value = self.n_vocab - 1
        self.special_tokens_set = set(self._special_tokens)
        self._texts = {token: text for text, token in self._special_tokens.items()}

    def encode(self, text, *, allowed_special=(), **_options):
        for special, token in self._special_tokens.items():
            if special in text and (allowed_special == "all" or special in allowed_special):
                before, _, after = text.partition(special)
                return [
                    *self.encode_ordinary(before),
                    token,
                    *self.encode(after, allowed_special=allowed_special),
                ]
        return self.encode_ordinary(text)

    def encode_ordinary(self, text):
        return [self._token(piece) for piece in _PIECES.findall(text)]

    def _token(self, piece):
        if len(piece) == 1 and ord(piece) < 256:
            return ord(piece)
        token = 256 + zlib.crc32(piece.encode()) % (self.n_vocab - 1256)
        self._texts[token] = piece
        return token

    def encode_single_token(self, text):
        return self._special_tokens[text] if text in self._special_tokens else self._token(text)

    def encode_batch(self, texts, **kwargs):
        return [self.encode(text, **kwargs) for text in texts]

    def encode_ordinary_batch(self, texts, **_options):
        return [self.encode_ordinary(text) for text in texts]

    def decode(self, tokens):
        return "".join(self._text(int(token)) for token in tokens)

    def _text(self, token):
        return self._texts.get(token) or (chr(token) if token < 256 else f" t{token}")

    def decode_single_token_bytes(self, token):
        return self._text(int(token)).encode()


def get_encoding(name):
    """The encoding of a name."""
    return Encoding(name)


def encoding_for_model(_model):
    """GPT-2's, whatever the model."""
    return Encoding("gpt2")
