"""Child interpreters that begin with torch imported: forks of a process that imported it once and never computes.

- `child_request`: what a fork is asked to become.
- `nursery_client`: the side of the process that wants children.
- `nursery_process`: the process that forks.
- `becoming`: what a fork does before it is the program.
"""

from __future__ import annotations

from vramfit.launch.nursery.nursery_client import Nursery, WarmPopen, nursery_for, start

__all__ = ["Nursery", "WarmPopen", "nursery_for", "start"]
