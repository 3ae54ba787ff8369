"""The child of the planner: loads a workload, does one task with it, and writes down what came out.

Started as ``python -m vramfit.planner.planner_child FOLDER``, where the folder holds ``job.json``. A process of its
own, since a virtual GPU needs an interpreter in which nothing has gone backward yet, and the workload's file is the
user's code.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vramfit.cudnn.asker import ask_early
from vramfit.errors import UnknownGpuError, UsageError
from vramfit.files import Writes, make_policy, protect
from vramfit.files.protection import stand
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.inference.streaming.weight_placement import WeightPlacement
from vramfit.launch.interrupts import note_interrupts
from vramfit.launch.job import job_file, tell
from vramfit.launch.running import leave_after
from vramfit.plain import from_plain
from vramfit.planner.batch_prediction import PredictedBatch, largest_on
from vramfit.planner.batch_shapes import MeasuredShapes, shapes_on
from vramfit.planner.cheapest_card import cheapest_plan
from vramfit.planner.chunk_choice import ChosenChunk, quickest_chunk
from vramfit.planner.devices.card_backend import CardBackend, card_of_this_process
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.devices.cpu_backend import CpuBackend
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.largest_size import CardCheck, LargestSize, SizeSearch
from vramfit.planner.output_check import compare_outputs
from vramfit.planner.placement_trial import found_placement
from vramfit.planner.plan_file import plan_to_toml
from vramfit.planner.planner_job import (
    PRICE,
    Answer,
    ChooseChunkJob,
    ChooseTileJob,
    ConfirmJob,
    DeviceMemory,
    FitJob,
    FormatTableJob,
    MeasureJob,
    MeasureShapesJob,
    PlaceWeightsJob,
    PlanJob,
    PlannerJob,
    PredictBatchJob,
    RequestPeakJob,
    ResidentJob,
    TryFormatsJob,
    VerifyMemoryJob,
    VerifyValuesJob,
)
from vramfit.planner.plans import Plan, plan_request, sizes_of
from vramfit.planner.quantization.format_trial import TriedFormats, format_table, try_formats
from vramfit.planner.request_peak import RequestPeak, measured_request
from vramfit.planner.resident_child import DONE, LOOK, OVER, READY
from vramfit.planner.search import PlanFound
from vramfit.planner.search_cache import SearchCache
from vramfit.planner.search_clock import SearchClock, interruptible
from vramfit.planner.search_evidence import SEARCH_FILE, Evidence
from vramfit.planner.tile_trial import ChosenTile, quickest_tile
from vramfit.planner.verification import (
    CardRuns,
    Simulated,
    ValuesCheck,
    compare,
    run_on,
    simulate,
    smaller_sizes,
    too_large,
)
from vramfit.planner.workload_check import check_workload, failure_of_task
from vramfit.techniques import with_choices
from vramfit.techniques.quantization.byte_program import FormatTable
from vramfit.techniques.quantization.weight_formats import WeightFormat
from vramfit.torch_internals.pytree import LOGGER as pytree_logger
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload, load_workload

Progress = Callable[[str], None]

_INTERRUPTED = 130
_REAL = ("cpu", "card")
"""Devices on which a workload really runs."""

_TALKATIVE = ("torchao", pytree_logger)
"""Loggers of libraries that warn when torchao is imported, of compiled extensions and of its own enumerations."""


def plan(
    workload: Workload,
    device: DeviceBackend,
    job: PlanJob,
    progress: Progress,
    evidence: Evidence | None = None,
) -> PlanFound:
    """The best plan for a budget, and the frontier if it was asked for.

    Args:
        evidence: by which earlier searches are trusted; None leaves them aside, as devices that measure do.
    """
    request = plan_request(workload, job)
    check_workload(workload, request.sizes, progress)
    spent = max(0.0, time.time() - job.asked_at) if job.asked_at else 0.0
    clock = SearchClock(limit=request.search_seconds, spent=spent)
    cache = None if evidence is None else SearchCache(evidence.beside / SEARCH_FILE, evidence)
    with interruptible(clock):
        if request.objective == PRICE:
            search, found = cheapest_plan(partial(virtual_card, job.memory), request, progress, clock)
        else:
            search, found = promised_plan(device, request, progress, clock, cache)
    frontier = tuple(search.frontier()) if job.options.frontier else ()
    return PlanFound(plan=plan_to_toml(found), frontier=frontier)


def fit(workload: Workload, device: DeviceBackend, job: FitJob, progress: Progress) -> LargestSize:
    """The largest value of a size that fits."""
    sizes = sizes_of(workload, job.sizes)
    name = job.size or next(iter(workload.sizes))
    if name not in sizes:
        raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(sizes)}")
    check_workload(workload, sizes, progress)
    host_limit = None
    if job.plan is not None:
        plan = Plan.load(job.plan)
        workload = with_choices(workload, plan.choices)
        host_limit = job.memory.host_budget or plan.aim.host_budget_bytes or None
    return SizeSearch(device, workload, sizes, name, job.memory.limit, progress, host_limit).largest()


def confirm(workload: Workload, device: DeviceBackend, job: ConfirmJob, progress: Progress) -> CardCheck:
    """The largest value that fits this card, of those up to the one that was predicted."""
    card = card_of(device)
    if why := another_card(card, job):
        return CardCheck(card=card.name, skipped=why)
    sizes = {**sizes_of(workload, job.sizes), job.size: job.value}
    if job.plan is not None:
        workload = with_choices(workload, Plan.load(job.plan).choices)
    search = SizeSearch(card, workload, sizes, job.size, job.memory.limit, progress)
    value, failing, tries = search.largest_up_to()
    return CardCheck(card=card.name, value=value, failing=failing, tries=tries, left_bytes=card.left_bytes)


def measure(workload: Workload, device: DeviceBackend, job: MeasureJob, progress: Progress) -> CardRuns:
    """What a workload takes on this card, plain or with plans: a run for each that was asked for."""
    card = card_of(device)
    if why := another_card(card, job):
        return CardRuns(card=card.name, skipped=why)
    runs = []
    for asked in job.runs:
        progress(f"{asked.name}, on {card.name}")
        program = workload if asked.plan is None else Plan.load(asked.plan).apply(workload)
        runs.append(run_on(card, program, sizes_of(workload, asked.sizes), asked.limit))
    return CardRuns(card=card.name, runs=tuple(runs), left_bytes=card.left_bytes)


def card_of(device: DeviceBackend) -> CardBackend:
    """The card, which these tasks are for."""
    if not isinstance(device, CardBackend):
        raise TypeError(f"{device.name} is not a card")
    return device


def another_card(card: CardBackend, job: ConfirmJob | MeasureJob) -> str:
    """Why this machine's card says nothing of the one that is asked about; empty where it does."""
    if job.any_card or job.memory.gpu is None:
        return ""
    wanted = job.memory.gpu.name
    try:
        here = find_gpu(card.name).name
    except UnknownGpuError:
        here = card.name
    return "" if here == wanted else f"this machine's card is a {card.name}, not a {wanted}"


