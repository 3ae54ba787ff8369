"""The stack of patches, where the floors above know it."""

from __future__ import annotations

from vramfit.patching import PatchStack

__all__ = ["PatchStack"]
