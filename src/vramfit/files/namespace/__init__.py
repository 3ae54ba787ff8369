"""The namespace backend: a mount namespace with overlayfs over each folder that could be written to. No torch."""

from __future__ import annotations

from vramfit.files.namespace.attending import attended, settle
from vramfit.files.namespace.namespace_backend import Namespace, recovered, why_not

__all__ = ["Namespace", "attended", "recovered", "settle", "why_not"]
