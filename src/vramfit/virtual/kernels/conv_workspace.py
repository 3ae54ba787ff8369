"""What cuDNN takes as workspace for a convolution: estimates, each with how far it may be off either way.

aten/src/ATen/native/cudnn/Conv_v8.cpp: ``run_single_conv`` asks cuDNN's heuristics for engines and takes the first
that runs (``try_configs``; one whose workspace cannot be allocated is passed over, so a convolution never runs out
of memory for want of workspace). ``run_conv_plan`` allocates what the engine names, after the result.

Which engine that is, and its appetite, cuDNN does not publish. What is known:

* Tensor-core engines work on channels-last data. Contiguous (NCHW) tensors are transposed into the workspace and
  back (kernels named ``nchwToNhwc`` and ``nhwcToNchw`` in any profile): input, filters and result once each.
  Channels that do not fill 16 bytes are padded (``nhwcAddPadding``).
* Float32 without tensor cores takes Winograd engines for filters of 3 x 3 with unit stride (``winograd_..._tile148``
  in profiles): a copy of the filters, their transform to tiles of 4 x 4 with the channels made rounded up to 32 and
  those read to 8, and four bytes for each channel made. All six workspaces of the recording ``eor-nn`` (a card of
  capability 7.5) are that to the byte: (made, read) of (16, 30) 82,880, (32, 16) 51,328, (64, 32) 205,056 forward,
  and (32, 64) 204,928, (16, 32) 84,032, (30, 16) 50,168 for the gradients of inputs.

NOTE [TF32]
Float32 on tensor cores, two dimensions, contiguous data: which engine serves which shape is known by what it needs.
cuDNN 9.10, asked without a card for plans of these shapes, lists engines that take nothing, the input and the filters
(the result is written in its own layout), or everything; and, for gradients of the input by filters of 1 x 1, one that
fills the channels up to the 128 of a tile. Which of them runs is taken from 81 trainings on an RTX 3060 that others
measured with cuDNN 9.1 or 8.9 (benchmarks/measured_by_others.py):

* Forward, 3 x 3 with unit stride: nothing, a fused engine reads the data as they lie. VGG16 and VGG19 come out within
  4 %; with everything transposed, 12 % too low.
* Forward, 1 x 1 or several groups: the input and the filters. RegNets come out within 2.5 %, else 6 % too low.
* Forward, anything else (strides above all): everything. MobileNets and MnasNet are off by 2.3 % in the mean, by 2.9 %
  with the input and the filters alone.
* Gradients by 3 x 3 with unit stride, and of the filters wherever strides are larger: everything. With nothing, VGG19
  is 17 % too low.
* Gradients of filters of 1 x 1 where an image has few pixels: everything, as every cuDNN that was asked (9.8 to 9.20)
  answers for nearly every card. The median of all trainings is off by 0.4 % with it, by 0.6 % without.
* Other gradients by 1 x 1 or several groups: nothing. With everything, MobileNets and RegNets are 7 to 26 % too high.
* Gradients of the input by filters of 1 x 1 that make at most 16 channels of more than 16, where there are few pixels:
  all channels filled up to 128, of the gradient that is read and of that which is made. MnasNet at batches up to 323
  and MobileNetV2 at 251 come out within 3 % (without: 13 to 19 % too low), and do without it from batch 400 on, which
  is between 597,227 and 739,600 pixels. On an RTX 4060, of capability 8.9, nothing tells of it.

For capability 8.9 cuDNN 9.8 and 9.10 answer otherwise (`_transposes_on_ada`): engines that read the data as they lie
come first for nearly all forward passes, and ones that transpose everything for gradients of the filters of several
groups, which take nothing or half of that on 8.6. These answers decide there; nothing is fitted to such a card.

For capability 9.0 an H200 told it (torch 2.11, cuDNN 9.19, nine networks of torchvision at three batch sizes each, the
workspace of every call): 3 x 3 and several groups transpose everything in every pass, filters of 3 x 3 that read an
image's three colours take nothing. Those of 1 x 1 multiply matrices image by image where an image has 36 pixels and
more: with nothing for data (487 of 510 kinds of calls), and with the filters' gradients of each image where these are
up to four times everything else (220 of 246).

What else an engine of the list would take bounds the estimate. Half precision was not measured.

NOTE [Float32 on Hopper]
Without TF32 an H100 ran (cuDNN 9.19, recordings resnet18-fp32 and diffusion-unet-fp32): all forward passes with
nothing, and gradients of 3 x 3 filters with unfused Winograd engines: both sides of the product in tiles of 6 x 6 for
4 x 4 pixels, and the filters'. Ten such workspaces are that to the byte. Gradients of the input by such filters took
nothing, or up to 6.7 times everything; gradients of other filters up to 20 times the filters. By filters of even
edges they transpose everything: five transposed convolutions of unet3d-fp32 and dcgan-fp32, which compute just that.

NOTE [Patches]
Half precision of contiguous images, filters of 16 x 16 that read three colours (ViT): everything is transposed, with
the colours filled up to 16 bytes, and gradients of the filters have three sums in float32 besides. Five workspaces of
three recordings of an H100 are that to the byte (torch 2.11, cuDNN 9.19): 73,793,552, 38,469,648 and 81,264,656
forward, 92,668,048 and 57,344,144 backward.

NOTE [Choices]
Which engine comes first for filters of 1 x 1 and for several groups changes from release to release, card to card and
batch to batch, for many shapes at once. 9.10, 9.19 and 9.26 were asked about RegNets, MnasNet, MobileNets and ResNet-50
for capabilities 8.6 and 8.9 at batches of 200 and 500: what the first plan takes differs by more than a fifth of the
data for 3 in 4 shapes of 1 x 1 and for 5 in 6 of several groups with unit stride, by bytes for 1 in 10 of 3 x 3
forward. So these estimates are off together (`WorkspaceEstimate.choice`), and the bar of reserved memory counts with
it. Without a card cuDNN does not list the products image by image either that the H200 ran for half the calls by 1 x 1:
what it answers for these is not certain.

NOTE [Benchmark mode]
``torch.backends.cudnn.benchmark`` tries every engine once for each new convolution of a thread
(``get_plans_from_find``): it allocates the largest workspace among them (``generate_and_filter_plans``: those that
fit into the largest block that could be had), times them, gives it back, empties the cache of the allocator, and
runs the fastest with a workspace of its own. What the largest is, is estimated as that of the unfused Winograd
engine for filters of 3 x 3 (tiles of 6 x 6 for 16 results: 36/16 of the data, 36/9 of the filters), else as the
transposed data. An H100 tried up to 4.6 GiB for a layer of resnet50-tf32-benchmark; for which one was not recorded. So
50 times its data bound the estimate of each layer, and the memory of the card.

``CUDNN_CONV_WSCAP_DBG`` (MiB) bounds what cuDNN may take.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from vramfit.virtual.kernels.rules import ceil_div, given_back, round_up
from vramfit.virtual.op_call import EMPTY_CACHE, KernelContext, Spare

_MIB = 1 << 20
_HALVES = (torch.float16, torch.bfloat16)

_TILE = 128
"""Channels of a tile of the tensor-core engine that fills them up."""

_FEW_CHANNELS = 16
"""Most channels made by the filters whose gradients take that engine."""

_FEW_PIXELS = 650_000
"""Pixels of a batch below which they do; the next ones that were measured are 597,227 and 739,600."""


_FEW_IMAGE_PIXELS = 64
"""Most pixels of an image, as the filters make it, that count as few: answers change between 36 and 121."""

_TINY_IMAGE_PIXELS = 16
"""Most pixels of an image for which capability 9.0 does not multiply image by image: between 9 and 36."""

_OFTEN_BY_IMAGE, _EVER_BY_IMAGE = 4, 20
"""Up to how many times everything else the filters' gradients of all images may take there, mostly and at all."""

