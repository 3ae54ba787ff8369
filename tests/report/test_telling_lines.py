"""The user's line is left out where it is that of everything, in favour of the module or the library's line."""

from __future__ import annotations

from dataclasses import replace

from analysis.synthetic import MODEL, TRAIN, TRAINER, Recorder, virtual_run
from report.golden_files import check_golden
from vramfit.analysis import TensorGroup, verdict
from vramfit.report import render
from vramfit.report.telling_lines import with_telling_places
from vramfit.trace import Category, Frame
from vramfit.units import MIB

USER = Frame(TRAIN, 9, "<module>")
LOSS = Frame("/venv/lib/python3.11/site-packages/transformers/loss_utils.py", 42, "loss")
GROUP = TensorGroup(
    tensor="float32[4]",
    op="aten.addmm.default",
    category=Category.ACTIVATIONS,
    module="GPT2.h.*.mlp",
    line=USER,
    library_line=TRAINER,
    block_bytes=MIB,
    count=1,
    total_bytes=MIB,
)


def test_the_line_of_everything_gives_way_to_the_module_else_to_the_library() -> None:
    outside = replace(GROUP, module="")
    nothing = replace(outside, library_line=None)
    told = with_telling_places([GROUP, replace(GROUP, op="aten.mul.Tensor"), outside, nothing])
    assert [(one.line, one.library_line) for one in told] == [
        (None, None),
        (None, None),
        (None, TRAINER),
        (USER, None),
    ]
    assert told[0].module == "GPT2.h.*.mlp"


def test_lines_that_differ_stay() -> None:
    groups = [replace(GROUP, line=Frame(MODEL, line, "forward"), library_line=None) for line in range(4)]
    assert list(with_telling_places(groups)) == groups


def test_the_one_line_of_a_plain_script_stays_beside_others() -> None:
    """No library stands between: the forward pass, the loss and the step are lines of the script."""
    plain = replace(GROUP, library_line=None)
    groups = [plain, plain, plain, replace(plain, line=Frame(TRAIN, 10, "<module>"))]
    assert list(with_telling_places(groups)) == groups


def test_a_trainer_s_tensors_are_shown_by_module_and_operator() -> None:
    recorder = Recorder()
    recorder.phase("step 0/forward")
    for place in ("GPT2.h.0.mlp.act", "GPT2.h.0.attn.c_attn", "GPT2.lm_head", ""):
        for op in ("aten.addmm.default", "aten.mul.Tensor"):
            recorder.alloc(
                "float32[4, 512, 3072]",
                24 * MIB + len(place) * MIB,
                Category.ACTIVATIONS,
                op=op,
                module=place,
                stack=(TRAINER if place else LOSS, USER),
            )
    run = virtual_run(recorder.finish())
    for width in (80, 120):
        text = render(run, verdict(run, cards=()), width=width)
        check_golden(f"trainer-{width}.txt", text)
        assert "train.py:9" not in text.partition("Largest tensors")[2]
