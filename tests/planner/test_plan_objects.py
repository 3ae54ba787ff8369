"""A plan on a user's own model, optimizer and loop."""

from __future__ import annotations

import copy
import dataclasses
import io
import math

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.toys import all_toys, gradients, language_loss
from torch.optim.swa_utils import AveragedModel

from vramfit.errors import UsageError
from vramfit.planner.plan_file import PlanFigures, PlanTarget
from vramfit.planner.plans import Plan, plan_of
from vramfit.techniques import Choice, find_technique, setting_from_plain

_NONE = PlanFigures(peak_allocated_bytes=0, peak_reserved_bytes=0, total_bytes=0)


def _plan(**settings: dict[str, object]) -> Plan:
    choices = []
    for name, plain in settings.items():
        technique = find_technique(name.replace("_", "-"))
        choices.append(Choice(technique=technique, setting=setting_from_plain(technique, plain)))
    return plan_of(choices, PlanTarget(device="CPU", budget_bytes=1), _NONE, _NONE)


def _layers() -> dict[str, object]:
    return {"mode": "whole", "modules": ["layers.0", "layers.1", "layers.2"]}


def test_five_lines_in_a_loop_train_as_before() -> None:
    plan = _plan(activation_checkpointing=_layers(), chunked_loss={})
    workload = all_toys()["language-tied"]
    plain, planned = workload.model(), workload.model()
    first = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    second = torch.optim.SGD(planned.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = plan.apply(planned, second)
    assert model is planned
    assert optimizer is second
    batch = workload.batch(**workload.sizes)
    for seed in range(3):
        torch.manual_seed(seed)
        language_loss(plain, batch).backward()
        first.step()
        first.zero_grad()
        torch.manual_seed(seed)
        for micro in plan.split(batch):
            plan.backward(language_loss(model, micro))
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = plan.step(clip_norm=math.inf if seed else None)
        assert norm is None if not seed else torch.equal(norm, expected)
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_state_copies_averages_and_files_work_as_before() -> None:
    plan = _plan(activation_checkpointing=_layers())
    workload = all_toys()["language-tied"]
    model = workload.model()
    keys = list(model.state_dict())
    plan.apply(model, None)
    assert list(model.state_dict()) == keys
    batch = workload.batch(**workload.sizes)
    model.eval()
    expected = model(batch)
    assert torch.equal(copy.deepcopy(model)(batch), expected)
    assert torch.equal(AveragedModel(model)(batch), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(batch), expected)
    plain = workload.model()
    plain.load_state_dict(model.state_dict())
    plain.eval()
    assert torch.equal(plain(batch), expected)


def test_undo_leaves_the_model_as_it_was() -> None:
    plan = _plan(activation_checkpointing=_layers(), mixed_precision={"dtype": "bfloat16"}, chunked_loss={})
    model = all_toys()["language-tied"].model()
    kinds = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan.apply(model, optimizer)
    assert [type(module) for module in model.modules()] != kinds
    assert plan.undo(model) is optimizer
    assert [type(module) for module in model.modules()] == kinds
    assert [set(vars(module)) for module in model.modules()] == attributes


def test_a_plan_on_a_workload_gives_the_gradients_of_the_plain_one() -> None:
    workload = all_toys()["language-untied"]
    plan = _plan(activation_checkpointing=_layers())
    expected, found = gradients(workload), gradients(plan.apply(workload))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_mistakes_are_told_in_one_line() -> None:
    plan = _plan(activation_checkpointing=_layers())
    model = all_toys()["language-tied"].model()
    with pytest.raises(UsageError, match="not applied yet"):
        plan.step()
    plan.apply(model, None)
    with pytest.raises(UsageError, match="applied already"):
        plan.apply(model, None)
    with pytest.raises(UsageError, match="another model"):
        plan.undo(all_toys()["mlp"].model())
    with pytest.raises(UsageError, match=r"the loss is no scalar but \[4, 97\]"):
        plan.backward(F.one_hot(torch.zeros(4, dtype=torch.long), 97).float())


def test_what_the_model_does_not_have_is_refused_before_anything_changes() -> None:
    plan = _plan(activation_checkpointing={"mode": "whole", "modules": ["encoder.0"]})
    model = all_toys()["language-tied"].model()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UsageError, match=r"encoder\.0"):
        plan.apply(model, None)
    assert [type(module) for module in model.modules()] == kinds


def test_a_second_plan_on_a_planned_model_is_refused() -> None:
    first, second = _plan(activation_checkpointing=_layers()), _plan(chunked_loss={})
    model = all_toys()["language-tied"].model()
    first.apply(model, None)
    with pytest.raises(UsageError, match="another plan is applied to this model already"):
        second.apply(model, None)
    first.undo(model)
    second.apply(model, None)
    second.undo(model)


def test_an_optimizer_that_runs_the_model_itself_is_refused() -> None:
    model = all_toys()["language-tied"].model()
    with pytest.raises(UsageError, match="LBFGS wants a closure"):
        _plan(activation_checkpointing=_layers()).apply(model, torch.optim.LBFGS(model.parameters()))
    workload = dataclasses.replace(all_toys()["mlp"], optimizer=torch.optim.LBFGS)
    with pytest.raises(UsageError, match="LBFGS wants a closure"):
        workload.start("cpu")
    with pytest.raises(UsageError, match="LBFGS wants a closure"):
        _plan(tf32={}).apply(workload).start("cpu")
    own = dataclasses.replace(workload, loss=None, step=lambda _state, _batch: None)
    assert isinstance(own.start("cpu").optimizer, torch.optim.LBFGS)


@pytest.mark.parametrize(
    "plan",
    [_plan(micro_batching={"count": 2}), _plan(mixed_precision={"dtype": "float16"})],
    ids=["pieces", "scaled"],
)
@pytest.mark.parametrize("cut", [True, False])
def test_gradients_without_the_plans_weights_are_refused(plan: Plan, cut: bool) -> None:
    workload = all_toys()["language-tied"]
    plain = workload.model()
    model, _ = plan.apply(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    try:
        batch = workload.batch(**workload.sizes)
        with torch.no_grad():  # an evaluation goes forward alone
            for micro in plan.split(batch):
                language_loss(model, micro)
        for micro in plan.split(batch) if cut else [batch]:
            language_loss(model, micro).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(UsageError, match=r"gradients came by loss\.backward\(\), without the share"):
            plan.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        model.zero_grad()
        for micro in plan.split(batch):
            plan.backward(language_loss(model, micro))
        plan.step()
    finally:
        plan.undo(model)


def test_one_micro_batch_without_its_weight_is_enough() -> None:
    plan, workload = _plan(micro_batching={"count": 2}), all_toys()["language-tied"]
    model, _ = plan.apply(workload.model(), None)
    for number, micro in enumerate(plan.split(workload.batch(**workload.sizes))):
        loss = language_loss(model, micro)
        plan.backward(loss) if number else loss.backward()
    with pytest.raises(UsageError, match="gradients came by"):
        plan.step()
