"""Programs that hold memory beyond its use, each in its own way, and programs that do not."""

from __future__ import annotations

from dataclasses import dataclass

SETUP = """\
import copy, functools, gc, torch
from torch import nn


def net(layers=4, width=2048):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]).cuda()


def data(batch=2048, width=2048):
    return torch.randn(batch, width, device="cuda")


def train(model, optimizer, steps=5, after=None):
    for i in range(steps):
        loss = model(data()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after:
            after(i)


"""
_TRAINED = "model = net()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program and what is to be said of it.

    Attributes:
        source: what follows `SETUP`.
        name: of the holder, without a place in the source; empty where nothing is held beyond its use.
        reason: value of `Beyond`.
        least_mib, most_mib: bounds of what is held at the moment that is reported; the same where it is exact.
        remedy: a part of the sentence.
        at_the_end: it is held beyond its use at the end alone, and not at the peak.
    """

    source: str
    name: str = ""
    reason: str = "unused"
    least_mib: int = 0
    most_mib: int = 0
    remedy: str = ""
    at_the_end: bool = False


HOLDING = {
    "a list of outputs": Program(
        source=_TRAINED
        + "outputs = []\n"
        + "for i in range(12):\n"
        + "    y = model(data())\n"
        + "    optimizer.zero_grad(); y.mean().backward(); optimizer.step()\n"
        + "    outputs.append(y.detach())\n",
        name="outputs",
        least_mib=176,
        most_mib=192,
        remedy="empty outputs",
    ),
    "the graph of a state": Program(
        source="def generate(model, count):\n"
        "    state = data(256)\n"
        "    for _ in range(count):\n"
        "        state = model(state)\n"
        "    return float(state.mean().detach())\n\n\n"
        "generate(net(), 30)\n",
        name="state",
        reason="graph",
        least_mib=220,
        most_mib=242,
        remedy="torch.no_grad() in generate()",
    ),
    "the graph of the last output": Program(
        source="model = net(8)\nfor _ in range(20):\n    out = model(data(4096))\n",
        name="out",
        reason="graph",
        least_mib=256,
        most_mib=288,
        remedy="out = out.detach()",
    ),
    "a running loss": Program(
        source=_TRAINED
        + "train(model, optimizer, 3)\n\n\n"
        + "def evaluate(batches):\n"
        + "    total = 0.0\n"
        + "    for _ in range(batches):\n"
        + "        total += model(data(512)).mean()\n"
        + "    return total / batches\n\n\n"
        + "print(float(evaluate(40).detach()) > -1)\n"
        + "train(model, optimizer, 2)\n",
        name="total",
        reason="graph",
        least_mib=600,
        most_mib=800,
        remedy="torch.no_grad() in evaluate(), or add loss.item() to total",
    ),
    "caught errors": Program(
        source="errors = []\n\n\n"
        "def attempt(rows):\n"
        '    y = torch.empty(rows, 1 << 20, device="cuda")\n'
        '    return y, torch.empty(16 * rows, 1 << 20, device="cuda")\n\n\n'
        "for rows in (1024, 512, 256):\n"
        "    try:\n"
        "        attempt(rows)\n"
        "    except torch.OutOfMemoryError as error:\n"
        "        errors.append(error)\n",
        name="errors",
        reason="error",
        least_mib=6144,
        most_mib=6144,
        remedy="keep str(error) in errors",
    ),
    "a closure": Program(
        source="def recorder():\n"
        "    seen = []\n"
        "    def record(x):\n"
        "        seen.append(x)\n"
        "    return record\n\n\n"
        + "record = recorder()\n"
        + _TRAINED
        + "for i in range(8):\n"
        + "    y = model(data())\n"
        + "    optimizer.zero_grad(); y.mean().backward(); optimizer.step()\n"
        + "    record(y.detach())\n",
        name="seen in the closure of recorder.<locals>.record",
        least_mib=112,
        most_mib=128,
        remedy="empty seen",
    ),
    "an attribute of a module": Program(
        source="class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body, self.calls, self.first = net(), 0, None\n"
        "    def forward(self, x):\n"
        "        y = self.body(x)\n"
        "        self.first = y.detach() if self.first is None else self.first\n"
        "        return y\n\n\n"
        "def main():\n"
        "    model = Model()\n"
        "    train(model, torch.optim.SGD(model.parameters(), 0.1), 6)\n\n\n"
        "data = functools.partial(data, 8192)\n"
        "main()\n",
        name="model.first",
        least_mib=64,
        most_mib=64,
        remedy="set model.first to None",
    ),
    "a cache by step": Program(
        source=_TRAINED
        + "cache = {}\n"
        + "for step in range(8):\n"
        + "    y = model(data())\n"
        + "    optimizer.zero_grad(); y.mean().backward(); optimizer.step()\n"
        + "    cache[step] = y.detach()\n",
        name="cache",
        least_mib=112,
        most_mib=128,
        remedy="remove from cache",
    ),
    "functools.lru_cache": Program(
        source="@functools.lru_cache(maxsize=None)\n"
        "def table(rows):\n"
        '    return torch.zeros(rows, 4096, device="cuda")\n\n\n'
        + _TRAINED
        + "for step in range(8):\n"
        + "    table(2048 + step)\n"
        + "    train(model, optimizer, 1)\n",
        name="table",
        least_mib=224,
        most_mib=257,
        remedy="table.cache_clear()",
    ),
    "a generator": Program(
        source="def batches():\n"
        "    pool = data(16384)\n"
        "    while True:\n"
        "        yield 1\n\n\n"
        "source = batches()\nnext(source)\n" + _TRAINED + "train(model, optimizer, 5)\n",
        name="pool in the suspended batches()",
        least_mib=128,
        most_mib=128,
        remedy="close the generator",
    ),
    "what a hook keeps": Program(
        source="class Kept:\n"
        "    def __call__(self, module, inputs, output):\n"
        '        self.output = getattr(self, "output", output.detach())\n\n\n'
        + _TRAINED
        + "model[2].register_forward_hook(Kept())\n"
        + "data = functools.partial(data, 16384)\n"
        + "train(model, optimizer, 6)\n",
        name="Kept.output",
        least_mib=128,
        most_mib=128,
        remedy="let the hook keep x.detach().cpu()",
    ),
    "a batch over an evaluation": Program(
        source=_TRAINED
        + "batch = data(32768)\n"
        + "model(batch).mean().backward()\n"
        + "optimizer.step(); optimizer.zero_grad()\n"
        + "with torch.no_grad():\n"
        + "    for _ in range(30):\n"
        + "        model(data())\n",
        name="batch",
        at_the_end=True,  # at the peak it is in use
        least_mib=256,
        most_mib=256,
        remedy="del batch",
    ),
    "models of folds": Program(
        source="models = []\n"
        "data = functools.partial(data, 64, 4096)\n"
        "for fold in range(3):\n"
        "    model = net(8, 4096)\n"
        "    models.append(model)\n"
        "    train(model, torch.optim.AdamW(model.parameters()), 4)\n",
        name="models",
        reason="no_module",
        least_mib=2048,
        most_mib=2049,
        remedy="save the state_dict()",
    ),
    "a scheduler": Program(
        source="def build():\n"
        "    model = net(4, 4096)\n"
        "    return model, torch.optim.AdamW(model.parameters())\n\n\n"
        "data = functools.partial(data, 64, 4096)\n"
        "model, optimizer = build()\n"
        "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)\n"
        "train(model, optimizer, 3)\n"
        "del model, optimizer\n"
        "gc.collect()\n"
        "model, optimizer = build()\n"
        "train(model, optimizer, 3)\n",
        name="schedule.optimizer",
        reason="no_module",
        least_mib=1024,
        most_mib=1025,
        remedy="del schedule",
    ),
    "a checkpoint": Program(
        source="def loaded():\n"
        "    weights = net(4, 4096).state_dict()\n"
        "    return {name: value.clone() for name, value in weights.items()}\n\n\n"
        "data = functools.partial(data, 64, 4096)\n"
        "checkpoint = {'model': loaded()}\n"
        "model = net(4, 4096)\n"
        "model.load_state_dict(checkpoint['model'])\n"
        "train(model, torch.optim.AdamW(model.parameters()), 4)\n",
        name="checkpoint",
        least_mib=256,
        most_mib=257,
        remedy="del checkpoint",
    ),
    "predictions": Program(
        source="predictions = []\nmodel = net()\n"
        "with torch.no_grad():\n"
        "    for _ in range(20):\n"
        "        predictions.append(model(data()))\n",
        name="predictions",
        least_mib=300,
        most_mib=320,
        remedy="empty predictions",
    ),
    "a circle of references": Program(
        source="class Box:\n    pass\n\n\n"
        "gc.disable()\n"
        "box = Box()\n"
        "box.me, box.batch = box, data(16384)\n"
        "del box\n" + _TRAINED + "train(model, optimizer, 5)\n",
        name="program.Box",
        reason="cycle",
        least_mib=128,
        most_mib=128,
        remedy="gc.collect()",
    ),
}

ORDINARY = {
    "training and evaluation": Program(
        source="model = net()\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "train(model, optimizer, 6)\n"
        "with torch.no_grad():\n"
        "    for _ in range(12):\n"
        "        model(data())\n"
        "train(model, optimizer, 6)\n"
    ),
    "an averaged copy": Program(
        source=_TRAINED
        + "average = copy.deepcopy(model)\n\n\n"
        + "def update(i):\n"
        + "    with torch.no_grad():\n"
        + "        for kept, new in zip(average.parameters(), model.parameters()):\n"
        + "            kept.mul_(0.9).add_(new, alpha=0.1)\n\n\n"
        + "train(model, optimizer, 6, update)\n"
        + "with torch.no_grad():\n"
        + "    for _ in range(12):\n"
        + "        average(data())\n"
        + "train(model, optimizer, 3, update)\n"
    ),
    "two models in turn": Program(
        source="one, two = net(), net()\n"
        "first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(two.parameters())\n"
        "for i in range(8):\n"
        "    fake = one(data())\n"
        "    first.zero_grad(); (two(data()).mean() - two(fake.detach()).mean()).backward(); second.step()\n"
        "    second.zero_grad(); two(fake).mean().backward(); first.step()\n"
    ),
    "a sum of losses": Program(
        source=_TRAINED
        + "for i in range(3):\n"
        + "    total = 0\n"
        + "    for _ in range(20):\n"
        + "        total = total + model(data(256)).mean()\n"
        + "    total.backward(); optimizer.step(); optimizer.zero_grad()\n"
        + "    del total\n"
    ),
    "keys and values": Program(
        source="model, past, x = net(2), None, data(256)\n"
        "with torch.no_grad():\n"
        "    for _ in range(30):\n"
        "        y = model(x)\n"
        "        past = y if past is None else torch.cat([past, y])\n"
        "        x = past.mean(0, keepdim=True).expand_as(x)\n"
    ),
    "a data set on the card": Program(
        source="examples = data(65536)\n"
        + _TRAINED
        + "for i in range(8):\n"
        + '    batch = examples[torch.randint(0, 65536, (256,), device="cuda")]\n'
        + "    optimizer.zero_grad(); model(batch).mean().backward(); optimizer.step()\n"
    ),
}
