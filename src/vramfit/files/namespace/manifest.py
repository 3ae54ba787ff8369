"""What a namespace leaves in its folder, so that another process can tell what it holds: a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from vramfit.files.namespace.tree import MountedOverlay

PLACE = ".namespace"
"""In a policy's folder: where the overlays keep what is written; with a suffix: where entering was tried."""
DROPPED = "dropped.txt"
"""In that folder: files whose contents were dropped, since all of them occupied too much."""
_NAME = "namespace.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A namespace's folder.

    Attributes:
        folder: where it lies.
        overlays: those that were mounted.
        missing: paths that are written for real and did not exist: what is written there is moved there at the end.
        notes: what a report should tell.
    """

    folder: str
    overlays: tuple[MountedOverlay, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def write(self, outside: str = "") -> None:
        """Leave it in its folder; `outside` is put before the path of that, where it is seen under another."""
        named = outside + os.path.join(self.folder, _NAME)
        with open(f"{named}.new", "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file)
        os.replace(f"{named}.new", named)

    def dropped(self, outside: str = "") -> tuple[str, ...]:
        """Files whose contents were dropped, by the paths that the program knows."""
        try:
            named = outside + os.path.join(self.folder, DROPPED)
            with open(named, encoding="utf-8", errors="surrogateescape") as file:
                kept = [line.rstrip("\n") for line in file]
        except FileNotFoundError:
            return ()
        return tuple(
            os.path.join(overlay.point, os.path.relpath(path, overlay.upper))
            for path in dict.fromkeys(kept)
            for overlay in self.overlays
            if path.startswith(overlay.upper + os.sep)
        )


def read_manifest(place: str) -> Manifest | None:
    """What `Manifest.write` left below a policy's folder, None where no namespace was entered."""
    try:
        with open(os.path.join(place, PLACE, _NAME), encoding="utf-8") as file:
            values = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Manifest(
        folder=values["folder"],
        overlays=tuple(MountedOverlay(**overlay) for overlay in values["overlays"]),
        missing=tuple(values["missing"]),
        notes=tuple(values["notes"]),
    )
