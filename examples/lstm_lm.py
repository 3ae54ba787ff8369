"""Train a word-level LSTM language model with truncated back-propagation and early stopping.

Usage:

    python lstm_lm.py                                   # two layers of 650 units, batch 20 x 35 words
    python lstm_lm.py --text book.txt --steps 0         # a real text, whole epochs
"""

import argparse
import math
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import nn

UNKNOWN, END = "<unk>", "<eos>"


class Dictionary:
    def __init__(self, words, limit):
        frequent = [word for word, _ in Counter(words).most_common(limit - 2) if word not in (UNKNOWN, END)]
        self.words = [UNKNOWN, END, *frequent]
        self.ids = {word: index for index, word in enumerate(self.words)}

    def __len__(self):
        return len(self.words)

    def encode(self, words):
        return torch.tensor([self.ids.get(word, 0) for word in words])


class LanguageModel(nn.Module):
    """Tokens (T, N) and a hidden state -> logits (T, N, V) and the next hidden state."""

    def __init__(self, vocab_size, hidden, layers, dropout):
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, vocab_size)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens, state):
        output, state = self.lstm(self.drop(self.embedding(tokens)), state)
        return self.decoder(self.drop(output)), state

    def initial_state(self, batch_size):
        weight = next(self.parameters())
        shape = (self.layers, batch_size, self.hidden)
        return weight.new_zeros(shape), weight.new_zeros(shape)


def synthetic_words(count, vocabulary, seed):
    """Words with Zipf's frequencies, in sentences."""
    rng = np.random.default_rng(seed)
    ranks = rng.zipf(1.2, size=count) % vocabulary
    return [END if index % 21 == 20 else f"w{rank}" for index, rank in enumerate(ranks.tolist())]


def batchify(ids, batch_size):
    """(length,) -> (T, N): the text cut into batch_size columns."""
    length = ids.size(0) // batch_size
    return ids[: length * batch_size].view(batch_size, length).t().contiguous()


def windows(data, bptt, limit):
    starts = range(0, data.size(0) - 1, bptt)
    for start in starts[:limit] if limit else starts:
        length = min(bptt, data.size(0) - 1 - start)
        yield data[start : start + length], data[start + 1 : start + 1 + length]


def detach(state):
    """Cuts the graph so that gradients do not reach into the previous window."""
    return tuple(part.detach() for part in state)


@torch.no_grad()
def evaluate(model, data, args, criterion):
    model.eval()
    state = model.initial_state(data.size(1))
    total = words = 0
    for tokens, target in windows(data, args.bptt, args.steps):
        logits, state = model(tokens, state)
        total += criterion(logits.flatten(0, 1), target.flatten()).item() * target.numel()
        words += target.numel()
    return total / words


def parse_args():
    parser = argparse.ArgumentParser(description="Train a word-level LSTM language model.")
    parser.add_argument("--text", type=Path, help="a text file; synthetic words without it")
    parser.add_argument("--vocab-size", type=int, default=33278)
    parser.add_argument("--hidden", type=int, default=650)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--bptt", type=int, default=35)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="windows per epoch; 0: all")
    parser.add_argument("--words", type=int, default=100_000, help="length of the synthetic text")
    parser.add_argument("--lr", type=float, default=20.0)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--patience", type=int, default=2, help="epochs without improvement before stopping")
    parser.add_argument("--save", type=Path, help="where to keep the best model")
    parser.add_argument("--seed", type=int, default=1111)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda")

    if args.text:
        lines = args.text.read_text(encoding="utf-8").splitlines()
        words = [word for line in lines for word in [*line.split(), END]]
    else:
        words = synthetic_words(args.words, args.vocab_size, args.seed)
    dictionary = Dictionary(words, args.vocab_size)
    ids = dictionary.encode(words)
    held_out = max(ids.size(0) // 10, args.batch_size * 2)
    train = batchify(ids[:-held_out], args.batch_size).to(device)
    valid = batchify(ids[-held_out:], args.batch_size).to(device)

    model = LanguageModel(args.vocab_size, args.hidden, args.layers, args.dropout).to(device)
    criterion = nn.CrossEntropyLoss()
    lr, best, stale = args.lr, math.inf, 0
    for epoch in range(args.epochs):
        model.train()
        state = model.initial_state(args.batch_size)
        for step, (tokens, target) in enumerate(windows(train, args.bptt, args.steps)):
            state = detach(state)
            model.zero_grad()
            logits, state = model(tokens, state)
            loss = criterion(logits.view(-1, args.vocab_size), target.view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-lr)
            print(f"epoch {epoch + 1}  step {step + 1}  loss {loss.item():.4f}")

        valid_loss = evaluate(model, valid, args, criterion)
        print(f"epoch {epoch + 1}  validation loss {valid_loss:.4f}  perplexity {math.exp(valid_loss):.1f}")
        if valid_loss < best:
            best, stale = valid_loss, 0
            if args.save:
                torch.save(model.state_dict(), args.save)
        else:
            lr, stale = lr / 4, stale + 1
            if stale >= args.patience:
                print("no more improvement: stopping")
                break
    print(f"best validation loss {best:.4f}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
