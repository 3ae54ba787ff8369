"""Custom operators whose fake implementations ask for a size that depends on data, and detection programs on them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vramfit.options.assume_choice import Assume
from vramfit.virtual.gpu import VirtualGPU

ANCHORS, WIDTH = 3000, 64
BOTH = pytest.mark.parametrize("assume", list(Assume))


def suppress(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy suppression, as the documentation of ``torchvision.ops.nms`` says it."""
    left = scores.argsort(descending=True, stable=True).tolist()
    kept: list[int] = []
    while left:
        kept.append(left.pop(0))
        best = boxes[kept[-1]]
        low, high = torch.maximum(best[:2], boxes[left, :2]), torch.minimum(best[2:], boxes[left, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        areas = (boxes[left, 2:] - boxes[left, :2]).prod(-1) + (best[2:] - best[:2]).prod() - shared
        left = [i for i, over in zip(left, (shared / areas).tolist(), strict=True) if over <= iou_threshold]
    return torch.tensor(kept, dtype=torch.int64)


def vision_ops() -> torch.library.Library | None:
    """``torchvision::nms`` as torchvision has it; None where that is installed, and has it itself."""
    if importlib.util.find_spec("torchvision") is not None:
        importlib.import_module("torchvision")
        return None
    vision = torch.library.Library("torchvision", "DEF")
    vision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    vision.impl("nms", suppress, "CPU")

    @torch.library.register_fake("torchvision::nms", lib=vision)
    def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
        torch._check(dets.dim() == 2, lambda: f"boxes should be a 2d tensor, got {dets.dim()}D")
        return dets.new_empty(torch.library.get_ctx().create_unbacked_symint(), dtype=torch.long)

    return vision


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    """``torchvision::nms``, and other operators whose results depend on data."""
    vision = vision_ops()
    own = torch.library.Library("vramfit_test", "DEF")
    own.define("coordinates(Tensor x) -> Tensor")
    own.define("rows(Tensor x, int most) -> Tensor")
    own.define("two(Tensor x) -> (Tensor, Tensor)")

    def context() -> Any:
        return torch.library.get_ctx()

    @torch.library.register_fake("vramfit_test::coordinates", lib=own)
    def coordinates(x: Tensor) -> Tensor:
        return x.new_empty([context().new_dynamic_size(), x.dim()], dtype=torch.int64)

    @torch.library.register_fake("vramfit_test::rows", lib=own)
    def rows(x: Tensor, most: int) -> Tensor:
        return x.new_empty([context().new_dynamic_size(min=4, max=most), x.shape[1]])

    @torch.library.register_fake("vramfit_test::two", lib=own)
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        ctx = context()
        return x.new_empty(ctx.new_dynamic_size(max=700)), x.new_empty(ctx.new_dynamic_size(max=900))

    yield
    if vision is not None:
        vision._destroy()
    own._destroy()


def measure(program: Callable[[], object], assume: Assume = Assume.UPPER) -> VirtualGPU:
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, assume=assume) as gpu:
        program()
    return gpu


def bar(gpu: VirtualGPU) -> tuple[int, int, int]:
    (device,) = gpu.run.devices
    peak = device.peak_allocated_bytes
    return peak - device.error_below_bytes, peak, peak + device.error_above_bytes


def codes(gpu: VirtualGPU) -> set[str]:
    return {warning.code for warning in gpu.run.warnings}


def cuda(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def test_bounds_that_the_operator_gives_hold_the_size(gpu: VirtualGPU) -> None:
    out = torch.ops.vramfit_test.rows(cuda(500, 1000), 300)
    assert out.shape == (300, 1000)
    (warning,) = [w for w in gpu.run.warnings if w.code == "shape-from-data"]
    assert str(warning.location).startswith(__file__) and "300 of 300" in warning.message
    assert "size-without-bound" not in codes(gpu)


def test_the_bar_reaches_from_the_least_to_the_most() -> None:
    row = 4 * 1024
    for assume, shown in ((Assume.UPPER, 300), (Assume.TYPICAL, 152)):
        low, peak, high = bar(measure(lambda: torch.ops.vramfit_test.rows(cuda(500, 1024), 300), assume))
        assert (low, peak, high) == tuple((500 + rows) * row for rows in (4, shown, 300))


def test_coordinates_may_be_of_every_element_and_nothing_promises_it() -> None:
    shapes: list[tuple[int, ...]] = []
    gpu = measure(lambda: shapes.append(torch.ops.vramfit_test.coordinates(cuda(40, 50)).shape))
    assert shapes == [(2000, 2)]
    assert "size-without-bound" in codes(gpu)
    measure(lambda: shapes.append(torch.ops.vramfit_test.coordinates(cuda(40, 50)).shape), Assume.TYPICAL)
    assert shapes[1] == (1000, 2)


def test_each_size_of_several_results_has_its_own_extent(gpu: VirtualGPU) -> None:
    first, second = torch.ops.vramfit_test.two(cuda(5))
    assert (first.shape, second.shape) == ((700,), (900,))
    found = [gpu.mode.meter.extents_of(part) for part in (first, second)]
    assert [{(e.shown, e.low, e.high) for e in extents} for extents in found] == [
        {(700, 0, 700)},
        {(900, 0, 900)},
    ]


def test_small_boxes_with_values_are_suppressed_for_real(gpu: VirtualGPU) -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [50, 50, 60, 60]])
    scores = torch.tensor([0.5, 0.9, 0.7])
    kept = torch.ops.torchvision.nms(boxes.cuda(), scores.cuda(), 0.5)
    assert kept.tolist() == suppress(boxes, scores, 0.5).tolist() == [1, 2]
    assert not gpu.run.warnings
    assert torch.ops.torchvision.nms(cuda(0, 4), cuda(0), 0.5).shape == (0,)


