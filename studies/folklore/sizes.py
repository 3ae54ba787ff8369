"""Sayings about how much something takes."""

from __future__ import annotations

import torch
from torch import nn

import vramfit
from folklore.finding import CARD, UNLIMITED, Answer, Finding, gib, measure, mib
from folklore.networks import UNet3d, bert_large, resnet, train_images, train_text
from vramfit.gpus import find_gpu
from vramfit.units import GIB


def resnet50_parameters() -> Finding:
    """Parameters are numbers of 4 bytes; running statistics of batch norm come beside them."""
    model = resnet(50)
    parameters = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    count = sum(p.numel() for p in model.parameters())

    def load() -> None:
        resnet(50).cuda()

    loaded = measure(load)
    return Finding(
        answer=Answer.RIGHT,
        why=f"{count:,} numbers of 4 bytes are {parameters:,} bytes, {mib(parameters)}: 98 MB as the file sizes of "
        f"checkpoints count (MiB), 102 MB in millions of bytes. On the card, with the allocator's segments, they "
        f"take {mib(loaded.reserved)} before anything runs.",
        columns=("what", "bytes", "MiB"),
        rows=(
            ("parameters", f"{parameters:,}", mib(parameters)),
            ("running statistics of batch norm", f"{buffers:,}", mib(buffers)),
            ("allocated on the card", f"{loaded.allocated:,}", mib(loaded.allocated)),
            ("reserved by torch", f"{loaded.reserved:,}", mib(loaded.reserved)),
        ),
    )


def one_convolution() -> Finding:
    """What a single layer's result takes."""
    layers = {
        "3 x 3, 64 channels (VGG)": nn.Conv2d(3, 64, 3, padding=1),
        "7 x 7, stride 2, 64 channels (ResNet)": nn.Conv2d(3, 64, 7, stride=2, padding=3),
    }
    rows = []
    for name, layer in layers.items():
        shape = layer(torch.empty(1, 3, 224, 224)).shape
        result = 64 * shape[1:].numel() * 4

        def run(layer: nn.Conv2d = layer) -> None:
            made = nn.Conv2d(
                3, 64, layer.kernel_size, stride=layer.stride, padding=layer.padding, device="cuda"
            )
            made(torch.empty(64, 3, 224, 224, device="cuda"))

        rows.append((name, "x".join(map(str, (64, *shape[1:]))), mib(result), mib(measure(run).allocated)))
    return Finding(
        answer=Answer.RIGHT,
        why="It can. A stride of 1 keeps all 224 x 224 positions for each of the 64 channels: 784 MiB for the result "
        "alone. The first layer of a ResNet has a stride of 2 and a quarter of that, 196 MiB.",
        columns=("convolution on 64 x 3 x 224 x 224", "result", "its bytes", "peak with input"),
        rows=tuple(rows),
    )


def resnet152() -> Finding:
    """Training by batch size."""
    rows, totals = [], {}
    for batch in (8, 16, 32, 64):
        found = measure(lambda batch=batch: train_images(resnet(152), batch), card=UNLIMITED)
        totals[batch] = found.total
        rows.append((str(batch), gib(found.allocated), gib(found.reserved), gib(found.total)))
    images = (totals[64] - totals[8]) / 56
    state = 3 * sum(p.nbytes for p in resnet(152).parameters())
    return Finding(
        answer=Answer.DEPENDS,
        why=f"Parameters, gradients and momentum are {gib(state)}; each image of the batch adds {mib(images)}. So "
        f"about 11 GB are those of a batch of {round((11 * GIB - totals[8]) / images + 8)}; without its batch the "
        "figure says nothing.",
        columns=("batch of 224 x 224, fp32, SGD", "allocated", "reserved", "with context"),
        rows=tuple(rows),
    )


def bert_large_batch_32() -> Finding:
    """Training BERT-Large by length."""
    rows, totals = [], {}
    for length, amp in ((128, False), (128, True), (384, False), (512, False), (512, True)):
        found = measure(
            lambda length=length, amp=amp: train_text(bert_large(), 32, length, amp=amp), card=UNLIMITED
        )
        totals[length, amp] = found.total
        rows.append((str(length), "bf16 autocast" if amp else "fp32", gib(found.allocated), gib(found.total)))
    fits = totals[128, False] < 24 * GIB
    short = "fits in 24 GB" if fits else "exceeds 24 GB too"
    return Finding(
        answer=Answer.DEPENDS,
        why=f"At 512 tokens it takes {gib(totals[512, False])} in fp32 and {gib(totals[512, True])} under autocast, "
        f"more than 24 GB. At 128 tokens it takes {gib(totals[128, False])}, which {short}: without its length "
        "a batch says little.",
        columns=("tokens, batch 32, AdamW", "precision", "allocated", "with context"),
        rows=tuple(rows),
    )


