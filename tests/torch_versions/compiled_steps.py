"""A script whose model and optimizer are compiled."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def main() -> None:
    model = nn.Sequential(*(Block(512, 8) for _ in range(2))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model)
    step = torch.compile(optimizer.step)
    for _ in range(3):
        compiled(torch.randn(8, 512, 512, device="cuda", dtype=torch.bfloat16)).float().mean().backward()
        step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
