"""A private name that a release of torch lacks switches off what needs it, and the run says which."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vramfit
from vramfit.patching import PatchStack
from vramfit.torch_internals import names
from vramfit.torch_internals.names import Absent, AbsentName, Feature, in_signature_of

_CODE = "torch-name-missing"


@pytest.fixture
def feature(monkeypatch: pytest.MonkeyPatch) -> Feature:
    """One that is not registered beyond the test."""
    monkeypatch.setattr(names, "_features", [])
    return Feature("tests")


class TestLookingUp:
    def test_a_name_is_found_in_modules_and_classes(self, feature: Feature) -> None:
        assert feature.find("torch.nn.modules.conv._ConvNd") is torch.nn.modules.conv._ConvNd
        assert feature.place("torch.nn.Module._apply").get() is torch.nn.Module._apply
        assert feature.missing == []

    def test_one_that_is_missing_is_false_noted_and_refuses_to_be_used(self, feature: Feature) -> None:
        found = feature.find("torch._C._no_such_name")
        assert isinstance(found, Absent) and not found
        for use in (found, lambda: found.attribute, lambda: iter(found), lambda: 1 in found):
            with pytest.raises(
                AbsentName, match=r"has no torch\._C\._no_such_name, which vramfit needs for tests"
            ):
                use()
        assert feature.missing == ["torch._C._no_such_name"]

    def test_a_module_that_is_missing_is_as_a_name(self, feature: Feature) -> None:
        assert not feature.find("torch._no_such_module.name")
        assert feature.missing == ["torch._no_such_module.name"]

    def test_nothing_is_replaced_where_a_name_is_missing(self, feature: Feature) -> None:
        place = feature.place("torch.cuda._no_such_name")
        with PatchStack() as patches:
            assert not place.exists
            assert not place.replace(patches, 1)
            assert not hasattr(torch.cuda, "_no_such_name")

    def test_listeners_hear_of_what_was_missing_and_of_what_turns_out_to_be(self, feature: Feature) -> None:
        feature.find("torch._first")
        heard: list[str] = []
        with PatchStack() as patches:
            names.report(heard.append, patches)
            feature.find("torch._second")
            feature.find("torch._second")
        feature.find("torch._third")
        assert [text.split(",")[0] for text in heard] == [
            f"torch {torch.__version__} has no torch._first",
            f"torch {torch.__version__} has no torch._second",
        ]


class TestGroups:
    def test_a_group_is_undone_where_a_name_of_torch_is_missing(self, feature: Feature) -> None:
        def install(patches: PatchStack) -> None:
            patches.supply(torch.random, "seed_of_a_test", 1)
            torch.random._no_such_name  # type: ignore[attr-defined]  # noqa: B018

        with PatchStack() as patches:
            assert names.attempt(feature, patches, install) is None
            assert not hasattr(torch.random, "seed_of_a_test")
        assert feature.missing == ["torch.random._no_such_name"]

    def test_a_public_name_that_is_gone_is_left_out_and_noted(self, feature: Feature) -> None:
        def install(patches: PatchStack) -> bool:
            patches.set(torch.random, "no_such_name", 1)
            patches.set(torch.random, "seed", 1)
            return True

        with PatchStack() as patches:
            assert names.attempt(feature, patches, install)
            assert not hasattr(torch.random, "no_such_name")
            assert torch.random.seed == 1  # type: ignore[comparison-overlap]
        assert feature.missing == ["torch.random.no_such_name"]

    def test_a_name_that_cannot_be_imported_is_told(self, feature: Feature) -> None:
        def install(_: PatchStack) -> None:
            from torch._C import _no_such_name  # type: ignore[attr-defined]  # noqa: F401

        with PatchStack() as patches:
            names.attempt(feature, patches, install)
        assert feature.missing[0].startswith("torch._C")

    def test_mistakes_of_our_own_are_raised(self, feature: Feature) -> None:
        def install(_: PatchStack) -> None:
            vramfit.no_such_name  # type: ignore[attr-defined]  # noqa: B018

        with PatchStack() as patches, pytest.raises(AttributeError):
            names.attempt(feature, patches, install)
        assert feature.missing == []

    def test_a_group_that_works_is_undone_with_the_rest(self, feature: Feature) -> None:
        with PatchStack() as patches:
            assert (
                names.attempt(feature, patches, lambda group: group.supply(torch.random, "of_a_test", 1) or 3)
                == 3
            )
            assert torch.random.of_a_test == 1  # type: ignore[attr-defined]
        assert not hasattr(torch.random, "of_a_test")


class TestAbsent:
    def test_nothing_is_of_a_missing_class(self, feature: Feature) -> None:
        assert not isinstance(3, Absent("torch._C._Gone", feature))

    def test_a_class_that_builds_on_a_missing_one_makes_no_objects(self, feature: Feature) -> None:
        class Ours(Absent("torch._C._Gone", feature)):  # type: ignore[misc]
            pass

        with pytest.raises(AbsentName, match=r"has no torch._C._Gone, which vramfit needs for tests"):
            Ours(1, of="all")

    def test_it_has_no_items(self, feature: Feature) -> None:
        with pytest.raises(AbsentName):
            Absent("torch._C._Gone", feature)["key"]


class TestSignatures:
    def test_arguments_arrive_by_torchs_names(self, feature: Feature) -> None:
        def original(first: int, second: int = 2, *, third: int = 3) -> None:
            """As torch has it."""

        call = in_signature_of(feature, original, lambda second=None, third=None: (second, third))
        assert call(1, 5) == (5, None)
        assert call(first=1, third=7) == (None, 7)
        assert call.__doc__ == "As torch has it."

    def test_what_a_later_release_added_is_left_out(self, feature: Feature) -> None:
        def later(first: int, added: bool = False) -> None: ...

        assert in_signature_of(feature, later, lambda first: first)(1, added=True) == 1

    def test_wrong_arguments_are_torchs_error(self, feature: Feature) -> None:
        def original(first: int) -> None: ...

        with pytest.raises(TypeError, match="missing a required argument"):
            in_signature_of(feature, original, lambda first: first)()

    def test_a_parameter_that_torch_has_renamed_is_noted_and_torchs_own_is_kept(
        self, feature: Feature
    ) -> None:
        def original(renamed: int) -> int:
            return renamed

        assert in_signature_of(feature, original, lambda first: first) is original
        (path,) = feature.missing
        assert path.startswith(original.__module__) and path.endswith("(first)")


def _warnings(gpu: vramfit.VirtualGPU) -> list[str]:
    return [warning.message for warning in gpu.run.warnings if warning.code == _CODE]


def _train() -> None:
    layer = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()


@pytest.mark.torch_versions
def test_nothing_is_missing_in_the_torch_that_is_installed() -> None:
    with vramfit.VirtualGPU("RTX 4090") as gpu:
        _train()
        torch.compile(lambda x: x + 1)(torch.ones(4, device="cuda"))
    assert _warnings(gpu) == []


@pytest.mark.parametrize(
    ("path", "purpose"),
    [
        ("torch.cuda._raw_device_uuid_nvml", "answering what torch asks NVML"),
        ("torch.autograd.profiler._supported_activities", "torch.backends as on a card"),
        ("torch.serialization._save", "checkpoints"),
        ("torch.distributed.distributed_c10d._store_based_barrier", "process groups"),
        ("torch.distributed.rendezvous._create_c10d_store", "process groups"),
        (
            "torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper",
            "DistributedDataParallel's buckets",
        ),
    ],
)
def test_a_name_that_is_replaced_late_is_missed_by_its_feature(
    path: str, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    place = Feature("removing a name").place(path)
    names._features.pop()
    monkeypatch.delattr(place.holder, place.name)
    for feature in names._features:
        monkeypatch.setattr(feature, "missing", list(feature.missing))
    with vramfit.VirtualGPU("RTX 4090", rank=0, world_size=2) as gpu:
        _train()
    told = [text for text in _warnings(gpu) if path.rpartition(".")[2] in text]
    assert [text.partition(" needs for ")[2] for text in told] == [f"{purpose}: this is switched off"]
    assert gpu.peak_allocated_bytes > 0


_CHILD = """
import json, os, sys
import torch, torch._inductor.compile_fx, torch.distributed, torch.distributed.tensor
for path in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        holder, _, name = path.rpartition(".")
        found = torch
        for part in holder.split(".")[1:]:
            found = getattr(found, part)
        delattr(found, name)
        import vramfit
        with vramfit.VirtualGPU("RTX 4090") as gpu:
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
            if "compile" in path:
                model = torch.compile(model)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
        told = [w.message for w in gpu.run.warnings if w.code == "torch-name-missing"]
        os.write(writing, json.dumps([gpu.peak_allocated_bytes, told]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        print(path, answer.read())
    os.waitpid(child, 0)
"""

_FOUND_EARLY = {
    "torch._C._profiler._EventType": "recording what a real device allocates",
    "torch._library.custom_ops.OPDEFS": "operators that programs register",
    "torch._C._distributed_c10d.Logger": "process groups",
    "torch._C._autograd._get_sequence_nr": "profiles of a step, from which plans are made",
    "torch._C._get_sdp_priority_order": "taking the kernels that the card would take",
    "torch._C._LinalgBackend": "taking the kernels that the card would take",
    "torch._C._distributed_c10d.Store": "process groups",
    "torch._library.fake_impl.FakeImplCtx": "operators that programs register",
    "torch._subclasses.fake_impls.stride_incorrect_op": "carrying tensors without values",
    "torch.nn.modules.dropout._DropoutNd": "telling layers apart",
    "torch._inductor.compile_fx._compile_fx_inner": "compiled programs",
}


@pytest.mark.skipif(not hasattr(sys, "setswitchinterval") or sys.platform == "win32", reason="it forks")
def test_names_that_are_found_when_vramfit_is_imported_are_missed_by_their_features() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(list(_FOUND_EARLY))],
        capture_output=True,
        text=True,
        check=True,
    )
    answers = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    peaks = set()
    for path, purpose in _FOUND_EARLY.items():
        peak, told = json.loads(answers[path] or "[0, []]")
        peaks.add(peak)
        assert any(path in text and f"needs for {purpose}: this is switched off" in text for text in told), (
            path
        )
    assert len(peaks) == 1 and peaks.pop() > 0


def test_a_facade_function_that_gets_more_than_it_knows_takes_it() -> None:
    """As `torch.cuda.memory._record_memory_history` of torch 2.14 gives two more than that of 2.13."""
    with vramfit.VirtualGPU("RTX 4090"):
        record: Callable[..., Any] = torch._C._cuda_record_memory_history  # type: ignore[attr-defined]
        record("all", "all", "python", 100, False, False, False, [], False, True, "of a later release")
        assert torch._C._cuda_isHistoryEnabled()
        record(None, None, "python", 0, False, False, False, [], False, True)
