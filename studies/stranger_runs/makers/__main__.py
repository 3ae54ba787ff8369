"""``python -m stranger_runs.makers NAME PATH [ARGUMENTS]``: run one maker in the environment of a group."""

import sys
from pathlib import Path

from stranger_runs.makers import MAKERS

name, path, *rest = sys.argv[1:]
MAKERS[name](Path(path), *rest)
