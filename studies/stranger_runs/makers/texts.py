"""Text: English-like prose from a fixed list of words, plain, in the files of known sets, and as tokens."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import string
from pathlib import Path

import numpy as np

_SENTENCE = (
    "the king said that he would not go to sea while there was war at home and her father called for more light "
    "than any man had seen since winter took their horses from this cold river where old women wash white cloth "
    "under great trees before night comes again with rain over every house of stone between two hills so let us "
    "speak plainly my lord what news do you bring has my brother fallen or does he live still none can tell but I"
)
_WORDS = _SENTENCE.split(" ")


def prose(characters: int, seed: int = 1, words: int = 0) -> str:
    """Sentences with names before them, as in a play; ``words`` more made-up words enlarge the vocabulary."""
    draw = random.Random(seed)
    vocabulary = _WORDS + [f"{draw.choice(_WORDS)}{draw.choice(_WORDS)}" for _ in range(words)]
    lines = [f"O God, O God! {string.printable.strip()}\n"]
    length = len(lines[0])
    while length < characters:
        sentence = " ".join(draw.choice(vocabulary) for _ in range(draw.randint(5, 14)))
        line = f"{draw.choice(['KING', 'QUEEN', 'FOOL', 'SECOND LORD'])}:\n{sentence.capitalize()}.\n"
        lines.append(line)
        length += len(line)
    return "\n".join(lines)[:characters]


def text(path: Path, characters: str = "200000") -> None:
    """One text file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(prose(int(characters)), encoding="utf-8")


def corpus(folder: Path, characters: str = "100000", vocabulary: str = "") -> None:
    """``train.txt``, ``valid.txt`` and ``test.txt``; with ``vocabulary``, of so many words with the end of a line.

    A script that is written for the Penn Treebank counts on its 10,000, and asks what the meaning of things is.
    """
    folder.mkdir(parents=True)
    parts = {}
    for seed, part in enumerate(("train", "valid", "test")):
        content = prose(int(characters) // (1 if part == "train" else 5), seed, words=2000)
        parts[part] = content.replace("\n\n", "\n")
    if vocabulary:
        words = ["the", "meaning", "of"]
        known = {"<eos>", *words, *" ".join(parts.values()).split()}
        words += [f"word{number}" for number in range(int(vocabulary) - len(known))]
        parts["train"] += "\n" + " ".join(words) + "\n"
    for part, content in parts.items():
        (folder / f"{part}.txt").write_text(content, encoding="utf-8")


def wikitext(folder: Path) -> None:
    """``wikitext-2.txt``, as Lightning's demonstration reads it."""
    text(folder / "wikitext-2.txt", "1200000")


def enwik8(path: Path) -> None:
    """The first bytes of enwik8, gzipped: 96 million as its readers want them, of which most repeat."""
    path.parent.mkdir(parents=True, exist_ok=True)
    block = prose(1_000_000).encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(96):
            file.write(block)


def nanogpt_tokens(folder: Path, vocabulary: str = "65", count: str = "200000") -> None:
    """``train.bin``, ``val.bin`` and ``meta.pkl`` of nanoGPT."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(1)
    for part, share in (("train", 1), ("val", 5)):
        tokens = draw.integers(0, int(vocabulary), int(count) // share).astype(np.uint16)
        tokens.tofile(folder / f"{part}.bin")
    characters = [chr(33 + index) for index in range(int(vocabulary))]
    meta = {
        "vocab_size": int(vocabulary),
        "itos": dict(enumerate(characters)),
        "stoi": {character: index for index, character in enumerate(characters)},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def fineweb_shards(folder: Path, count: str = "600000") -> None:
    """Shards of GPT-2 tokens as ``.npy``, one of them for validation."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(1)
    for part in ("val_000000", "train_000001", "train_000002"):
        np.save(folder / f"edufineweb_{part}.npy", draw.integers(0, 50257, int(count)).astype(np.uint16))


def hellaswag(folder: Path, count: str = "4") -> None:
    """A few rows of HellaSwag."""
    folder.mkdir(parents=True)
    row = {
        "label": 1,
        "ctx": "the king said that",
        "endings": ["he would", "they go", "she was", "it rains"],
        "ind": 3,
    }
    (folder / "hellaswag_val.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(int(count))))


def tinystories(folder: Path) -> None:
    """TinyStories as llama2.c's tokens: two shards of 32,000 words."""
    base = folder / "TinyStories_all_data"
    base.mkdir(parents=True)
    draw = np.random.default_rng(1)
    for number in range(3):
        tokens = draw.integers(2, 32000, 300_000).astype(np.uint16)
        tokens[::200] = 1
        tokens.tofile(base / f"data{number:02d}.bin")


def sentencepiece_model(path: Path, size: str = "256", ids: str = "") -> None:
    """A SentencePiece model of ``size`` pieces, trained on the prose; of ``ids`` pieces in all, the others made up."""
    import io

    import sentencepiece

    path.parent.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(prose(100_000, words=2000).splitlines()),
        model_writer=model,
        vocab_size=int(ids or size),
        user_defined_symbols=[f"<{number}>" for number in range(int(size), int(ids or size))],
        model_type="bpe",
        byte_fallback=True,
        pad_id=-1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


def instructions(path: Path, count: str = "100") -> None:
    """Instruction, input, output: one JSON list, as Alpaca has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_instructions(int(count))), encoding="utf-8")


def _instructions(count: int) -> list[dict[str, str]]:
    return [
        {
            "instruction": f"Say what is written: {prose(60, 3 * index)}",
            "input": "" if index % 2 else prose(40, 3 * index + 1),
            "output": prose(120, 3 * index + 2),
        }
        for index in range(count)
    ]


def spam(folder: Path) -> None:
    """The SMS spam collection: label, tab, text."""
    folder.mkdir(parents=True)
    rows = [
        f"{'spam' if index % 3 == 0 else 'ham'}\t{' '.join(prose(70, index).split())}" for index in range(900)
    ]
    (folder / "SMSSpamCollection.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


MAKERS = (
    text,
    corpus,
    wikitext,
    enwik8,
    nanogpt_tokens,
    fineweb_shards,
    hellaswag,
    tinystories,
    sentencepiece_model,
    instructions,
    spam,
)
