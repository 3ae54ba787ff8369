"""Models that no library brings along: a ResNet, a recurrent language model, a GAN, a graph network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 and 1x1 convolutions with batch norm."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out: torch.Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        summed: torch.Tensor = self.relu(self.bn3(self.conv3(out)) + identity)
        return summed


class ResNet(nn.Module):
    """A ResNet of bottlenecks, for small pictures.

    Args:
        depths: blocks of each stage.
        width: of the first stage; each stage doubles it.
        classes: of the output.
    """

    def __init__(self, depths: list[int], width: int, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        stages, channels = [], width
        for number, depth in enumerate(depths):
            blocks = []
            for place in range(depth):
                stride = 2 if number and not place else 1
                blocks.append(Bottleneck(channels, width << number, stride))
                channels = 4 * (width << number)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.stages(self.stem(pictures)).mean((2, 3)))
        return logits


class RecurrentLayer(nn.Module):
    """An LSTM with a layer norm, dropout and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(self.lstm(self.norm(x))[0])
        return out


class RecurrentLanguageModel(nn.Module):
    """Recurrent layers between an embedding and an output layer with the same weights."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(RecurrentLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class UpBlock(nn.Module):
    """Twice the resolution."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 4, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.conv = nn.Conv2d(out, out, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(F.relu(self.norm(self.up(x)))))


class DownBlock(nn.Module):
    """Half the resolution."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, out, 4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(self.down(F.leaky_relu(self.conv(x), 0.2)), 0.2)


class Gan(nn.Module):
    """A generator and a discriminator of pictures whose side is 4 times 2 to the power of the levels."""

    def __init__(self, width: int, levels: int, noise: int = 64) -> None:
        super().__init__()
        top = width << (levels - 1)
        self.first = nn.Linear(noise, top * 16)
        self.ups = nn.ModuleList(
            UpBlock(width << (levels - 1 - n), width << max(levels - 2 - n, 0)) for n in range(levels)
        )
        self.paint = nn.Conv2d(width, 3, 3, padding=1)
        self.look = nn.Conv2d(3, width, 3, padding=1)
        self.downs = nn.ModuleList(DownBlock(width << max(n - 1, 0), width << n) for n in range(levels))
        self.judge = nn.Linear(top * 16, 1)

    def generate(self, noise: torch.Tensor) -> torch.Tensor:
        x = self.first(noise).view(len(noise), -1, 4, 4)
        for up in self.ups:
            x = up(x)
        return torch.tanh(self.paint(x))

    def discriminate(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.look(pictures)
        for down in self.downs:
            x = down(x)
        judged: torch.Tensor = self.judge(x.flatten(1))
        return judged

    def generator_parameters(self) -> list[nn.Parameter]:
        parts = (self.first, self.ups, self.paint)
        return [parameter for part in parts for parameter in part.parameters()]

    def discriminator_parameters(self) -> list[nn.Parameter]:
        parts = (self.look, self.downs, self.judge)
        return [parameter for part in parts for parameter in part.parameters()]


class MessagePassing(nn.Module):
    """Each node takes what a network says of each edge that ends in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Dropout(0.1))
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        said = self.message(torch.cat([nodes[source], nodes[target]], -1))
        heard = torch.zeros_like(nodes).index_add(0, target, said)
        out: torch.Tensor = nodes + self.norm(self.update(torch.cat([nodes, heard], -1)))
        return out


class GraphNetwork(nn.Module):
    """A class for each graph of a batch: node features of shape [graphs, nodes, 16], edges [graphs, 2, edges]."""

    def __init__(self, width: int, layers: int, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.layers = nn.ModuleList(MessagePassing(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, features: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        graphs, nodes, _ = features.shape
        first = nodes * torch.arange(graphs, device=edges.device)
        source, target = (edges + first[:, None, None]).transpose(0, 1).reshape(2, -1)
        x = self.embed(features.flatten(0, 1))
        for layer in self.layers:
            x = layer(x, source, target)
        logits: torch.Tensor = self.head(x.view(graphs, nodes, -1).mean(1))
        return logits
