"""Attention by cudnn-frontend: which one is found, what it is told, and what is said where it cannot be used."""

import json
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from vramfit.cudnn import asker as asking
from vramfit.cudnn import frontend as loading
from vramfit.cudnn.answering import ATTENTION, Answering, Opening
from vramfit.cudnn.asker import AskedCudnn, CudnnAsker, ask_cudnn
from vramfit.cudnn.backend import BackendError
from vramfit.cudnn.found_frontend import WANTS_DRIVER, find_frontend
from vramfit.cudnn.found_library import find_cudnn
from vramfit.cudnn.frontend import Frontend, FrontendError
from vramfit.cudnn.questions import AttentionPass, AttentionQuestion, TensorShape, device_properties
from vramfit.gpus import find_gpu
from vramfit.plain import from_plain, to_plain

from .libraries import attention, behaving, installed, question, real_cudnn

CARD = find_gpu("H100 SXM")
FAKE = str(Path(__file__).with_name("fake_frontend.py"))


class Library:
    """A cuDNN that is loaded."""

    handle, cuda, version = 1, 13, 92000


@pytest.fixture
def frontend(monkeypatch):
    """A fake one whose prerequisites are there."""
    monkeypatch.setattr(loading, "_require", lambda library, otherwise: None)
    monkeypatch.setitem(sys.modules, "cudnn", None)  # put back afterwards
    return Frontend(FAKE, Library(), device_properties(CARD))


def with_frontend(packages, version="1.22.1", suffix=EXTENSION_SUFFIXES[0]):
    """Put a package of cudnn-frontend into a folder of packages."""
    (packages / "cudnn").mkdir()
    (packages / "cudnn" / f"_compiled_module{suffix}").touch()
    (packages / f"nvidia_cudnn_frontend-{version}.dist-info").mkdir()


# -- which one is found


def test_one_beside_the_library_or_among_the_packages_of_this_python_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    library = installed(tmp_path / "one")
    found = find_cudnn(str(library))
    assert find_frontend(found).lacks == "cudnn-frontend is not installed"
    with_frontend(tmp_path / "one")
    module = tmp_path / "one" / "cudnn" / f"_compiled_module{EXTENSION_SUFFIXES[0]}"
    assert find_frontend(found).module == str(module)
    elsewhere = find_cudnn(str(installed(tmp_path / "two")))
    assert not find_frontend(elsewhere).module
    monkeypatch.setattr("sys.path", [str(tmp_path / "one")])
    assert find_frontend(elsewhere).module == str(module)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "1.18.0"}, "cudnn-frontend 1.18.0 makes no graphs without a card, 1.19 does"),
        ({"suffix": ".other.so"}, "cudnn-frontend 1.22.1 is installed for another Python"),
    ],
)
def test_one_that_cannot_be_used_is_told_of(tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr("sys.path", [])
    library = installed(tmp_path)
    with_frontend(tmp_path, **changes)
    found = find_frontend(find_cudnn(str(library)))
    assert (found.module, found.lacks) == ("", words)


def test_a_cudnn_that_plans_attention_on_a_card_alone_is_not_asked(tmp_path):
    library = installed(tmp_path, version="9.8.0")
    with_frontend(tmp_path)
    lacks = find_frontend(find_cudnn(str(library))).lacks
    assert lacks == "cuDNN makes plans of attention without a card from 9.10.0 on"


# -- what it is told


def graph_of(frontend, question):
    assert frontend.workspace(question) == 12345
    return sys.modules["cudnn"].graphs[-1]


def test_the_forward_graph_is_that_of_torch(frontend):
    graph = graph_of(frontend, attention(causal=True))
    assert graph.about["sm_version"] == 90 and json.loads(graph.about["device_property"])["deviceVer"] == 900
    assert graph.about["io_data_type"] == "bf16" and graph.about["compute_data_type"] == "f32"
    given = graph.given
    assert given["use_causal_mask"] and given["generate_stats"]
    assert "dropout" not in given and "bias" not in given
    assert (given["q"].dim, given["q"].stride) == ([2, 8, 512, 64], [8 * 512 * 64, 64, 8 * 64, 1])
    scale = given["attn_scale"]
    assert scale.is_pass_by_value and scale.data_type == "f32" and not given["q"].is_pass_by_value
    out, stats = graph.outputs
    assert out.output and out.dim == [2, 8, 512, 64] and stats.data_type == "f32"
    assert graph.calls == [
        "validate",
        "build_operation_graph",
        ("create_execution_plans", "A"),
        "check_support",
        "build_plans",
    ]


def test_the_backward_graph_is_that_of_torch(frontend):
    bias = TensorShape(dims=(2, 1, 512, 512), strides=(0, 0, 512, 1))
    question = attention(
        AttentionPass.BACKWARD, dropout=0.25, bias=bias, bias_dtype="float32", dtype="float16"
    )
    given = graph_of(frontend, question).given
    assert given["stats"].dim == [2, 8, 512, 1] and given["stats"].data_type == "f32"
    assert given["dO"].dim == given["o"].dim == [2, 8, 512, 64] and given["dO"].data_type == "f16"
    assert given["bias"].stride == [0, 0, 512, 1] and given["bias"].data_type == "f32"
    share, seed, offset = given["dropout"]
    assert (share, seed.data_type, offset.dim) == (0.25, "i64", [1, 1, 1, 1])
    for gradient in sys.modules["cudnn"].graphs[-1].outputs:
        assert gradient.output and gradient.stride == [8 * 512 * 64, 64, 8 * 64, 1]


def test_inference_has_no_stats(frontend):
    assert graph_of(frontend, attention(stats=False)).outputs[1] is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("No valid engine configs for\n{}\nWarning: NOT_SUPPORTED; Reason: no libnvrtc\nmore", "no libnvrtc"),
        ("Num hidden_dim is too large", "Num hidden_dim is too large"),
    ],
)
def test_a_refusal_is_told_in_a_line(frontend, said, words):
    sys.modules["cudnn"].refusal = said
    with pytest.raises(BackendError) as caught:
        frontend.workspace(attention())
    assert str(caught.value) == words