_COLOURS = 3
"""Most channels of an image as it is fed in."""

_PATCH_EDGE = 8
"""Least width and height of filters that are taken to read patches: 16 were recorded, 4 and 7 run otherwise."""

_COUNTERS = 16
"""Bytes of counters beside transposed tensors on an H100; some passes have 131 more, which rounding to 512 hides."""

_MOST_TRIED = 50
"""How many times everything a search may try at most. See NOTE [Benchmark mode]."""

_MOST_OF_DATA, _MOST_OF_FILTERS = 7, 20
"""How many times everything, and the filters, gradients took there at most. See NOTE [Float32 on Hopper]."""

_HOPPER = 90
"""Compute capability of the cards whose engines were measured call by call. See NOTE [TF32]."""

_ADA = 89
"""Compute capability of the cards whose engines are chosen otherwise. See NOTE [TF32]."""


class Pass(Enum):
    """What a convolution computes (``cudnnBackendDescriptorType_t``)."""

    FORWARD = auto()
    BACKWARD_DATA = auto()
    BACKWARD_FILTER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What decides a workspace.

    Attributes:
        images: shapes of what the filters read and of what they make; of a transposed convolution, output and input.
        weight: shape of the filters.
        dtype: of all three.
        channels_last: their layout.
        unit_stride: stride and dilation are 1.
        groups: groups of channels.
    """

    images: tuple[tuple[int, ...], tuple[int, ...]]
    weight: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    unit_stride: bool
    groups: int

    @property
    def filters(self) -> int:
        """Bytes of the filters."""
        return math.prod(self.weight) * self.dtype.itemsize

    @property
    def data(self) -> int:
        """Bytes of input and output."""
        return sum(math.prod(shape) for shape in self.images) * self.dtype.itemsize

    @property
    def reading(self) -> int:
        """Bytes of the filters and of what they read."""
        return self.filters + math.prod(self.images[0]) * self.dtype.itemsize

    @property
    def is_1x1(self) -> bool:
        """A product of matrices."""
        return self.unit_stride and self.groups == 1 and set(self.weight[2:]) == {1}

    @property
    def few_pixels(self) -> bool:
        """Images that the filters make are small."""
        return math.prod(self.images[1][2:]) <= _FEW_IMAGE_PIXELS

    @property
    def is_patches(self) -> bool:
        """Large filters that read an image's colours in half precision, as vision transformers cut their patches."""
        wide = min(self.weight[2:], default=0) >= _PATCH_EDGE
        images = len(self.weight) == 4 and self.weight[1] <= _COLOURS
        return self.dtype in _HALVES and self.groups == 1 and images and wide

    @property
    def is_3x3(self) -> bool:
        """The filters that Winograd engines take."""
        return self.unit_stride and self.groups == 1 and self.weight[2:] == (3, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceEstimate:
    """Workspace of one call of cuDNN.

    Attributes:
        size: its bytes.
        above, below: by how many bytes it may be more, and less.
        trial: bytes of the largest workspace of the search that comes before it; 0 for no search.
        clears: the search ends with an emptied cache.
        choice: what decides it together with others, which are then off the same way; empty where the engine is known
            well enough. See NOTE [Choices].
    """

    size: int
    above: int
    below: int
    trial: int = 0
    clears: bool = False
    choice: str = ""

    def entries(self, preceding: int) -> tuple[int, ...]:
        """The same as entries of `Extras`, in a list that takes so many blocks before it."""
        found: tuple[int, ...] = ()
        if self.trial:
            found = (Spare(self.trial), given_back(preceding + 1))
        if self.clears:
            found += (EMPTY_CACHE,)
        if not self.size:
            return found
        return (*found, self.size if isinstance(self.size, Spare) else Spare(self.size))


def uses_tensor_cores(dtype: torch.dtype, ctx: KernelContext) -> bool:
    """Whether cuDNN runs a convolution of this type on tensor cores; float32 as TF32, where that is allowed."""
    if dtype in _HALVES:
        return ctx.sm >= 70
    return dtype is torch.float32 and ctx.sm >= 80 and ctx.cudnn_tf32


def estimate(shapes: Shapes, kind: Pass, ctx: KernelContext) -> WorkspaceEstimate:
    """Workspace of one convolution with the engine that cuDNN's heuristics put first."""
    size, above, below = _uncapped(shapes, kind, ctx)
    return replace(_capped(size, above, below, ctx), choice=_choice(shapes, kind, ctx))


def _choice(shapes: Shapes, kind: Pass, ctx: KernelContext) -> str:
    """What decides the engine together with those of other shapes; empty where it is known. See NOTE [Choices]."""
    by_matrices = set(shapes.weight[2:]) == {1}
    if not (by_matrices or shapes.groups > 1) or not _transposes(shapes, ctx):
        return ""
    what = "groups" if shapes.groups > 1 else "1x1 few" if shapes.few_pixels else "1x1"
    return f"{kind.name} {what}" + ("" if shapes.unit_stride else " strided")


def _transposes(shapes: Shapes, ctx: KernelContext) -> bool:
    """Float32 on tensor cores from contiguous data of two dimensions, and not one channel a group."""
    single = shapes.dtype is torch.float32 and uses_tensor_cores(shapes.dtype, ctx)
    depthwise = shapes.groups > 1 and shapes.weight[1] == 1
    return single and not shapes.channels_last and len(shapes.weight) == 4 and not depthwise


def _uncapped(shapes: Shapes, kind: Pass, ctx: KernelContext) -> tuple[int, int, int]:
    filters, whole = shapes.filters, shapes.data + shapes.filters
    if shapes.groups > 1 and shapes.weight[1] == 1:
        return 0, whole if shapes.channels_last else filters, 0
    if not uses_tensor_cores(shapes.dtype, ctx):
        if ctx.sm == _HOPPER and shapes.dtype is torch.float32:
            return _without_tensor_cores_on_hopper(shapes, kind)
        if kind is not Pass.BACKWARD_FILTER and shapes.is_3x3 and shapes.dtype is torch.float32:
            made, read = shapes.weight[:2] if kind is Pass.FORWARD else shapes.weight[1::-1]
            size = filters + round_up(made, 32) * round_up(read, 8) * 16 * 4 + 4 * made
            return size, size, size
        return filters, whole, filters
    if shapes.channels_last:
        padded = _padding(shapes)
        # Gradients of filters in half precision are summed in float32.
        sums = math.prod(shapes.weight) * 4 if kind is Pass.BACKWARD_FILTER and shapes.dtype in _HALVES else 0
        return padded + sums, 8 * sums + 2 * filters, padded + sums
    if _transposes(shapes, ctx):
        size, most = _single_precision(shapes, kind, ctx)
        return size, max(0, most - size), size
    if ctx.sm == _HOPPER and shapes.is_patches:
        size = _of_patches(shapes, kind)
        return size, whole, size
    counters = _COUNTERS if ctx.sm == _HOPPER else 0
    return whole + counters, whole, whole + counters


def _without_tensor_cores_on_hopper(shapes: Shapes, kind: Pass) -> tuple[int, int, int]:
    """Bytes, and how far they may be off above and below. See NOTE [Float32 on Hopper]."""
    filters, whole = shapes.filters, shapes.data + shapes.filters
    if kind is Pass.FORWARD:
        return 0, whole, 0
    images = len(shapes.weight) >= 4
    if kind is Pass.BACKWARD_DATA and images and not any(edge % 2 for edge in shapes.weight[2:]):
        return whole + _COUNTERS, whole, whole + _COUNTERS
    if kind is Pass.BACKWARD_DATA:
        return (0, _MOST_OF_DATA * whole, 0) if shapes.is_3x3 else (filters, whole, filters)
    if not shapes.is_3x3:
        return filters, max(whole, _MOST_OF_FILTERS * filters), filters
    tiles = math.prod(ceil_div(size, 4) for size in shapes.images[1][2:])
    made, read = shapes.weight[:2]
    size = 36 * 4 * (shapes.images[0][0] * tiles * (made + read) + made * read)
    return size, max(0, whole - size), size


def _of_patches(shapes: Shapes, kind: Pass) -> int:
    """Bytes for the patches of a vision transformer. See NOTE [Patches]."""
    unit, element = 16 // shapes.dtype.itemsize, shapes.dtype.itemsize
    read, filters = (
        math.prod(shape) // shape[1] * round_up(shape[1], unit) * element
        for shape in (shapes.images[0], shapes.weight)
    )
    padded = read + filters + math.prod(shapes.images[1]) * element + _COUNTERS
    return padded + (3 * filters * 4 // element + 128 if kind is Pass.BACKWARD_FILTER else 0)


def _single_precision(shapes: Shapes, kind: Pass, ctx: KernelContext) -> tuple[int, int]:
    """Bytes with the likely engine, and with the one that takes most. See NOTE [TF32]."""
    whole = shapes.data + shapes.filters
    if ctx.sm == _HOPPER:
        return _on_hopper(shapes, kind)
    if kind is Pass.FORWARD and shapes.is_3x3:
        return 0, shapes.reading
    if shapes.is_3x3:
        return whole, whole
    if ctx.sm == _ADA:
        return whole if _transposes_on_ada(shapes, kind) else 0, whole
    if kind is Pass.FORWARD:
        return (shapes.reading if shapes.is_1x1 or shapes.groups > 1 else whole), whole
    if kind is Pass.BACKWARD_FILTER:
        if shapes.is_1x1:
            return whole if shapes.few_pixels else 0, whole
        return (0 if shapes.groups > 1 else whole), whole
    return _filled_up(shapes, ctx), whole


def multiplies_by_image(shapes: Shapes, ctx: KernelContext) -> bool:
    """Whether a card runs what cuDNN does not list without one. See NOTE [Choices]."""
    return ctx.sm == _HOPPER and shapes.is_1x1 and _transposes(shapes, ctx)


def _on_hopper(shapes: Shapes, kind: Pass) -> tuple[int, int]:
    """Bytes of the engine that an H200 ran for most shapes alike, and of the one that takes most of those it ran."""
    whole, edge = shapes.data + shapes.filters, max(shapes.weight[2:])
    if shapes.is_1x1:
        pixels = math.prod(shapes.images[1][2:])
        known = not shapes.few_pixels
        if kind is not Pass.BACKWARD_FILTER:
            return whole if 1 < pixels <= _TINY_IMAGE_PIXELS else 0, 0 if known else whole
        by_image = shapes.images[0][0] * shapes.filters
        if known:
            return by_image, by_image
        most = whole + whole // 2
        size = 0 if pixels == 1 else by_image if by_image <= _OFTEN_BY_IMAGE * whole else whole
        return size, max(most, by_image if by_image <= _EVER_BY_IMAGE * whole else 0)
    most = whole + whole // 2 if kind is Pass.BACKWARD_FILTER else whole
    coloured = shapes.groups == 1 and shapes.weight[1] <= _COLOURS
    if edge == 3 and coloured:
        return 0, most
    skipped = edge == 1 and not shapes.few_pixels and kind is not Pass.BACKWARD_FILTER
    return 0 if skipped else whole, most


def _transposes_on_ada(shapes: Shapes, kind: Pass) -> bool:
    """Whether the engine that cuDNN 9.8 and 9.10 list first for capability 8.9 transposes everything, or nothing.

    Filters of 3 x 3 with unit stride are not asked about here.
    """
    if max(shapes.weight[2:]) > 3:  # not asked about enough: as on other cards
        return kind is not Pass.BACKWARD_DATA
    if shapes.groups > 1:
        return kind is Pass.BACKWARD_FILTER or (kind is Pass.FORWARD and shapes.unit_stride)
    if kind is Pass.FORWARD:
        return shapes.few_pixels and not shapes.is_1x1
    return shapes.few_pixels or set(shapes.weight[2:]) != {1}


def _filled_up(shapes: Shapes, ctx: KernelContext) -> int:
    """Bytes of the gradients of input and result with their channels filled up to tiles, where an engine does that."""
    made, read = shapes.weight[:2]
    batch, _, *pixels = shapes.images[0]
    count = batch * math.prod(pixels)
    if not (shapes.is_1x1 and made <= _FEW_CHANNELS < read and count < _FEW_PIXELS and ctx.sm < _ADA):
        return 0
    return count * (round_up(made, _TILE) + round_up(read, _TILE)) * shapes.dtype.itemsize


def _padding(shapes: Shapes) -> int:
    """Bytes of the stand-ins of tensors whose channels do not fill 16 bytes."""
    unit = 16 // shapes.dtype.itemsize
    total = 0
    for shape in (*shapes.images, shapes.weight):
        if shape[1] % unit:
            total += math.prod(shape) // shape[1] * round_up(shape[1], unit) * shapes.dtype.itemsize
    return total


def _capped(size: int, above: int, below: int, ctx: KernelContext) -> WorkspaceEstimate:
    text = ctx.environ.get("CUDNN_CONV_WSCAP_DBG", "")
    if text.isdigit():
        cap = int(text) * _MIB
        size = min(size, cap)
        above, below = min(above, cap - size), min(below, size)
    return WorkspaceEstimate(size=size, above=above, below=below)


def searched(
    found: WorkspaceEstimate, shapes: Shapes, key: Hashable, ctx: KernelContext
) -> WorkspaceEstimate:
    """The same in benchmark mode: at the first call, the search comes before it. See NOTE [Benchmark mode].

    Args:
        found: workspace of the engine that runs.
        shapes: of the convolution.
        key: what cuDNN's plans are kept by, thread included.
        ctx: the card; remembers the keys.
    """
    if key in ctx.searched:
        return found
    ctx.searched.add(key)
    whole = shapes.data + shapes.filters
    most = shapes.data * 36 // 16 + 4 * shapes.filters if shapes.is_3x3 else whole
    trial = _capped(most, max(0, min(_MOST_TRIED * whole, ctx.spec.total_bytes) - most), most, ctx)
    return WorkspaceEstimate(
        size=found.size,
        above=max(found.above, trial.above),
        below=max(found.below, trial.below),
        trial=trial.size,
        clears=ctx.conv_benchmark_empties_cache,
    )
