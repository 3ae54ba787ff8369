"""Windows of long documents: exact for models that see a bounded way, and joined as transformers joins answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.windows import (
    SpanAnswer,
    WindowJoin,
    WindowPool,
    WindowSettings,
    batches_of_windows,
    best_spans,
    run_in_windows,
    windows_of,
)


class Convolved(nn.Module):
    """Two convolutions: a token sees four on either side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 5, padding=2) for _ in range(2))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens) * mask[..., None]
        for layer in self.layers:
            x = layer(x.mT).mT * mask[..., None]
        return {"states": x, "pooled": x.sum(1) / mask.sum(1)[:, None]}


def documents() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens, mask = torch.randint(1, 50, (4, 101)), torch.ones(4, 101, dtype=torch.long)
    for row, length in enumerate((101, 60, 20, 7)):
        mask[row, length:] = 0
    return tokens * mask, mask


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_a_bounded_model_is_exact(batch_size: int) -> None:
    tokens, mask = documents()
    model = Convolved()
    settings = WindowSettings(window=20, overlap=8, prefix=0, suffix=0, batch_size=batch_size)
    with torch.no_grad():
        expected = model(tokens, mask)["states"]
    found = run_in_windows(model, tokens, mask, settings)["states"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    less = WindowSettings(window=20, overlap=6, prefix=0, suffix=0)
    assert not torch.allclose(run_in_windows(model, tokens, mask, less)["states"], expected, atol=1e-3)


def test_windows_cover_every_token_and_keep_special_ones() -> None:
    settings = WindowSettings(window=10, overlap=3, prefix=2, suffix=1)
    windows = windows_of([30, 5, 3], settings)
    spans = [(window.document, window.start, window.stop) for window in windows]
    assert spans == [
        (0, 2, 9),
        (0, 6, 13),
        (0, 10, 17),
        (0, 14, 21),
        (0, 18, 25),
        (0, 22, 29),
        (1, 2, 4),
        (2, 2, 2),
    ]
    assert windows[1].positions(settings).tolist() == [0, 1, *range(6, 13), 29]
    with pytest.raises(UsageError, match="document 0 has 2 tokens"):
        windows_of([2], settings)


def test_each_rule_takes_what_it_says() -> None:
    def shown(join: WindowJoin) -> list[float]:
        numbers = iter(range(10))

        def model(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.full(row.shape, float(next(numbers))) for row in tokens])

        settings = WindowSettings(window=6, overlap=3, prefix=0, suffix=0, join=join)
        found: torch.Tensor = run_in_windows(model, torch.ones(1, 9, dtype=torch.long), None, settings)
        return found[0].tolist()

    assert shown(WindowJoin.FIRST) == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert shown(WindowJoin.AVERAGE) == [0, 0, 0, 0.5, 0.5, 0.5, 1, 1, 1]
    assert shown(WindowJoin.CENTRE) == [
        0,
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
    ]  # 3 and 4 are farther from the first one's end