def randn_of_a_million() -> Finding:
    """One small tensor."""

    def run() -> None:
        kept = torch.randn(1000, 1000).cuda()
        del kept

    found = measure(run)
    return Finding(
        answer=Answer.WRONG,
        why=f"A million float32 numbers are 4,000,000 bytes; the tensor takes {found.allocated:,} (3.8 MiB). Eight "
        "would be float64, as numpy makes them, or this one and the one on the host together. "
        "What nvidia-smi shows is neither: torch takes a segment of "
        f"{mib(found.reserved)} for it, beside the CUDA context.",
        columns=("what", "bytes"),
        rows=(
            ("numbers", f"{4 * 1000 * 1000:,}"),
            ("allocated", f"{found.allocated:,}"),
            ("reserved", f"{found.reserved:,}"),
        ),
    )


def volume_in_a_unet() -> Finding:
    """A whole scan through a 3D U-Net."""

    def train(width: int, amp: bool) -> None:
        model = UNet3d(width).cuda()
        x = torch.empty(1, 1, 512, 512, 128, device="cuda")
        target = torch.zeros(1, 512, 512, 128, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.float16, enabled=amp):
            loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()

    def infer(width: int) -> None:
        model = UNet3d(width).cuda().eval()
        with torch.inference_mode():
            model(torch.empty(1, 1, 512, 512, 128, device="cuda"))

    runs = {
        "training, 32 channels at the top, fp32": measure(lambda: train(32, False), card=UNLIMITED),
        "training, 32 channels, fp16 autocast": measure(lambda: train(32, True), card=UNLIMITED),
        "training, 8 channels, fp32": measure(lambda: train(8, False), card=UNLIMITED),
        "inference, 32 channels, fp32": measure(lambda: infer(32), card=UNLIMITED),
        "inference, 8 channels, fp32": measure(lambda: infer(8), card=UNLIMITED),
    }
    taken = {name: gib(found.allocated) for name, found in runs.items()}
    return Finding(
        answer=Answer.DEPENDS,
        why=f"One volume has 128 MiB; each feature map of 64 channels at full size has 8 GiB. The network of the paper "
        f"takes {taken['training, 32 channels at the top, fp32']} of tensors to train on it; one with a quarter of "
        f"the channels takes {taken['training, 8 channels, fp32']}, and inference "
        f"{taken['inference, 32 channels, fp32']}. 42 GB is one point on that line.",
        columns=("512 x 512 x 128 in a 3D U-Net of four levels", "allocated", "with context"),
        rows=tuple((name, gib(found.allocated), gib(found.total)) for name, found in runs.items()),
    )


def context() -> Finding:
    """What CUDA takes before torch takes anything."""
    names = ("GTX 1650", "T4", "RTX 3090", "RTX 4090", "A100 80GB", "H100 80GB")
    cards = [find_gpu(name) for name in names]
    rows = tuple(
        (
            card.name,
            str(card.sm_count),
            mib(card.typical_context_bytes),
            "measured" if card.context_bytes else "rule",
        )
        for card in cards
    )
    with vramfit.VirtualGPU(CARD) as gpu:
        torch.empty(1, device="cuda")
    used = gpu.run.devices[0].context_bytes
    return Finding(
        answer=Answer.DEPENDS,
        why="It grows with the number of multiprocessors and with the kernels that are loaded: about 250 MiB were "
        "measured on an RTX 3090 (82 of them) and 430 MiB on an RTX 6000 Ada (142). An H100 (132) took 527 MiB before "
        "the first kernel and 767 at the end of most programs. 200 MB is a small card. "
        f"An {CARD} is taken at {mib(used)}; `vramfit calibrate` measures it on the card at hand.",
        columns=("card", "multiprocessors", "context", "from"),
        rows=rows,
    )
