"""What cuDNN is asked for a convolution, and what becomes of its answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from vramfit import VirtualGPU
from vramfit.cudnn.questions import ConvAnswer, ConvPass, ConvPlan, ConvQuestion
from vramfit.virtual.op_call import EMPTY_CACHE, Alternatives

from .support import FAKE, ask, aten, context, cuda
from .test_convolution import backward, channels_last, conv

MIB = 1 << 20


@dataclass
class Asker:
    """Answers every question with plans of the same sizes, and keeps the questions."""

    sizes: tuple[int, ...] = (4096,)
    version: int = 92000
    clocks: tuple[int, ...] = ()
    questions: list[ConvQuestion] = field(default_factory=list)

    def plans(self, question: ConvQuestion) -> ConvAnswer | None:
        self.questions.append(question)
        sizes = self.sizes[: question.most or None]
        plans = tuple(ConvPlan(workspace=size, engine=index) for index, size in enumerate(sizes))
        return ConvAnswer(plans=plans, at_other_clocks=self.clocks)


def asked(*calls, **changes):
    """The questions that some calls lead to."""
    asker = Asker()
    for call in calls:
        call(context(asker=asker, **changes))
    return asker.questions


def test_the_question_has_what_torch_tells_cudnn():
    (question,) = asked(lambda ctx: conv(cuda(8, 64, 56, 56), cuda(128, 64, 3, 3), ctx, stride=2))
    assert (question.kind, question.dtype) == (ConvPass.FORWARD, "float32")
    assert question.x.dims == (8, 64, 56, 56) and question.x.strides == (64 * 56 * 56, 56 * 56, 56, 1)
    assert question.y.dims == (8, 128, 28, 28) and question.w.dims == (128, 64, 3, 3)
    assert (question.padding, question.stride, question.dilation) == ((1, 1), (2, 2), (1, 1))
    assert (question.tf32, question.deterministic, question.mode_b, question.most) == (True, False, False, 1)


def test_switches_of_torch_are_part_of_the_question():
    def call(ctx):
        return conv(cuda(8, 64, 56, 56), cuda(64, 64, 3, 3), ctx)

    assert not asked(call, cudnn_tf32=False)[0].tf32
    assert asked(call, cudnn_deterministic=True)[0].deterministic
    assert asked(call, environ={"TORCH_CUDNN_USE_HEURISTIC_MODE_B": "1"})[0].mode_b
    assert not asked(call)[0].any_clock
    asker = Asker()
    conv(cuda(8, 64, 56, 56), cuda(64, 64, 3, 3), context("H100 SXM", asker=asker))
    assert asker.questions[0].any_clock


def test_one_dimension_is_asked_as_two():
    weight = cuda(32, 16, 5)
    (question,) = asked(lambda ctx: conv(cuda(4, 16, 100), weight, ctx, stride=2, padding=2))
    assert question.x.dims == (4, 16, 1, 100) and question.w.dims == (32, 16, 1, 5)
    assert question.y.dims == (4, 32, 1, 50)
    assert (question.padding, question.stride, question.dilation) == ((0, 2), (1, 2), (1, 1))


def test_three_dimensions_and_groups():
    (question,) = asked(lambda ctx: conv(cuda(2, 16, 8, 8, 8), cuda(32, 4, 3, 3, 3), ctx, groups=4))
    assert question.w.dims == (32, 4, 3, 3, 3) and question.stride == (1, 1, 1)
    assert question.x.strides == (16 * 512, 512, 64, 8, 1)


def test_channels_last_and_half_precision():
    source = channels_last(8, 64, 56, 56, dtype=torch.bfloat16)
    weight = channels_last(64, 64, 3, 3, dtype=torch.bfloat16)
    (question,) = asked(lambda ctx: conv(source, weight, ctx))
    assert question.dtype == "bfloat16"
    assert question.x.strides == (64 * 56 * 56, 1, 64 * 56, 64) and question.w.strides == (576, 1, 192, 64)


def test_gradients_of_input_and_filters():
    grad, source, weight = cuda(8, 128, 56, 56), cuda(8, 64, 56, 56), cuda(128, 64, 3, 3)
    first, second = asked(lambda ctx: backward(grad, source, weight, [True, True, False], ctx))
    assert (first.kind, second.kind) == (ConvPass.BACKWARD_DATA, ConvPass.BACKWARD_FILTER)
    for question in (first, second):
        assert (question.x.dims, question.y.dims) == ((8, 64, 56, 56), (8, 128, 56, 56))


def test_a_transposed_convolution_is_the_gradient_of_one():
    source, weight = cuda(8, 64, 28, 28), cuda(64, 32, 3, 3)
    (question,) = asked(lambda ctx: conv(source, weight, ctx, transposed=True))
    assert question.kind is ConvPass.BACKWARD_DATA
    assert (question.x.dims, question.y.dims) == ((8, 32, 28, 28), (8, 64, 28, 28))
    grad = cuda(8, 32, 28, 28)
    first, second = asked(
        lambda ctx: backward(grad, source, weight, [True, True, False], ctx, transposed=True)
    )
    assert (first.kind, second.kind) == (ConvPass.FORWARD, ConvPass.BACKWARD_FILTER)
    assert (first.x.dims, first.y.dims) == ((8, 32, 28, 28), (8, 64, 28, 28))


def test_the_alignment_of_a_view_is_that_of_its_address():
    with FAKE:
        whole = torch.empty(9 * 3 * 5 * 5, device="cuda")
        source = whole[75:].view(8, 3, 5, 5)  # 300 bytes in
    (question,) = asked(lambda ctx: conv(source, cuda(4, 3, 3, 3), ctx))
    assert (question.x.alignment, question.y.alignment, question.w.alignment) == (4, 32, 32)


def test_an_answer_of_the_same_version_is_certain():
    found = conv(cuda(8, 64, 56, 56), cuda(64, 64, 3, 3), context(asker=Asker((5 * MIB,))))
    assert found.after == (5 * MIB,)
    assert (found.error_below_bytes, found.error_bytes) == (0, 0)


def test_products_of_matrices_are_not_certain_and_on_hopper_not_asked():
    source, weight = cuda(8, 64, 56, 56), cuda(64, 64, 1, 1)
    rules = conv(source, weight, context(), padding=0)
    found = conv(source, weight, context(asker=Asker((0,))), padding=0)
    assert (found.after, found.error_bytes) == ((), rules.after[0] + rules.error_bytes)
    assert found.choices == rules.choices == ("FORWARD 1x1",)
    asker = Asker((MIB,))
    assert conv(source, weight, context("H100 SXM", asker=asker), padding=0).after == ()
    assert asker.questions == []


def test_an_answer_of_another_version_has_the_bar_of_the_rules():
    source, weight = cuda(8, 64, 56, 56), cuda(64, 64, 3, 3)
    rules = conv(source, weight, context())
    least, most = sum(rules.after) - rules.error_below_bytes, sum(rules.after) + rules.error_bytes
    for size in (0, MIB, 100 * MIB):
        found = conv(source, weight, context(asker=Asker((size,), version=91002)))
        assert sum(found.after) == size
        assert size - found.error_below_bytes == min(size, least)
        assert size + found.error_bytes == max(size, most)


def test_clocks_that_change_the_answer_make_a_bar():
    found = conv(
        cuda(8, 64, 56, 56), cuda(64, 64, 3, 3), context("H100 SXM", asker=Asker((MIB,), clocks=(0, 3 * MIB)))
    )
    assert (found.after, found.error_below_bytes, found.error_bytes) == ((MIB,), MIB, 2 * MIB)


def test_what_cudnn_cannot_say_is_left_to_the_rules():
    source, weight = cuda(8, 64, 56, 56), cuda(64, 64, 3, 3)
    assert conv(source, weight, context(asker=Asker(()))) == conv(source, weight, context())


def test_benchmark_mode_tries_all_and_takes_the_largest_first():
    ctx = context(asker=Asker((MIB, 7 * MIB, 0, 2 * MIB)), cudnn_benchmark=True)
    source, weight = cuda(8, 64, 56, 56), cuda(64, 64, 3, 3)
    first = conv(source, weight, ctx)
    assert first.after[0] == 7 * MIB and first.after[2:] == (EMPTY_CACHE, MIB)
    assert (first.error_below_bytes, first.error_bytes) == (MIB, 6 * MIB)  # any of them may be the fastest
    assert conv(source, weight, ctx).after == (MIB,)
    assert ctx.asker.questions[0].most == 0


def test_a_plan_that_does_not_fit_is_passed_over_and_the_next_is_kept():
    """NOTE [Plans that are kept]: also once there would be room for the first one."""
    with VirtualGPU("1GiB", context_bytes=0) as gpu:
        gpu._machine.cudnn_asker = Asker((600 * MIB, 500 * MIB, 40 * MIB))
        layer = torch.nn.Conv2d(4, 4, 3, padding=1).cuda()
        image = torch.empty(1, 4, 64, 64, device="cuda")
        layer(image)
        assert torch.cuda.max_memory_allocated() > 600 * MIB
        full = torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        layer(image)  # neither 600 nor 500 MiB are there
        assert 740 * MIB <= torch.cuda.max_memory_allocated() < 760 * MIB
        del full
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        layer(image)
        assert 40 * MIB <= torch.cuda.max_memory_allocated() < 60 * MIB
    assert gpu.run.oom is None or gpu.run.oom.handled


def test_a_convolution_does_without_where_no_plan_fits():
    with VirtualGPU("1GiB", context_bytes=0) as gpu:
        gpu._machine.cudnn_asker = Asker((2048 * MIB,))
        torch.nn.Conv2d(4, 4, 3).cuda()(torch.empty(1, 4, 64, 64, device="cuda"))
        assert torch.cuda.max_memory_allocated() < 10 * MIB


def test_an_entry_with_alternatives_is_a_number():
    entry = Alternatives(4096, lambda: iter((4096,)))
    assert entry == 4096 and list(entry.tries()) == [4096]


@pytest.mark.parametrize("name", ["cudnn_convolution_relu", "cudnn_convolution_add_relu"])
def test_fused_convolutions_are_left_to_the_rules(name):
    source, weight, bias = cuda(8, 64, 56, 56), cuda(64, 64, 3, 3), cuda(64)
    geometry = ([1, 1], [1, 1], [1, 1], 1)
    asker = Asker((MIB,))
    given = (source, weight, bias, *geometry)
    if name.endswith("add_relu"):
        given = (source, weight, cuda(8, 64, 56, 56), 1.0, bias, *geometry)
    outputs = cuda(8, 64, 56, 56)
    found = ask(getattr(aten, name).default, *given, ctx=context(asker=asker), outputs=outputs)
    assert found == ask(getattr(aten, name).default, *given, ctx=context(), outputs=outputs)
    assert not asker.questions
