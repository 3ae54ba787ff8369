"""What a snapshot without history is, and how a history is recorded: words that errors and reports share."""

from __future__ import annotations

STATE = "the state when it was dumped, without history"
"""What a snapshot is whose events were not recorded."""

RECORD_HISTORY = (
    "Record the history: call torch.cuda.memory._record_memory_history() before the program allocates anything, and "
    "_dump_snapshot(FILE) after the peak; or trace the program with vramfit run --trace run.vft SCRIPT"
)
"""How to get what a state lacks."""

NO_HISTORY = "no-history"
"""Code of the warning that a run made from such a snapshot carries."""