def verify_memory(
    workload: Workload, device: DeviceBackend, job: VerifyMemoryJob, progress: Progress
) -> Simulated:
    """Whether a plan's memory is what it says."""
    found = Plan.load(job.plan)
    check_workload(workload, sizes_of(workload, dict(found.aim.sizes)), progress)
    progress("the program before and after, on the device")
    return simulate(device, workload, found)


def verify_values(
    workload: Workload,
    device: DeviceBackend,  # noqa: ARG001  # the CPU that this process is on
    job: VerifyValuesJob,
    progress: Progress,
) -> ValuesCheck:
    """Whether gradients and losses are what a plan promises."""
    found = Plan.load(job.plan)
    if why := too_large(workload, job.memory.host_bytes):
        return ValuesCheck(skipped=why, sizes=dict(found.aim.sizes))
    sizes = sizes_of(workload, job.sizes)
    check_workload(workload, sizes, progress)
    if not job.sizes:
        steps = job.steps if workload.trains else 1
        sizes = smaller_sizes(workload, found, job.step_seconds, job.seconds, steps)
    if not workload.trains:
        progress("outputs")
        return ValuesCheck(
            sizes=sizes, outputs=compare_outputs(workload, found.apply(workload), sizes, found.numerics)
        )
    gradients, losses, notes = compare(
        workload, found, sizes, steps=job.steps, seconds=job.seconds, progress=progress
    )
    if losses.plain and not math.isfinite(losses.plain[0]):
        raise UsageError(
            f"the plain program's loss is {losses.plain[0]}: nothing can be compared with it",
            "Let batch make values that the model can train on",
        )
    if not gradients.parameters:
        notes = (*notes, "no gradients were compared: no parameter had one")
    if not losses.plain:
        notes = (*notes, "no losses were compared: the workload's steps give none")
    return ValuesCheck(
        sizes=sizes,
        gradients=gradients if gradients.parameters else None,
        losses=losses if losses.plain else None,
        notes=tuple(notes),
    )


