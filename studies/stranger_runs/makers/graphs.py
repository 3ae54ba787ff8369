"""Graphs: citation networks in the files of Planetoid and of Cora's first release, and small molecules."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np


def planetoid(folder: Path, name: str = "Cora") -> None:
    """A Planetoid set of Cora's sizes: 2,708 papers, 1,433 words, 7 topics; pickled as the originals are."""
    from scipy.sparse import random as sparse

    nodes, words, topics, trained, tested = 2708, 1433, 7, 140, 1000
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    draw = np.random.default_rng(1)
    features = sparse(nodes, words, density=0.0127, format="csr", random_state=1, dtype=np.float32)
    labels = np.eye(topics, dtype=np.int32)[np.arange(nodes) % topics]
    rest = nodes - tested
    neighbours = {
        node: sorted({int(other) for other in draw.integers(0, nodes, 4)} - {node}) for node in range(nodes)
    }
    parts = {
        "x": features[:trained],
        "y": labels[:trained],
        "allx": features[:rest],
        "ally": labels[:rest],
        "tx": features[rest:],
        "ty": labels[rest:],
        "graph": neighbours,
    }
    for part, value in parts.items():
        (raw / f"ind.{name.lower()}.{part}").write_bytes(pickle.dumps(value))
    order = draw.permutation(np.arange(rest, nodes))
    (raw / f"ind.{name.lower()}.test.index").write_text("\n".join(map(str, order)) + "\n")


def cora_files(folder: Path) -> None:
    """``cora.content`` and ``cora.cites``: paper, 1,433 words as 0 or 1, topic; who cites whom."""
    nodes, words = 2708, 1433
    folder.mkdir(parents=True)
    draw = np.random.default_rng(1)
    topics = [
        "Case_Based",
        "Genetic_Algorithms",
        "Neural_Networks",
        "Probabilistic_Methods",
        "Reinforcement_Learning",
        "Rule_Learning",
        "Theory",
    ]
    with (folder / "cora.content").open("w") as file:
        for node in range(nodes):
            bits = (draw.random(words) < 0.0127).astype(int)
            file.write(f"{1000 + node}\t" + "\t".join(map(str, bits)) + f"\t{topics[node % 7]}\n")
    edges = draw.integers(0, nodes, (5429, 2))
    (folder / "cora.cites").write_text("".join(f"{1000 + a}\t{1000 + b}\n" for a, b in edges))


def tu_graphs(folder: Path, name: str = "MUTAG", count: str = "188") -> None:
    """A TU set of small molecules: edges, graph of each node, labels of graphs, nodes and edges."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    draw = np.random.default_rng(1)
    edges, owners, kinds = [], [], []
    first = 1
    for graph in range(int(count)):
        size = int(draw.integers(10, 28))
        owners += [graph + 1] * size
        kinds += draw.integers(0, 7, size).tolist()
        for node in range(size - 1):
            edges += [(first + node, first + node + 1), (first + node + 1, first + node)]
        first += size
    columns = {
        "A": [f"{a}, {b}" for a, b in edges],
        "graph_indicator": owners,
        "graph_labels": [1 if graph % 2 else -1 for graph in range(int(count))],
        "node_labels": kinds,
        "edge_labels": [index % 4 for index in range(len(edges))],
    }
    for column, values in columns.items():
        (raw / f"{name}_{column}.txt").write_text("".join(f"{value}\n" for value in values))


MAKERS = (planetoid, cora_files, tu_graphs)
