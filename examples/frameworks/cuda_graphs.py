"""Train with CUDA graphs, graphed callables and memory pools, and see what their private pools hold.

Usage:

    python cuda_graphs.py                                   # whole-step capture of a 6-layer MLP, batch 4096
    python cuda_graphs.py --way callables
    python cuda_graphs.py --way pool
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

WAYS = ["eager", "graph", "callables", "inference", "pool"]


def parse_args():
    parser = argparse.ArgumentParser(description="Train with CUDA graphs and private memory pools.")
    parser.add_argument("--way", choices=WAYS, default="graph")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_network(args):
    layers = []
    for _ in range(args.layers):
        layers += [nn.Linear(args.width, args.width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(args.width, 10)).to("cuda")


def batches(args):
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        images = torch.randn(args.batch_size, args.width, generator=generator)
        yield images.to("cuda"), torch.randint(10, (args.batch_size,), generator=generator).to("cuda")


def step(network, optimizer, images, labels):
    loss = F.cross_entropy(network(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def train_eager(args):
    network = make_network(args)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for images, labels in batches(args):
        optimizer.zero_grad(set_to_none=True)
        loss = step(network, optimizer, images, labels)
    print(f"loss {loss.item():.4f}")


def train_graph(args):
    """The whole step in one graph: forward, backward and optimizer."""
    network = make_network(args)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, capturable=True)
    images = torch.randn(args.batch_size, args.width, device="cuda")
    labels = torch.zeros(args.batch_size, dtype=torch.long, device="cuda")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step(network, optimizer, images, labels)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with torch.cuda.graph(graph):
        loss = step(network, optimizer, images, labels)
    captured = torch.cuda.memory_allocated()
    print(f"the graph's pool holds {(torch.cuda.memory_reserved() - before) / 2**20:.2f} MiB")
    for new_images, new_labels in batches(args):
        images.copy_(new_images)
        labels.copy_(new_labels)
        graph.replay()
    del new_images, new_labels
    print(
        f"replays took {(torch.cuda.memory_allocated() - captured) / 2**20:.2f} MiB more, loss {loss.item():.4f}"
    )


def train_callables(args):
    """Forward and backward of the network as graphs, the rest as usual."""
    network = make_network(args)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    sample = torch.randn(args.batch_size, args.width, device="cuda")
    graphed = torch.cuda.make_graphed_callables(network, (sample,))
    print(f"graphs hold {torch.cuda.memory_allocated() / 2**20:.2f} MiB with the weights")
    for images, labels in batches(args):
        optimizer.zero_grad(set_to_none=True)
        loss = step(graphed, optimizer, images, labels)
    print(f"loss {loss.item():.4f}")


@torch.no_grad()
def infer(args):
    """Graphs for several batch sizes that share one pool, as servers keep them."""
    network = make_network(args).half().eval()
    pool = torch.cuda.graph_pool_handle()
    graphs = {}
    for size in (args.batch_size, args.batch_size // 2, args.batch_size // 4):
        inputs = torch.zeros(size, args.width, device="cuda", dtype=torch.half)
        network(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = network(inputs)
        graphs[size] = graph, inputs, outputs
        print(f"batch {size}: {torch.cuda.memory_reserved() / 2**20:.2f} MiB reserved")
    for graph, inputs, outputs in graphs.values():
        inputs.normal_()
        graph.replay()
        print(outputs.shape)


def use_pool(args):
    """Weights and activations in pools of their own, given back at once."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        network = make_network(args)
    held = sum(segment["total_size"] for segment in pool.snapshot())
    print(f"the pool holds {held / 2**20:.2f} MiB in {len(pool.snapshot())} segments")
    for images, _ in batches(args):
        network(images).sum().backward()
    before = torch.cuda.memory_reserved()
    del network
    torch.cuda.empty_cache()
    del pool
    print(f"{(before - torch.cuda.memory_reserved()) / 2**20:.2f} MiB given back")


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    ways = {
        "eager": train_eager,
        "graph": train_graph,
        "callables": train_callables,
        "inference": infer,
        "pool": use_pool,
    }
    ways[args.way](args)
    print(f"allocated {torch.cuda.max_memory_allocated() / 2**20:.2f} MiB at the peak", end=", ")
    print(f"reserved {torch.cuda.max_memory_reserved() / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