def choose_tile(
    workload: Workload, device: DeviceBackend, job: ChooseTileJob, progress: Progress
) -> ChosenTile:
    """The quickest tile for a packed model and what was asked about it."""
    question = workload.batch(batch_size=1)
    return quickest_tile(device, workload.model, question, job.memory.budget, progress)


def choose_chunk(
    workload: Workload, device: DeviceBackend, job: ChooseChunkJob, progress: Progress
) -> ChosenChunk:
    """The quickest size of chunks for a packed model and a call."""
    question = workload.batch(batch_size=1)
    return quickest_chunk(device, workload.model, question, job.memory.budget, progress)


def measure_shapes(
    workload: Workload, device: DeviceBackend, job: MeasureShapesJob, progress: Progress
) -> MeasuredShapes:
    """What shapes of batches take, for a packed model and items."""
    question = workload.batch(batch_size=1)
    return shapes_on(device, workload.model, question, job.memory.budget, progress)


def predict_batch(
    workload: Workload, device: DeviceBackend, job: PredictBatchJob, progress: Progress
) -> PredictedBatch:
    """The largest batch for a packed step and what it uses."""
    return largest_on(device, lambda: workload.batch(batch_size=1), job.memory.budget, progress)


def request_peak(
    workload: Workload, device: DeviceBackend, job: RequestPeakJob, progress: Progress
) -> RequestPeak:
    """What a packed call takes."""
    del job, progress
    return measured_request(device, workload.model, workload.batch(batch_size=1))


def place_weights(
    workload: Workload, device: DeviceBackend, job: PlaceWeightsJob, progress: Progress
) -> WeightPlacement:
    """The layers of a packed model that stay on the card."""
    question = workload.batch(batch_size=1)
    return found_placement(device, workload.model, question, job.memory, progress)


def find_format_table(
    workload: Workload, device: DeviceBackend, job: FormatTableJob, progress: Progress
) -> FormatTable:
    """What a packed model takes with its layers in each format."""
    question = workload.batch(batch_size=1)
    formats = [WeightFormat(one) for one in job.formats]
    return format_table(device, workload.model, question, formats, progress)


def try_choices(
    workload: Workload, device: DeviceBackend, job: TryFormatsJob, progress: Progress
) -> TriedFormats:
    """What torch reserves with choices of formats for a packed model."""
    question = workload.batch(batch_size=1)
    choices = [{name: WeightFormat(one) for name, one in choice.items()} for choice in job.choices]
    return try_formats(device, workload.model, question, choices, job.memory.budget, job.enough, progress)