def test_another_interface_is_told_in_a_line(frontend):
    del sys.modules["cudnn"].pygraph.sdpa
    with pytest.raises(FrontendError, match="this cudnn-frontend cannot be used: 'pygraph' object has no"):
        frontend.workspace(attention())


def test_what_is_no_module_cannot_be_used(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "_require", lambda library, otherwise: None)
    module = tmp_path / f"_compiled_module{EXTENSION_SUFFIXES[0]}"
    module.touch()
    with pytest.raises(FrontendError, match="this cudnn-frontend cannot be used: ") as caught:
        Frontend(str(module), Library(), device_properties(CARD))
    assert "\n" not in str(caught.value)


def test_a_library_that_is_missing_is_named():
    with pytest.raises(FrontendError, match="it is not here"):
        loading._require("libnothing.so.7", "it is not here")


# -- between the processes


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """The process's side, with a fake module and a library that is loaded."""
    monkeypatch.setattr(loading, "_require", lambda library, otherwise: None)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setattr("vramfit.cudnn.answering.Cudnn", lambda library: FakeCudnn())
    opening = Opening(
        library="", version=92000, card=device_properties(CARD), cache=str(tmp_path), frontend=FAKE
    )
    return Answering(opening)


class FakeCudnn(Library):
    def card(self, properties):
        return properties


def line(question):
    return json.dumps({ATTENTION: to_plain(question)})


def test_an_answer_is_kept_and_a_refusal_is_not(answering, tmp_path):
    assert answering.reply(line(attention()))["workspace"] == 12345
    sys.modules["cudnn"].refusal = "too large"
    refused = answering.reply(line(attention(causal=True)))
    assert (refused["workspace"], refused["refusal"], refused["fatal"]) == (None, "too large", False)
    assert answering.reply(line(attention()))["workspace"] == 12345  # the library is not asked again
    (file,) = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) == 1


def test_what_is_missing_is_no_failure_of_the_process(answering, monkeypatch):
    def missing(library, otherwise):
        raise FrontendError(otherwise)

    monkeypatch.setattr(loading, "_require", missing)
    reply = answering.reply(line(attention()))
    assert (reply["lacks"], reply["fatal"]) == ("NVRTC for CUDA 13 is not installed", False)


def test_a_question_is_asked_once_and_its_lack_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    asker = CudnnAsker(find_cudnn(str(behaving(tmp_path, "answers"))), CARD)
    told = []
    asked = AskedCudnn(asker, told.append)
    assert asked.attention(attention()) is None
    assert (asked.attentions, asked.attention_lacks, told) == (0, "cudnn-frontend is not installed", [])
    assert asker.asked == 0 and asker.failure == ""
    asker.close()


def test_what_the_process_lacks_leaves_convolutions_to_it(tmp_path):
    packages = behaving(tmp_path, "answers")
    with_frontend(packages)
    asker = CudnnAsker(find_cudnn(str(packages)), CARD)
    told = []
    asked = AskedCudnn(asker, told.append)
    for _ in range(2):
        assert asked.attention(attention()) is None
    assert (asked.attention_lacks, told) == ("NVRTC for CUDA 99 is not installed", [])
    assert asked.plans(question()) is not None
    asker.close()


def test_attention_is_never_planned_with_a_stand_in_for_the_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "stand_in", lambda library, cache: str(tmp_path))
    packages = behaving(tmp_path, "answers")
    with_frontend(packages)
    asker = CudnnAsker(find_cudnn(str(packages)), CARD)
    assert asker.attention(attention()) is None
    assert (asker.lacks, asker.asked) == (WANTS_DRIVER, 0)
    asker.close()


def test_a_run_asks_no_more_than_some(monkeypatch):
    class Counting:
        lacks = failure = ""
        asked = 0

        def attention(self, question):
            self.asked += 1
            return self.asked

    monkeypatch.setattr(asking, "_MOST_ATTENTIONS", 3)
    asker = Counting()
    asked = AskedCudnn(asker, print)
    found = [asked.attention(attention(dropout=share / 8)) for share in (0, 1, 1, 2, 3, 0)]
    assert found == [1, 2, 2, 3, None, 1]
    assert (asked.attentions, asked.attention_lacks) == (3, "beyond 3 different ones")


@pytest.mark.skipif(real_cudnn() is None, reason="no cuDNN is installed here")
def test_an_installed_one_accumulates_the_gradient_of_queries():
    """What cudnn-frontend lays out is in the answer, and the plan adds little to it on a Hopper card."""
    asker = ask_cudnn("auto", CARD)
    size = asker.attention(attention(AttentionPass.BACKWARD))
    if asker.lacks:
        pytest.skip(asker.lacks)
    laid_out = 2 * 8 * 512 * (64 + 1) * 4
    assert size is not None and laid_out <= size <= laid_out + 512


def test_a_question_can_be_written_and_read():
    asked = attention(AttentionPass.BACKWARD, dropout=0.1)
    assert from_plain(json.loads(json.dumps(to_plain(asked))), AttentionQuestion) == asked
