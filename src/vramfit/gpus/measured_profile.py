"""Profiles: what was measured on a card (kernels' temporaries, context, libraries, rates), and their files.

``vramfit calibrate`` writes profiles, the virtual GPU reads them. docs/calibrate.md describes the file.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from vramfit.arguments import path_argument
from vramfit.errors import UsageError, WriteError
from vramfit.gpus.card_file import catalogue
from vramfit.gpus.spec import GpuSpec, PositiveNumber
from vramfit.plain import read
from vramfit.units import GIB, format_bytes
from vramfit.writing import StrPath, write_text

SCHEMA = "vramfit.profile/1"
FOLDER_VARIABLE = "VRAMFIT_PROFILE_DIR"
NO_PROFILE = "none"
OWN_PROFILE = "auto"
_MEMORY_TOLERANCE = 0.1

_Text = Annotated[str, Meta(description="text")]
_Size = Annotated[int, Meta(ge=0, description="a whole number from 0")]
_Step = Annotated[int, Meta(title="a block's size", description="a whole number")]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredOp:
    """What one call of an op allocated, as `vramfit.virtual.kernels.Extras` lists it; sizes in bytes.

    Attributes:
        before: temporaries taken before the first result.
        between: those of each result in turn, for ops that make one result after the other.
        after: temporaries taken after the last result.
        reserve: size of a result whose bytes a library decides (a cuDNN reserve), None without one.
    """

    before: tuple[_Step, ...] = ()
    between: tuple[tuple[_Step, ...], ...] = ()
    after: tuple[_Step, ...] = ()
    reserve: _Size | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCall:
    """An op with arguments of certain shapes.

    Attributes:
        usual: what each call allocates.
        first: what the first call of a process allocates, where that differs (cuDNN's benchmark mode).
    """

    usual: MeasuredOp
    first: MeasuredOp | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Speeds of a card, as measured; None or absent where they were not.

    Attributes:
        flops: FLOP/s of a large matrix product, by dtype (``"float32"``, ``"tf32"``, ``"bfloat16"``, ...).
        bandwidth: bytes per second that a large elementwise kernel reads and writes.
        launch_seconds: seconds of a kernel on next to no data, one after the other.
        to_card: host to card, bytes per second, by kind of host memory (``"pinned"``, ``"pageable"``).
        to_host: card to host, in the same units and by the same kinds of memory.
    """

    flops: Mapping[str, PositiveNumber] = field(default_factory=dict)
    bandwidth: PositiveNumber | None = None
    launch_seconds: PositiveNumber | None = None
    to_card: Mapping[str, PositiveNumber] = field(default_factory=dict)
    to_host: Mapping[str, PositiveNumber] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredProfile:
    """All that was measured on one card with one torch. Sizes are bytes.

    Attributes:
        gpu_name: the card as ``torch.cuda.get_device_name()`` says.
        torch_version: version of torch, in full.
        cuda_version, cudnn_version, driver: of what lay below it; empty or 0 where unknown.
        date: day of the measurement, ISO form.
        source: ``"card"``, or ``"virtual"`` when the virtual GPU took the card's place.
        context_bytes: memory that the CUDA context takes outside torch's allocator, None if not measured.
        library_bytes: by how much that grows at the first use of a library, in the order of measurement.
        workspace_bytes: what a library keeps in torch's allocator (``"cublas"``, ``"cublaslt"``,
            ``"cudnn_dropout"``).
        ops: measured calls, by full name of the op (``aten.mm.default``) and by signature of the arguments.
        file: where it was read from, None if it was not.
    """

    gpu_name: _Text
    total_bytes: _Size
    torch_version: _Text
    cuda_version: _Text = ""
    cudnn_version: _Size = 0
    driver: _Text = ""
    date: _Text
    source: _Text = "card"
    context_bytes: _Size | None = None
    library_bytes: Mapping[str, _Size] = field(default_factory=dict)
    workspace_bytes: Mapping[str, _Size] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    ops: Mapping[str, Mapping[str, MeasuredCall]] = field(default_factory=dict)
    file: str | None = None

    @property
    def calls(self) -> int:
        """How many measured calls it holds."""
        return sum(len(found) for found in self.ops.values())


# -- the file ------------------------------------------------------------------------------------------------


def save_profile(profile: MeasuredProfile, path: StrPath) -> None:
    """Write a profile, whole or not at all; its folder is made if it is missing.

    Raises:
        WriteError: it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise WriteError(f"cannot make the folder {path.parent}: {reason}", "Choose another -o") from None
    write_text(path, profile_to_text(profile))


def profile_to_text(profile: MeasuredProfile) -> str:
    """A profile as JSON text: one line for each measured call."""
    facts = asdict(profile)
    del facts["file"], facts["ops"]
    head = json.dumps({"schema": SCHEMA, **facts}, indent=1)
    ops = ",\n".join(
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(
            f"   {json.dumps(key)}: {json.dumps(_call_to_plain(call))}" for key, call in calls.items()
        )
        + "\n  }"
        for name, calls in sorted(profile.ops.items())
    )
    return f'{head[:-2]},\n "ops": {{\n{ops}\n }}\n}}\n'


def load_profile(path: StrPath) -> MeasuredProfile:
    """Read a profile.

    Raises:
        UsageError: the file cannot be read, or is not a profile of a version that is read here.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the profile {path}: {(error.strerror or str(error)).lower()}",
            "Give the file that vramfit calibrate wrote, or --profile none",
        ) from None
    except (ValueError, RecursionError):
        raise _no_profile(path, "it is not JSON") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else None
        raise _no_profile(path, f"its schema is {found!r}, not {SCHEMA!r}")
    try:
        return replace(_profile(document), file=str(path))
    except ValueError as error:
        raise _no_profile(path, str(error)) from None