def test_misuse_is_told_as_the_operator_does(gpu: VirtualGPU) -> None:
    with pytest.raises(RuntimeError, match="boxes should be a 2d tensor, got 1D"):
        torch.ops.torchvision.nms(cuda(ANCHORS), cuda(ANCHORS), 0.5)
    assert len(torch.ops.torchvision.nms(cuda(ANCHORS, 4), cuda(ANCHORS), 0.5)) == ANCHORS


def test_suppression_takes_a_bit_for_each_pair() -> None:
    """vision/csrc/ops/cuda/nms_kernel.cu: sorted boxes, ceil(n / 64) words for each box, a mask."""
    boxes = 30_000
    low, peak, _ = bar(measure(lambda: torch.ops.torchvision.nms(cuda(boxes, 4), cuda(boxes), 0.5)))
    pairs = boxes * -(-boxes // 64) * 8
    given = boxes * 4 * 4 + boxes * 4
    least = given + pairs + boxes * (8 + 1)  # the order and the mask besides
    assert least <= low <= peak <= least + 40 * boxes


def detect(prediction: Tensor) -> list[Tensor]:
    """What YOLO's ``non_max_suppression`` does with (images, 4 + classes, anchors)."""
    found = []
    candidates = prediction[:, 4:].amax(1) > 0.25
    for image, chosen in zip(prediction.transpose(-1, -2), candidates, strict=True):
        x = image[chosen]
        if not x.shape[0]:
            continue
        boxes, classes = x.split((4, x.shape[1] - 4), 1)
        confidence, label = classes.max(1, keepdim=True)
        x = torch.cat((boxes, confidence, label.float()), 1)[confidence.view(-1) > 0.25]
        if not x.shape[0]:
            continue
        x = x[x[:, 4].argsort(descending=True)[:30_000]]
        offset = x[:, 5:6] * 7680
        kept = torch.ops.torchvision.nms(x[:, :4] + offset, x[:, 4], 0.7)[:300]
        found.append(x[kept])
    return found


def yolo() -> int:
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 2, 1), nn.SiLU(), nn.Conv2d(WIDTH, 84, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = 0
    for _ in range(2):
        model.train()
        out = model(cuda(2, 3, 128, 128)).flatten(2)
        chosen = out[:, 4:].amax(1) > 0.5
        rows = out.transpose(1, 2)[chosen]
        loss = F.binary_cross_entropy_with_logits(rows, torch.ones_like(rows)) + int(chosen.sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for boxes in detect(model(cuda(2, 3, 128, 128)).flatten(2)):
                for *corners, confidence, label in boxes.cpu().tolist():
                    assert len(corners) == 4 and isinstance(confidence, float) and isinstance(label, float)
                    seen += 1
    return seen


class RegionProposals(nn.Module):
    """The proposals and the sampling of Faster R-CNN (vision/torchvision/models/detection/rpn.py, roi_heads.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, WIDTH, 3, 4, 1)
        self.scores, self.deltas = nn.Conv2d(WIDTH, 3, 1), nn.Conv2d(WIDTH, 12, 1)
        self.head = nn.Linear(WIDTH, 5)

    def propose(self, features: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(features).flatten()
        boxes = self.deltas(features).permute(0, 2, 3, 1).reshape(-1, 4)
        best = scores.detach().topk(min(2000, scores.numel()))[1]
        boxes, scores = boxes[best], scores[best].sigmoid()
        large = torch.where(((boxes[:, 2:] - boxes[:, :2]) >= 1e-3).all(1))[0]
        boxes, scores = boxes[large], scores[large]
        kept = torch.ops.torchvision.nms(boxes.detach(), scores.detach(), 0.7)[:1000]
        return boxes[kept], scores[kept]

    def forward(self, image: Tensor, targets: Tensor | None) -> Any:
        boxes, scores = self.propose(self.body(image))
        if targets is None:
            good = torch.where(scores > 0.05)[0]
            boxes, scores = boxes[good], scores[good]
            kept = torch.ops.torchvision.nms(boxes, scores, 0.5)[:100]
            return SimpleNamespace(boxes=boxes[kept], scores=scores[kept])
        overlaps = (boxes[:, None, :2] - targets[None, :, :2]).square().sum(-1)
        matched = overlaps.max(1)[1]
        positive = torch.where(matched >= 1)[0]
        negative = torch.where(matched == 0)[0]
        count = min(positive.numel(), 64)
        chosen = positive[torch.randperm(positive.numel(), device="cuda")[:count]]
        other = negative[torch.randperm(negative.numel(), device="cuda")[: 256 - count]]
        picked = torch.cat([chosen, other])
        return self.head(boxes[picked] @ cuda(4, WIDTH)).square().mean() + scores.mean()


def faster_rcnn() -> int:
    model = RegionProposals().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model.train()
        model(cuda(1, 3, 256, 256), cuda(5, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found = model(cuda(1, 3, 256, 256), None)
    kept = found.scores.cpu() > 0.05
    return len(found.boxes.cpu()[kept])


def detr() -> int:
    """DETR's ``PostProcess`` and its matching by the host (detr/models/detr.py, matcher.py)."""
    logits, boxes = cuda(4, 100, 92), cuda(4, 100, 4).sigmoid()
    scores, labels = logits.softmax(-1)[..., :-1].max(-1)
    seen = 0
    for s, b, kind in zip(scores, boxes * cuda(4)[:, None, None], labels, strict=True):
        keep = s > 0.7
        for score, _, label in zip(s[keep].tolist(), b[keep].tolist(), kind[keep].tolist(), strict=True):
            assert 0 <= score <= 1 and 0 <= label < 91
            seen += 1
    return seen


@BOTH
@pytest.mark.parametrize("program", [yolo, faster_rcnn, detr])
def test_detectors_train_and_validate(program: Callable[[], int], assume: Assume) -> None:
    seen: list[int] = []
    gpu = measure(lambda: seen.append(program()), assume)
    assert seen[0] > 0 and gpu.run.exit_code == 0
    told = [w for w in gpu.run.warnings if w.code == "shape-from-data"]
    assert told and all(str(w.location).startswith(__file__) for w in told)
    assert "size-without-bound" not in codes(gpu)
