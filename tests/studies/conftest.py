"""The studies are scripts: their folder leads ``sys.path`` as it does when one of them runs."""

import sys
from pathlib import Path

STUDIES = Path(__file__).parents[2] / "studies"

if str(STUDIES) not in sys.path:
    sys.path.insert(0, str(STUDIES))
