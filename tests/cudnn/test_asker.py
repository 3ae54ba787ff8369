"""The process that asks: what it answers, what it keeps, and what a library does to it."""

import json

import pytest

from vramfit.cudnn import asker as asking
from vramfit.cudnn.asker import AskedCudnn, CudnnAsker, ask_cudnn, cudnn_cache
from vramfit.cudnn.found_library import find_cudnn
from vramfit.cudnn.questions import ConvPass, ConvPlan, device_properties
from vramfit.errors import UsageError, VramfitError
from vramfit.gpus import find_gpu

from .libraries import behaving, dense, installed, question, real_cudnn

CARD = find_gpu("RTX 4090")


@pytest.fixture
def started(tmp_path):
    """Starts askers of libraries that behave in some way; ends them afterwards."""
    all_of_them = []

    def start(action, **options):
        packages = behaving(tmp_path / f"{action}-{len(all_of_them)}", action, **options)
        all_of_them.append(CudnnAsker(find_cudnn(str(packages)), CARD))
        return all_of_them[-1]

    yield start
    for asker in all_of_them:
        asker.close()


def test_it_answers_and_asks_once(started):
    asker = started("answers")
    assert asker.version == 92000
    assert repr(asker) == "<CudnnAsker 9.20.0 for RTX 4090>"
    for _ in range(2):
        answer = asker.plans(question())
        assert answer is not None and answer.plans == (ConvPlan(workspace=4096, engine=7),)
    assert asker.asked == 1
    every = asker.plans(question(most=0))
    assert every is not None and len(every.plans) == 4  # two of the heuristics, two fallbacks


def test_other_clocks_are_asked_about_where_they_may_matter(started):
    answer = started("answers").plans(question(any_clock=True))
    assert answer is not None and answer.at_other_clocks == (4096, 4096)


def test_answers_are_kept_for_the_next_process(started, monkeypatch):
    first = started("answers")
    first.plans(question())
    (file,) = (file for file in cudnn_cache().iterdir() if file.suffix == ".jsonl")
    assert file.name.startswith("92000-")
    with file.open("a") as more:  # what a process that was killed left
        more.write('{"question": "x", "reply": {"answer": {"plans": [7]}}}\n{"question": "half')
    second = started("hangs")  # of the same version: it would hang if it were asked
    answer = second.plans(question())
    assert answer is not None and answer.plans == (ConvPlan(workspace=4096, engine=7),)


def test_one_that_knows_no_such_convolution_is_asked_again_for_others(started):
    asker = started("refuses")
    answer = asker.plans(question())
    assert answer is not None and not answer.plans
    assert asker.failure == ""


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("crashes", "the process that asks cuDNN ended by signal 6"),
        ("hangs", "cuDNN did not answer within 1 s"),
        ("knows-no-card", "cuDNN cannot be asked: NOT_SUPPORTED: made to refuse"),
    ],
)
def test_one_that_fails_is_asked_no_more(started, monkeypatch, action, words):
    monkeypatch.setattr(asking, "_FIRST", 1.0)
    told = []
    asker = started(action)
    asked = AskedCudnn(asker, told.append)
    assert asked.plans(question()) is None
    assert asked.plans(question(ConvPass.BACKWARD_DATA)) is None
    assert told == [words]
    assert asked.convolutions == 0


def test_one_that_is_not_the_version_of_its_package_is_not_asked(started):
    asker = started("answers", version=91000)
    assert asker.plans(question()) is None
    assert asker.failure == "cuDNN cannot be asked: it says that it is version 91000, its package 92000"


def test_one_that_cannot_be_loaded_is_not_asked(tmp_path):
    library = installed(tmp_path)  # the head of a library alone
    asker = CudnnAsker(find_cudnn(str(library)), CARD)
    assert asker.plans(question()) is None
    assert "cuDNN cannot be asked: " in asker.failure


def test_a_process_is_started_once_for_a_library_and_a_card(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "_started", {})
    packages = str(behaving(tmp_path, "answers"))
    first = ask_cudnn(packages, CARD)
    assert ask_cudnn(packages, CARD) is first
    other = ask_cudnn(packages, find_gpu("A100 80GB"))
    assert other is not first
    for asker in (first, other):
        asker.close()
    for _ in range(2):
        with pytest.raises(UsageError, match="there is no cuDNN"):
            ask_cudnn("/nowhere", CARD)


def test_what_is_no_answer_is_an_error_in_a_line(started, monkeypatch):
    asker = started("answers")
    monkeypatch.setattr(asking.json, "loads", lambda text: {"answer": 7})
    assert asker.plans(question()) is None
    assert asker.failure.startswith("the process that asks cuDNN gave no answer: ")


def test_a_cache_that_cannot_be_written_is_told_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "_started", {})

    def refuse(library, cache):
        raise PermissionError(13, "Permission denied", str(cache))

    monkeypatch.setattr(asking, "stand_in", refuse)
    with pytest.raises(VramfitError, match=r"cuDNN cannot be asked: .*Permission denied"):
        ask_cudnn(str(behaving(tmp_path, "answers")), CARD)


def test_a_card_as_cudnn_is_told():
    told = device_properties(CARD)
    assert (told["deviceVer"], told["multiProcessorCount"], told["maxCtasPerSM"]) == (890, 128, 24)
    assert (told["memoryBusWidth"], told["deviceName"]) == (384, "NVIDIA GeForce RTX 4090")
    slower = device_properties(CARD, clock_share=0.5)
    assert slower["smClockRateKHz"] * 2 == told["smClockRateKHz"]
    assert json.dumps(told)  # plain values alone


@pytest.mark.skipif(real_cudnn() is None, reason="no cuDNN is installed here")
def test_an_installed_one_gives_the_six_workspaces_of_a_recording():
    """Quadro RTX 6000, recording eor-nn: six of six, to the byte."""
    asker = ask_cudnn("auto", find_gpu("Quadro RTX 6000"))
    sides = (256, 128, 64)
    pairs = ((30, 16), (16, 32), (32, 64))
    found = {}
    for kind in (ConvPass.FORWARD, ConvPass.BACKWARD_DATA):
        for side, (read, made) in zip(sides, pairs, strict=True):
            answer = asker.plans(
                question(
                    kind,
                    x=dense(1, read, side, side),
                    y=dense(1, made, side, side),
                    w=dense(made, read, 3, 3),
                )
            )
            assert answer is not None
            found[kind, made, read] = answer.plans[0].workspace
    assert found == {
        (ConvPass.FORWARD, 16, 30): 82_880,
        (ConvPass.FORWARD, 32, 16): 51_328,
        (ConvPass.FORWARD, 64, 32): 205_056,
        (ConvPass.BACKWARD_DATA, 16, 30): 50_168,
        (ConvPass.BACKWARD_DATA, 32, 16): 84_032,
        (ConvPass.BACKWARD_DATA, 64, 32): 204_928,
    }


def test_an_error_is_one_of_ours(tmp_path):
    with pytest.raises(VramfitError):
        ask_cudnn(str(tmp_path), CARD)
