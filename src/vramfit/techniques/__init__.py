"""Techniques that lower the memory of a program, one file each, all with one protocol.

Each says where it could be applied to a workload, what it promises of the results (`Numerics`), and attaches itself to
a live model and optimizer, in place, with its undo. Applied to a `Workload` it gives a new one.
"""

from vramfit.techniques.core.applied import AppliedWorkload, live_of, with_choices
from vramfit.techniques.core.live import AttachedProgram, Piece
from vramfit.techniques.core.numerics import Numerics, Promise
from vramfit.techniques.core.profile import BlockOp, ModelBlock, Profile
from vramfit.techniques.core.registered import all_techniques, find_technique
from vramfit.techniques.core.technique import (
    AttachStage,
    Choice,
    Setting,
    Technique,
    setting_from_plain,
    setting_to_plain,
)

__all__ = [
    "AppliedWorkload",
    "AttachStage",
    "AttachedProgram",
    "BlockOp",
    "Choice",
    "ModelBlock",
    "Numerics",
    "Piece",
    "Profile",
    "Promise",
    "Setting",
    "Technique",
    "all_techniques",
    "find_technique",
    "live_of",
    "setting_from_plain",
    "setting_to_plain",
    "with_choices",
]
