"""Sayings about how much something saves."""

from __future__ import annotations

import torch

from folklore.finding import UNLIMITED, Answer, Finding, Measured, gib, measure, percent
from folklore.networks import bert_large, gpt2, resnet, train_images, train_text

STATE = ("parameters", "gradients", "optimizer_state")


def _state(found: Measured) -> int:
    return sum(found.categories[kind] for kind in STATE)


def amp() -> Finding:
    """Autocast halves activations, adds copies of weights, and leaves the state as it is."""
    programs = {
        "ResNet-50, batch 64": lambda on: train_images(resnet(50), 64, amp=on),
        "BERT-Large, 32 x 128": lambda on: train_text(bert_large(), 32, 128, amp=on),
        "GPT-2 small, 8 x 1024": lambda on: train_text(gpt2(), 8, 1024, amp=on),
        "GPT-2 small, 1 x 128": lambda on: train_text(gpt2(), 1, 128, amp=on),
        "GPT-2 XL, 1 x 1024": lambda on: train_text(gpt2(layers=48, width=1600, heads=25), 1, 1024, amp=on),
    }
    rows, saved = [], []
    for name, program in programs.items():
        plain = measure(lambda program=program: program(False), card=UNLIMITED)
        mixed = measure(lambda program=program: program(True), card=UNLIMITED)
        saved.append(1 - mixed.allocated / plain.allocated)
        rows.append((name, gib(plain.allocated), gib(mixed.allocated), percent(saved[-1])))
    return Finding(
        answer=Answer.DEPENDS,
        why=f"From {percent(min(saved))} to {percent(max(saved))} here. Autocast keeps parameters, gradients and "
        "optimizer state in fp32 and adds half-precision copies of the weights; it saves on activations. Where those "
        "are most of the peak, 40 % is a fair figure; for a large model with a small batch it saves little or costs.",
        columns=("training", "fp32", "bf16 autocast", "saved"),
        rows=tuple(rows),
    )


def checkpointing() -> Finding:
    """Recomputing every block."""
    rows, saved, slower = [], [], []

    def train(batch: int, layers: int, on: bool) -> None:
        model = gpt2(layers=layers)
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        train_text(model, batch, 1024, amp=True)

    for batch, layers in ((2, 12), (8, 12), (8, 48)):
        plain = measure(lambda b=batch, n=layers: train(b, n, False), card=UNLIMITED)
        lean = measure(lambda b=batch, n=layers: train(b, n, True), card=UNLIMITED)
        saved.append(1 - lean.allocated / plain.allocated)
        slower.append(lean.seconds / plain.seconds - 1)
        rows.append(
            (
                f"GPT-2 of {layers} blocks, {batch} x 1024",
                gib(plain.allocated),
                gib(lean.allocated),
                percent(saved[-1]),
                percent(slower[-1]),
            )
        )
    return Finding(
        answer=Answer.DEPENDS,
        why=f"The peak falls by {percent(min(saved))} to {percent(max(saved))}, the more the larger the batch and the "
        "more blocks: the logits and the state of the optimizer stay. A step computes each block's forward pass twice, "
        f"a third more arithmetic at most: {percent(min(slower))} to {percent(max(slower))} more time by estimate.",
        columns=("training, bf16 autocast", "plain", "checkpointed blocks", "saved", "more time (estimate)"),
        rows=tuple(rows),
    )


def adam_and_sgd() -> Finding:
    """Bytes a parameter."""
    choices = {
        "SGD": (torch.optim.SGD, {}),
        "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "Adam": (torch.optim.Adam, {}),
        "AdamW": (torch.optim.AdamW, {}),
    }
    model = gpt2()
    count = sum(p.numel() for p in model.parameters())
    rows, held = [], {}
    for name, (kind, options) in choices.items():
        held[name] = _held(kind, options)
        rows.append((name, gib(held[name]), f"{held[name] / count:.1f}"))
    return Finding(
        answer=Answer.WRONG,
        why="Parameters and gradients are 8 bytes a parameter whatever the optimizer; Adam adds 8, momentum 4. So Adam "
        f"holds {held['Adam'] / held['SGD']:.1f} times plain SGD and {held['Adam'] / held['SGD with momentum']:.2f} "
        "times SGD with momentum. Three times is Adam's states and the parameters beside the parameters alone.",
        columns=("optimizer, GPT-2 small in fp32", "parameters, gradients and state", "bytes a parameter"),
        rows=tuple(rows),
    )


def _held(kind: type, options: dict) -> int:
    """Bytes of parameters, gradients and optimizer state between backward and zero_grad."""
    sizes = []

    def run() -> None:
        model = gpt2().cuda()
        optimizer = kind(model.parameters(), lr=1e-4, **options)
        tokens = torch.randint(0, 50257, (1, 64), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        state = [
            t
            for s in optimizer.state.values()
            for t in s.values()
            if isinstance(t, torch.Tensor) and t.is_cuda
        ]
        grown = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
        sizes.append(sum(t.nbytes for t in grown))

    measure(run)
    return sizes[0]


def accumulation() -> Finding:
    """Micro-batches of one batch."""
    rows, found = [], {}
    for parts in (1, 2, 4, 8):
        found[parts] = measure(
            lambda parts=parts: train_text(gpt2(), 16, 1024, amp=True, accumulate=parts), card=UNLIMITED
        )
        rows.append(
            (str(parts), gib(found[parts].allocated), f"{found[1].allocated / found[parts].allocated:.1f}")
        )
    state = _state(found[8])
    return Finding(
        answer=Answer.WRONG,
        why=f"It divides what the batch takes (activations, logits); the state of the model, {gib(state)} here, stays. "
        f"Eight steps divide this peak by {found[1].allocated / found[8].allocated:.1f}, not by 8.",
        columns=("steps of accumulation, 16 x 1024 in all", "allocated", "times less"),
        rows=tuple(rows),
    )


def half() -> Finding:
    """Weights, and what else there is."""

    def hold(convert: bool) -> None:
        model = gpt2().cuda()
        if convert:
            model.half()

    def infer(dtype: torch.dtype, batch: int) -> None:
        model = gpt2().to("cuda", dtype).eval()
        with torch.inference_mode():
            model(input_ids=torch.zeros(batch, 1024, dtype=torch.int64, device="cuda"))

    def load_half() -> None:
        gpt2().half().cuda()

    numbers = sum(p.nbytes for p in gpt2().parameters())
    whole, halved = measure(lambda: hold(False)), measure(load_half)
    plain, lean = measure(lambda: infer(torch.float32, 8)), measure(lambda: infer(torch.float16, 8))
    on_card = measure(lambda: hold(True))
    return Finding(
        answer=Answer.DEPENDS,
        why="It halves the numbers to the byte; what the allocator takes for them falls a little less, since the rest "
        "of a segment that is too small to split counts too. Inference nearly halves: "
        f"{percent(lean.allocated / plain.allocated)} of it is left here. Called on a model that is on the card "
        f"already, the peak is higher than before, {gib(on_card.allocated)}: each old tensor goes only when its copy "
        "is there. In training, gradients and optimizer state follow the parameters, but fp16 without fp32 master "
        "weights loses small updates.",
        columns=("GPT-2 small", "fp32", "fp16"),
        rows=(
            ("bytes of the parameters", f"{numbers:,}", f"{numbers // 2:,}"),
            ("parameters on the card", gib(whole.allocated), gib(halved.allocated)),
            ("inference, 8 x 1024, peak", gib(plain.allocated), gib(lean.allocated)),
            ("peak of .cuda() and then .half()", "", gib(on_card.allocated)),
        ),
    )