def _no_profile(path: StrPath, reason: str) -> UsageError:
    return UsageError(
        f"{path} is not a profile that this version reads: {reason}", "Write it anew with vramfit calibrate"
    )


def _profile(document: dict[str, Any]) -> MeasuredProfile:
    calls = read(document.get("ops"), _PlainCalls, "ops")
    ops = {name: {key: _call(call) for key, call in found.items()} for name, found in calls.items()}
    profile: MeasuredProfile = read(document | {"ops": {}}, MeasuredProfile)
    return replace(profile, ops=ops)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlainCall(MeasuredOp):
    """A `MeasuredCall` as it stands in the file: the usual allocations without a name of their own."""

    first: MeasuredOp | None = None


_PlainCalls = Annotated[
    Mapping[str, Mapping[str, _PlainCall]], Meta(description="a table whose items are the calls of ops")
]


def _call(plain: _PlainCall) -> MeasuredCall:
    usual = MeasuredOp(before=plain.before, between=plain.between, after=plain.after, reserve=plain.reserve)
    for op in (usual, plain.first or usual):
        for steps in (op.before, *op.between, op.after):
            _check_steps(steps)
    return MeasuredCall(usual=usual, first=plain.first)


def _check_steps(steps: tuple[int, ...]) -> None:
    """Negative numbers give back blocks by their position among those taken, each once."""
    taken, returned = 0, set()
    for step in steps:
        if step >= 0:
            taken += 1
        elif -step > taken or step in returned:
            raise ValueError(f"{step} gives back a block that is not held")
        else:
            returned.add(step)


def rates_from_plain(values: Any) -> Rates:
    """Speeds as they stand in a profile.

    Raises:
        ValueError: one is not a positive number.
    """
    rates: Rates = read(values, Rates, "rates")
    return rates


def _call_to_plain(call: MeasuredCall) -> dict[str, Any]:
    plain = _op_to_plain(call.usual)
    return plain if call.first is None else plain | {"first": _op_to_plain(call.first)}


def _op_to_plain(op: MeasuredOp) -> dict[str, Any]:
    return {name: value for name, value in asdict(op).items() if value not in ((), None)}


# -- the folder of profiles ----------------------------------------------------------------------------------