def _stay(folder: Path, workload: Workload, device: DeviceBackend, progress: Progress) -> None:
    """Do jobs until the parent says that no more will come."""
    for number in itertools.count():
        asked = folder / str(number)
        while not (asked / READY).exists():
            if (folder / OVER).exists():
                return
            if not folder.exists() or os.getppid() == 1:
                return
            time.sleep(LOOK)
        values = json.loads(job_file(asked).read_text(encoding="utf-8"))
        kind, task = TASKS[values["task"]]
        job = from_plain(values, kind)
        try:
            job.answer(Answer(found=task(workload, device, job, progress), card_here=False))
        except Exception as error:
            failure_of_task(error, job.target).write(asked)
        (asked / DONE).touch()


TASKS: dict[str, tuple[type[PlannerJob], Callable[..., Any]]] = {
    "plan": (PlanJob, plan),
    "fit": (FitJob, fit),
    "confirm": (ConfirmJob, confirm),
    "measure": (MeasureJob, measure),
    "verify-memory": (VerifyMemoryJob, verify_memory),
    "verify-values": (VerifyValuesJob, verify_values),
    "choose-tile": (ChooseTileJob, choose_tile),
    "choose-chunk": (ChooseChunkJob, choose_chunk),
    "measure-shapes": (MeasureShapesJob, measure_shapes),
    "predict-batch": (PredictBatchJob, predict_batch),
    "request-peak": (RequestPeakJob, request_peak),
    "place-weights": (PlaceWeightsJob, place_weights),
    "format-table": (FormatTableJob, find_format_table),
    "try-formats": (TryFormatsJob, try_choices),
    "resident": (ResidentJob, _stay),
}
"""The kinds of job, and what does each."""


def main(name: str) -> int:
    """Do the job of a folder; 0 where results or what went wrong were written."""
    folder, parent = Path(name), os.getppid()
    note_interrupts(folder)
    values = json.loads(job_file(folder).read_text(encoding="utf-8"))
    kind, task = TASKS[values["task"]]
    job = from_plain(values, kind)

    def progress(text: str) -> None:
        if os.getppid() != parent:
            raise SystemExit("the process that asked for a plan has gone")
        tell(folder, text)

    for talkative in _TALKATIVE:
        logging.getLogger(talkative).setLevel(logging.ERROR)
    try:
        if job.memory.device not in _REAL:
            if job.memory.gpu is not None:
                ask_early(None, job.memory.gpu)
            _protect_files(folder)
        # Asked before the virtual card is there. Wakes no card up.
        card_here = job.memory.device == "cuda" and torch.cuda.is_available()
        if isinstance(job, PlanJob) and job.memory.device == "cuda":
            evidence = Evidence(job, folder)
            evidence.watch()
            task = partial(task, evidence=evidence)
        device, load = _device(job.memory)
        if isinstance(job, ResidentJob):
            _stay(folder, load(job.target), device, progress)
            return 0
        found = task(load(job.target), device, job, progress)
        job.answer(Answer(found=found, card_here=card_here))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        failure_of_task(error, job.target).write(folder)
    return 0


def _protect_files(folder: Path) -> None:
    """Keep what the workload's code writes on a virtual card from the user's files; see docs/files.md."""
    policy = make_policy(Writes.DISCARD, workplace=folder)
    stand(protect(policy, in_child=True))


def _device(memory: DeviceMemory) -> tuple[DeviceBackend, Callable[[str], Workload]]:
    """Where steps are run, and what reads the workload's file there."""
    if memory.device == "cpu":
        return CpuBackend(), load_workload
    if memory.device == "card":
        return card_of_this_process(memory.host_bytes), load_workload
    spec = memory.gpu
    assert spec is not None

    def load(target: str) -> Workload:
        with VirtualGPU(spec):  # a file may ask for the card while it is read
            return load_workload(target)

    return virtual_card(memory, spec, own_process=True), load


def virtual_card(memory: DeviceMemory, card: GpuSpec, *, own_process: bool = False) -> VirtualBackend:
    """A card with the host's memory and the allocator's settings that were asked for."""
    return VirtualBackend(
        card, alloc_conf=memory.alloc_conf, host_bytes=memory.host_bytes, own_process=own_process
    )


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1]))