def test_whole_windows_are_pooled_by_their_tokens() -> None:
    tokens = torch.arange(1.0, 9.0)[None].long()

    def model(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (tokens * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

    mean = WindowSettings(window=5, overlap=0, prefix=0, suffix=0, batch_size=1)
    # Windows 1 to 5 and 4 to 8, for the last is not short: means 3 and 6 of five tokens each.
    assert run_in_windows(model, tokens, None, mean).item() == 4.5
    wide = WindowSettings(window=5, overlap=0, prefix=0, suffix=0, pooled=("",))
    as_wide = run_in_windows(lambda tokens, mask: model(tokens, mask).expand(-1, 5), tokens, None, wide)
    assert as_wide.tolist() == [[4.5] * 5]
    largest = WindowSettings(window=5, overlap=0, prefix=0, suffix=0, pool=WindowPool.MAX)
    assert run_in_windows(model, tokens, None, largest).item() == 6.0


def test_an_output_of_windows_stays_one_where_a_document_is_as_short_as_it() -> None:
    tokens, mask = documents()
    settings = WindowSettings(window=20, overlap=4, prefix=0, suffix=0, batch_size=1)
    wide = torch.randn(50, 7)  # as many values as the last document has tokens

    def call(shown: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        return (wide[shown] * present[..., None]).sum(1)

    found = run_in_windows(call, tokens, mask, settings)
    assert found.shape == (4, 7)
    torch.testing.assert_close(found[3:], call(tokens[3:], mask[3:]))
    with pytest.raises(UsageError, match=r"has the shape \[1, 7\] for windows of 20 tokens.*pooled="):
        run_in_windows(call, tokens.flip(0), mask.flip(0), settings)


@pytest.mark.parametrize("join", [WindowJoin.CENTRE, WindowJoin.FIRST])
def test_labels_stay_whole_numbers(join: WindowJoin) -> None:
    tokens, mask = documents()
    settings = WindowSettings(window=20, overlap=4, prefix=1, suffix=1, join=join)
    large = 1 << 40  # of which float32 holds no neighbour
    found = run_in_windows(
        lambda shown, _: {"ids": shown + large, "high": shown > 25}, tokens, mask, settings
    )
    assert torch.equal(found["ids"], (tokens + large) * mask)
    assert torch.equal(found["high"], (tokens > 25) & mask.bool())


def test_spans_are_those_of_the_pipeline_of_transformers() -> None:
    pipeline = pytest.importorskip("transformers.pipelines.document_question_answering")
    torch.manual_seed(0)
    settings = WindowSettings(window=24, overlap=6, prefix=3, suffix=1, batch_size=2)
    tokens = torch.randint(1, 50, (2, 80))
    found = best_spans_of(tokens, settings, count=1)
    for document in range(2):
        best: tuple[float, int, int] = (-1.0, 0, 0)
        for window, first, last in logits_of(tokens, settings):
            if window.document != document:
                continue
            inner = slice(3, 3 + window.stop - window.start)
            probabilities = [one[inner].double().softmax(0).numpy() for one in (first, last)]
            allowed = (probabilities[0] >= 0).astype(int)
            starts, ends, scores = pipeline.decode_spans(*probabilities, 1, 5, allowed)
            best = max(
                best, (float(scores[0]), window.start + int(starts[0]), window.start + int(ends[0]) + 1)
            )
        (answer,) = found[document]
        assert (answer.start, answer.stop) == best[1:]
        assert answer.score == pytest.approx(best[0], rel=1e-12)


def logits_of(tokens: torch.Tensor, settings: WindowSettings) -> list[Any]:
    torch.manual_seed(5)
    layer = nn.Embedding(50, 2)
    rows = []
    for shown, _mask, windows in batches_of_windows(tokens, None, settings):
        logits = layer(shown).detach()
        rows += [(window, *logits[row].unbind(-1)) for row, window in enumerate(windows)]
    return rows


def best_spans_of(tokens: torch.Tensor, settings: WindowSettings, count: int) -> list[list[SpanAnswer]]:
    rows = logits_of(tokens, settings)
    starts, ends = (torch.stack([row[place] for row in rows]) for place in (1, 2))
    return best_spans(starts, ends, [row[0] for row in rows], settings, longest=5, count=count)


def test_several_spans_come_best_first_and_once_each() -> None:
    answers = best_spans_of(torch.randint(1, 50, (1, 60)), WindowSettings(window=24, overlap=12), count=4)[0]
    assert len({(one.start, one.stop) for one in answers}) == 4
    assert [one.score for one in answers] == sorted((one.score for one in answers), reverse=True)
    assert all(0 < one.stop - one.start <= 5 for one in answers)


def test_bad_input_is_one_line() -> None:
    with pytest.raises(UsageError, match="6 of these shall overlap"):
        WindowSettings(window=8, overlap=6)
    tokens, mask = documents()
    with pytest.raises(UsageError, match="not padded on the right"):
        run_in_windows(Convolved(), tokens, mask.flip(1), WindowSettings(window=20))
    with pytest.raises(UsageError, match="the mask has the shape"):
        run_in_windows(Convolved(), tokens, mask[:, :5], WindowSettings(window=20))
    with pytest.raises(UsageError, match="has 1 entries for 8 windows"):
        run_in_windows(lambda tokens, mask: tokens[:1], tokens, mask, WindowSettings(window=20))
    with pytest.raises(UsageError, match="one number for all windows"):
        run_in_windows(lambda tokens, mask: tokens.sum(), tokens, mask, WindowSettings(window=20))
