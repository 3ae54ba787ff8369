"""Folders that ``datasets.load_dataset`` reads in place of a set of the hub: parquet files and their card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stranger_runs.makers.texts import prose

_Row = dict[str, Any]


def _said(length: int, seed: int) -> str:
    return " ".join(prose(length + 200, seed).split()[-length // 6 :])


def _conversation(index: int) -> _Row:
    said = [("user", _said(80, index)), ("assistant", _said(160, index + 1))]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def _alpaca(index: int) -> _Row:
    row = {
        "instruction": _said(60, index),
        "input": "" if index % 2 else _said(40, index),
        "output": _said(90, index),
    }
    return {**row, "text": " ".join(row.values())}


def _preference(index: int) -> _Row:
    def reply(text: str) -> list[_Row]:
        return [{"role": "assistant", "content": text}]

    prompt = [{"role": "user", "content": _said(60, index)}]
    return {"prompt": prompt, "chosen": reply(_said(90, index + 1)), "rejected": reply(_said(70, index + 2))}


def _scored_pair(index: int) -> _Row:
    return {"sentence1": _said(60, index), "sentence2": _said(60, index + 1), "score": index % 6 / 5}


def _pair(index: int) -> _Row:
    return {
        "sentence1": _said(60, index),
        "sentence2": _said(60, index + 1),
        "label": index % 2,
        "idx": index,
    }


def _triple(index: int) -> _Row:
    return {"anchor": _said(50, index), "positive": _said(50, index + 1), "negative": _said(50, index + 2)}


def _labelled(index: int) -> _Row:
    return {"premise": _said(60, index), "hypothesis": _said(40, index + 1), "label": index % 3}


def _plain(index: int) -> _Row:
    return {"text": _said(300, index)}


def _review(index: int) -> _Row:
    return {"text": _said(300, index), "label": index % 2}


def _translation(index: int) -> _Row:
    return {"translation": {"en": _said(60, index), "de": _said(60, index + 1), "ro": _said(60, index + 2)}}


def _summary(index: int) -> _Row:
    return {"document": _said(500, index), "summary": _said(60, index + 1), "id": str(index)}


def _question(index: int) -> _Row:
    context = _said(400, index)
    answer = context[40:60]
    return {
        "id": str(index),
        "title": "play",
        "context": context,
        "question": _said(40, index + 1),
        "answers": {"text": [answer], "answer_start": [40]},
    }


def _tagged(index: int) -> _Row:
    words = _said(80, index).split()
    return {"id": str(index), "tokens": words, "ner_tags": [len(word) % 9 for word in words]}


def _quote(index: int) -> _Row:
    return {"quote": _said(100, index), "author": "A. Nobody", "tags": ["play"]}


def _twitter(index: int) -> _Row:
    return {
        "Tweet text": _said(80, index),
        "ID": index,
        "Label": 1 + index % 2,
        "text_label": ["no", "yes"][index % 2],
    }


def _query(index: int) -> _Row:
    return {"query": _said(60, index), "response": _said(90, index + 1)}


def _choice(index: int) -> _Row:
    endings = {f"ending{number}": _said(40, index + number) for number in range(4)}
    return {"sent1": _said(50, index), "sent2": "She", "label": index % 4, **endings}


ROWS: dict[str, Callable[[int], _Row]] = {
    "conversation": _conversation,
    "alpaca": _alpaca,
    "preference": _preference,
    "scored_pair": _scored_pair,
    "pair": _pair,
    "triple": _triple,
    "labelled": _labelled,
    "plain": _plain,
    "review": _review,
    "translation": _translation,
    "summary": _summary,
    "question": _question,
    "tagged": _tagged,
    "quote": _quote,
    "twitter": _twitter,
    "query": _query,
    "choice": _choice,
}
"""How a row of each kind looks."""


def dataset(
    folder: Path, kind: str, splits: str = "train,validation,test", count: str = "64", config: str = ""
) -> None:
    """A set of one kind of rows, with the splits and the configuration that a script asks for.

    ``label`` becomes a class label where the rows have whole numbers there, as the sets of the hub have it.
    """
    import datasets

    folder.mkdir(parents=True)
    names = splits.split(",")
    table = datasets.Dataset.from_list([ROWS[kind](index) for index in range(int(count))])
    for column in ("label", "ner_tags"):
        if column in table.column_names and kind != "twitter":
            values = table[column]
            top = max(max(value) if isinstance(value, list) else value for value in values) + 1
            feature: Any = datasets.ClassLabel(num_classes=top)
            table = table.cast_column(column, datasets.Sequence(feature) if column == "ner_tags" else feature)
    for name in names:
        table.to_parquet(folder / f"{name}-00000-of-00001.parquet")
    files = "".join(f"  - split: {name}\n    path: {name}-*.parquet\n" for name in names)
    card = f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")


_METRIC = '''"""A metric of the hub's name: accuracy, which is enough to be computed."""
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / max(len(references), 1)}
'''


def metric(folder: Path, name: str = "accuracy") -> None:
    """A module of that name for ``evaluate.load``, which would be downloaded; computes accuracy."""
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(_METRIC, encoding="utf-8")


MAKERS = (dataset, metric)
