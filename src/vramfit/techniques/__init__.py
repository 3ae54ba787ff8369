"""Techniques that lower the memory of a program, one file each, all with one protocol.

Each says where it could be applied to a workload, what it promises of the results (`Numerics`), and attaches itself to
a live model and optimizer, in place, with its undo. Applied to a `Workload` it gives a new one.
"""

from vramfit.techniques.applied import AppliedWorkload, live_of, with_choices
from vramfit.techniques.live import Live, Piece
from vramfit.techniques.numerics import Numerics, Promise
from vramfit.techniques.profile import Block, BlockOp, Profile
from vramfit.techniques.registry import all_techniques, find_technique
from vramfit.techniques.technique import (
    Choice,
    Phase,
    Setting,
    Technique,
    setting_from_plain,
    setting_to_plain,
)

__all__ = [
    "AppliedWorkload",
    "Block",
    "BlockOp",
    "Choice",
    "Live",
    "Numerics",
    "Phase",
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
