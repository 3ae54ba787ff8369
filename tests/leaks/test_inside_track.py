"""A check inside a recording uses that recording, rather than one of its own."""

import torch

import vramfit
from vramfit.api.tracking import running_track
from vramfit.trace.device_events import marks


def test_the_rounds_are_marked_in_the_recording_that_runs() -> None:
    kept: list[torch.Tensor] = []
    assert running_track() is None
    with vramfit.track(device="cpu") as tracked:
        assert running_track() is tracked
        report = vramfit.check_leaks(lambda: kept.append(torch.ones(1024)), rounds=5, warmup=1)
    assert running_track() is None
    assert report.leaks
    assert report.growing[0].bytes_per_step == 4096
    assert report.growing[0].owners
    assert len(marks(tracked.trace)) == 7
