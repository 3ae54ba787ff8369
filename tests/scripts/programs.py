"""Programs that train something, as their users wrote them: nothing in them knows of vramfit."""

from __future__ import annotations

LOOP = """
import argparse
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--width", type=int, default=256)
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self, width, words=1024):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net(options.width).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
tokens = torch.utils.data.TensorDataset(torch.arange(512 * 32).reshape(512, 32) % 1024)
loader = torch.utils.data.DataLoader(tokens, batch_size=options.batch_size)
done = 0
for (batch,) in loader:
    batch = batch.to(device)
    logits = model(batch)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    done += 1
    print("loss", loss.item(), schedule.get_last_lr()[0])
    if done >= options.steps:
        break
"""

GAN = """
import torch
from torch import nn

generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).cuda()
discriminator = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
of_generator = torch.optim.Adam(generator.parameters())
of_discriminator = torch.optim.Adam(discriminator.parameters())
for _ in range(3):
    fake = generator(torch.randn(8, 16, device="cuda"))
    loss = discriminator(torch.randn(8, 32, device="cuda")).mean() - discriminator(fake.detach()).mean()
    of_discriminator.zero_grad()
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    discriminator(fake).mean().backward()
    of_generator.step()
"""

FUNCTIONAL = """
import torch

weight = torch.randn(64, 64, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    (torch.randn(8, 64, device="cuda") @ weight).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LBFGS = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
x = torch.randn(8, 64, device="cuda")


def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss


for _ in range(2):
    optimizer.step(closure)
"""

ACCUMULATING = """
import torch
from torch import nn

teacher, student = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(student.parameters())
scaler = torch.amp.GradScaler("cuda")
data = torch.utils.data.DataLoader(torch.zeros(64, 64), batch_size=4)
for number, x in enumerate(data):
    x = x.cuda()
    with torch.no_grad():
        wanted = teacher(x)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (student(x) - wanted).square().mean()
    scaler.scale(loss).backward()
    if number % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""

UNTRAINED = """
import torch

model = torch.nn.Linear(64, 64).cuda()
with torch.no_grad():
    model(torch.randn(8, 64, device="cuda"))
"""

REBINDING = """
import torch
from torch import nn


def main():
    large = torch.empty(64 << 20, device="cuda")
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.zeros(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    del large
    large = torch.empty(64 << 20, device="cuda")


main()
"""

WRITING = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return self.down(self.norm(self.up(x)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SHADOWED = """
import torch
from torch import nn

net = nn.Linear(64, 64).cuda()


class Setup:
    def __init__(self, held):
        self.trained = held


def build(s):
    net, touchy = "a name of its own", Setup(Touchy())
    return torch.optim.SGD(s.trained.parameters(), lr=0.1)


class Touchy:
    @property
    def __class__(self):
        raise RuntimeError("looked at")


touchy, held = Touchy(), Setup(Touchy())
optimizer = build(Setup(net))
for _ in range(2):
    net(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PREPARED = """
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.zeros(64, 64), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, x in enumerate(loader):
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if number == 3:
        break
"""

COUNTING = """
import time
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.calls, self.at = nn.BatchNorm1d(16), nn.Linear(16, 16), 0, 0.0
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.at = time.perf_counter()
        self.batches += 1
        return torch.relu(self.linear(self.norm(x)))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(Block(), Block(), Block()).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for x in torch.utils.data.DataLoader(torch.arange(512.0).reshape(32, 16).sin(), batch_size=8):
    loss = model(x.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

INFERRING = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean(1)


net = Net().eval().to("cuda")
for _ in range(3):
    tokens = torch.randint(0, 1000, (options.batch_size, 512), device="cuda")
    out = net(tokens)
"""
