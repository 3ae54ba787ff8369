"""What a program trains, or runs, in one line."""

from __future__ import annotations

from vramfit.analysis import Verdict
from vramfit.trace.applied_plan import AppliedPlan
from vramfit.trace.observed_program import CalledBy, Framework, ObservedModel, ObservedProgram
from vramfit.units import counted, format_bytes

_SHOWN = 3
"""Models that are named."""


def program_words(seen: ObservedProgram) -> str:
    """Which models are trained with what, and on which batches, or run; empty where nothing is seen of that."""
    if not seen.models:
        return _running(seen) if seen.infers else ""
    named = [_model(seen, model) for model in seen.models[:_SHOWN]]
    if len(seen.models) > _SHOWN:
        named.append(counted(len(seen.models) - _SHOWN, "more model"))
    facts = [_batch(seen), _accumulation(seen), *_others(seen)]
    return f"trains {_listed(named)}; {', '.join(filter(None, facts))}"


def _running(seen: ObservedProgram) -> str:
    """Which models are run, the largest first, and on what."""
    models = sorted(seen.used, key=lambda model: -model.parameter_bytes)
    named = [
        f"{model.kind}, {_millions(model.parameters)} parameters in {model.dtype}"
        for model in models[:_SHOWN]
    ]
    if len(models) > _SHOWN:
        named.append(counted(len(models) - _SHOWN, "more model"))
    shape = next((shape for shape in models[0].shapes if shape), ())
    facts = [
        f"batch {' x '.join(map(str, shape))}" if shape else "",
        {CalledBy.GENERATE: "by generate", CalledBy.PIPELINE: "by a pipeline"}.get(models[0].called_by, ""),
        "gradients enabled" if models[0].with_gradients else "",
    ]
    return "; ".join(filter(None, (f"runs {_listed(named)}", ", ".join(filter(None, facts)))))


def plan_words(plan: AppliedPlan, verdict: Verdict) -> str:
    """With which plan it was run, what that promised and what was seen."""
    if not plan.attached:
        return f"{plan.file} was not attached: the program trained no model before it ended.{_made_for(plan)}"
    device = verdict.device
    used, promised = device.used, plan.promised_bytes
    seen = "to the byte" if used == promised else f"{format_bytes(used)} seen"
    where = "" if device.gpu == plan.device else f" on {plan.device}"
    techniques = ", ".join(plan.techniques) or "nothing to change"
    saved = ""
    if plan.plain_bytes:
        saved = f"; the plain program needs {format_bytes(plan.plain_bytes)}"
    return f"With {plan.file} ({techniques}): {format_bytes(promised)} promised{where}, {seen}{saved}.{_made_for(plan)}"


def _made_for(plan: AppliedPlan) -> str:
    return f" It was made for another command line: {plan.made_for}" if plan.made_for else ""


def _model(seen: ObservedProgram, model: ObservedModel) -> str:
    optimizers = list(dict.fromkeys(seen.optimizers[number].kind for number in model.optimizers))
    trained = "" if model.trained == model.parameters else f" ({_millions(model.trained)} of them trained)"
    around = f" in {' in '.join(reversed(model.wrappers))}" if model.wrappers else ""
    return (
        f"{model.kind}{around}, {_millions(model.parameters)} parameters{trained}, with {_listed(optimizers)}"
    )


def _batch(seen: ObservedProgram) -> str:
    model = seen.main_model
    if model is None or not model.shapes:
        return ""
    shape = next((shape for shape in model.shapes if shape), ())
    return f"batch {' x '.join(map(str, shape))}" if shape else ""


def _accumulation(seen: ObservedProgram) -> str:
    if not seen.accumulation:
        return ""
    return "no accumulation" if seen.accumulation == 1 else f"{seen.accumulation} batches a step"


def _others(seen: ObservedProgram) -> list[str]:
    found = []
    if seen.autocast:
        found.append(f"autocast to {seen.autocast}")
    if seen.scaler:
        found.append("scaled losses")
    if seen.clipping:
        found.append("clipped gradients")
    if seen.framework is not Framework.NONE:
        found.append(f"by {seen.framework.value}")
    return found


def _millions(elements: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if elements >= size:
            scaled = elements / size
            return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:.0f} {unit}"
    return str(elements)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