def profile_folder() -> Path:
    """Where profiles are kept: ``VRAMFIT_PROFILE_DIR``, else the platform's folder for a user's data."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    if platform.system() == "Windows":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "vramfit/profiles"
    if platform.system() == "Darwin":
        return Path.home() / "Library/Application Support/vramfit/profiles"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "vramfit/profiles"


def profile_file(gpu_name: str, total_bytes: int, torch_version: str) -> Path:
    """Where the profile of a card and a torch version is kept by default.

    Args:
        gpu_name: what the driver calls the card; some names stand for cards of several sizes.
    """
    size = round(total_bytes / GIB)
    return profile_folder() / f"{_slug(gpu_name)}-{size}gib-torch-{_release(torch_version)}.json"


def _slug(gpu_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def chosen_profile(
    profile: MeasuredProfile | str | os.PathLike[str], card: GpuSpec, torch_version: str
) -> MeasuredProfile | None:
    """The profile that a user chose.

    Args:
        profile: a profile, ``"none"``, ``"auto"`` for that of the card and torch version, or a file.
        card: the card that is to be predicted.

    Raises:
        UsageError: a file cannot be read, or is of another card.
    """
    if not isinstance(profile, MeasuredProfile):
        text = path_argument("profile", profile)
        if text == NO_PROFILE:
            return None
        if text == OWN_PROFILE:
            return find_profile(card, torch_version)
        profile = load_profile(Path(text))
    check_card(profile, card)
    return profile


def find_profile(card: GpuSpec, torch_version: str) -> MeasuredProfile | None:
    """The profile of a card and a torch version among those in the user's folder, None without one.

    The build of torch (``+cu130``) does not matter; another patch release of the same minor version will do.
    The content of a file decides, not only its name: profiles of other cards, of the same name with other memory, or
    of another torch are ignored.

    Args:
        card: the card that is to be predicted.

    Raises:
        UsageError: the file that should be it cannot be read.
    """
    for path in _named_for(card, torch_version):
        found = load_profile(path)
        same_torch = _series(found.torch_version) == _series(torch_version)
        if same_torch and _same_name(found, card) and _same_memory(found.total_bytes, card):
            return found
    return None


def _named_for(card: GpuSpec, torch_version: str) -> list[Path]:
    """Files named for a card and a torch of the same series: this release first, then the newest.

    Their sizes are those of the measured cards, and data sheets round: any size will do here.
    """
    own = _release(torch_version)
    named = re.compile(rf"{re.escape(_slug(card.vendor_name))}-\d+gib-torch-(.+)\.json")
    found = [
        (match[1], path) for path in profile_folder().glob("*.json") if (match := named.fullmatch(path.name))
    ]
    same = [(release == own, release, path) for release, path in found if _series(release) == _series(own)]
    return [path for *_, path in sorted(same, reverse=True)]


def check_card(profile: MeasuredProfile, card: GpuSpec) -> None:
    """Check that a profile is of a card, or of the same chip with another size of memory.

    Raises:
        UsageError: it was measured on another one.
    """
    if _same_name(profile, card):
        if _same_memory(profile.total_bytes, card):
            return
        # Some names are used for several chips (an RTX 3080 of 10 GB has fewer multiprocessors than one of 12 GB):
        # libraries choose other kernels there.
        measured = next(
            (
                one
                for one in catalogue()
                if _same_name(profile, one) and _same_memory(profile.total_bytes, one)
            ),
            None,
        )
        if measured is None or measured.sm_count == card.sm_count:
            return
    named = f"the profile {profile.file}" if profile.file else "the profile"
    of = f"{profile.gpu_name} ({format_bytes(profile.total_bytes)})"
    raise UsageError(
        f"{named} was measured on another card, {of}, not on {card.name}",
        f"Take --profile none, a profile of {card.name} (vramfit calibrate makes it there), or --gpu for the card "
        "that was measured",
    )


def profile_doubt(profile: MeasuredProfile, card: GpuSpec, torch_version: str) -> str | None:
    """Why a profile of the card may not hold for this run, as a sentence; None without a reason."""
    reasons = []
    if _series(profile.torch_version) != _series(torch_version):
        reasons.append(
            f"with torch {_release(profile.torch_version)} (this is {_release(torch_version)}), whose libraries may "
            "take other workspaces"
        )
    if not _same_memory(profile.total_bytes, card):
        reasons.append(
            f"on a card with {format_bytes(profile.total_bytes)} (this one has {format_bytes(card.total_bytes)})"
        )
    return f"the profile was measured {' and '.join(reasons)}" if reasons else None


def _same_name(profile: MeasuredProfile, card: GpuSpec) -> bool:
    return profile.gpu_name.strip().casefold() == card.vendor_name.strip().casefold()


def _same_memory(total_bytes: int, card: GpuSpec) -> bool:
    """Whether a size is that of the card: drivers, ECC and estimates differ by some percent, variants by more."""
    return abs(total_bytes - card.total_bytes) <= _MEMORY_TOLERANCE * card.total_bytes


def _series(torch_version: str) -> list[str]:
    """``["2", "11"]`` of ``2.11.0+cu130``."""
    return _release(torch_version).split(".")[:2]


def _release(torch_version: str) -> str:
    """``2.11.0`` of ``2.11.0+cu130``."""
    return torch_version.partition("+")[0]
