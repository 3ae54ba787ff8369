"""Runs the examples in the docstrings of the public names, one after another, in the current folder."""

from __future__ import annotations

import doctest
import inspect
import sys
from pathlib import Path

import torch

import vramfit

MLP = """\
import torch, vramfit

mlp = vramfit.Workload(
    model=lambda: torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))),
    batch=lambda batch_size: torch.randn(batch_size, 1024),
    sizes={"batch_size": 4096},
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=torch.optim.SGD,
)
"""
FIRST = ["VirtualGPU", "fake_kernel", "plan"]
"""The first two want an interpreter in which nothing has gone backward on the CPU yet; the last writes plan.toml."""


def main() -> None:
    Path("mlp.py").write_text(MLP)
    names = [name for name in vramfit.__all__ if not inspect.ismodule(getattr(vramfit, name))]
    chosen = sys.argv[1:] or sorted(
        names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)
    )
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in chosen:
        value = getattr(vramfit, name)
        examples = finder.find(value, name, globs={"vramfit": vramfit, "torch": torch, "Path": Path})
        if name != "__version__" and not any(one.examples for one in examples):
            sys.exit(f"{name} has no example in its docstring")
        for one in examples:
            runner.run(one)
    if runner.summarize().failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
