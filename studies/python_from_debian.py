"""Unpacks a Python of Debian's unstable suite beside the system's, for tests on a version that no package here offers.

    python studies/python_from_debian.py 3.14 ~/python3.14
    uv venv --python ~/python3.14/usr/bin/python3.14 .venv-3.14

Nothing is installed and no root is needed: the packages and the libraries that they depend on, libc among them, are
unpacked into the folder, and what stands there as ``python3.14`` is a script that starts the real one with that libc.
Needs ``dpkg-deb``, which Debian and Ubuntu have, an x86-64 or arm64 machine, and the network. Files are checked
against the sums of the suite's index, which comes by HTTPS; its signature is not checked.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import platform
import re
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

MIRROR = "https://deb.debian.org/debian"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PARTS = ("python{}", "python{}-venv", "libpython{}-dev")
"""What is unpacked of a version, headers among it; the others come as dependencies."""
LEFT_OUT = re.compile(
    r"debconf.*|media-types|netbase|tzdata|mime-support|.*-dev$|libc-bin|linux-.*|rpcsvc-proto"
)
"""What a Python that stands aside does not need, or takes from the system."""
STARTER = """#!/bin/sh
# Starts the Python beside this, by the loader and with the libraries that were unpacked with it.
here=$(dirname "$(readlink -f "$0")")
exec "$here/../lib/{triplet}/{loader}" --argv0 "$0" --library-path "$here/../lib/{triplet}" "$here/{real}" "$@"
"""

Package = Mapping[str, str]


def download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return bytes(answer.read())


def read_index(text: str) -> dict[str, Package]:
    """Each package of a suite by its name."""
    found = {}
    for block in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", block, re.MULTILINE))
        if "Package" in fields:
            found[fields["Package"]] = fields
    return found


def needed(names: list[str], packages: Mapping[str, Package]) -> Iterator[Package]:
    """The packages and all that they depend on, each once; of alternatives the first that the suite has."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen or (name not in names and LEFT_OUT.fullmatch(name)):
            continue
        seen.add(name)
        yield packages[name]
        wanted = ", ".join(packages[name].get(field, "") for field in ("Pre-Depends", "Depends"))
        for alternatives in filter(None, re.split(r",\s*", wanted)):
            choices = [re.split(r"[\s:(]", one.strip())[0] for one in alternatives.split("|")]
            waiting += [one for one in choices if one in packages][:1]


def unpack(package: Package, target: Path) -> None:
    data = download(f"{MIRROR}/{package['Filename']}")
    if hashlib.sha256(data).hexdigest() != package["SHA256"]:
        sys.exit(f"{package['Filename']} is not what the index says: try again")
    with tempfile.NamedTemporaryFile(suffix=".deb") as file:
        file.write(data)
        file.flush()
        subprocess.run(["dpkg-deb", "-x", file.name, str(target)], check=True)


def put_starter(version: str, target: Path) -> Path:
    """Let ``python3.14`` be a script that starts the real one with its own libc."""
    binaries = target / "usr" / "bin"
    starter, real = binaries / f"python{version}", binaries / f"python{version}.real"
    starter.rename(real)
    (loader,) = (target / "usr" / "lib").glob("*-linux-gnu/ld-linux-*.so.*")
    starter.write_text(STARTER.format(triplet=loader.parent.name, loader=loader.name, real=real.name))
    starter.chmod(starter.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return starter


def move_wheels(version: str, target: Path) -> None:
    """Let ``python -m venv`` find the pip that was unpacked, not the system's (or none)."""
    for file in (target / "usr" / "lib" / f"python{version}").glob("_sysconfig*_*linux*"):
        if not file.is_symlink():
            text, folder = file.read_text(), str(target.resolve())
            file.write_text(re.sub(r"""(?<=['"])(?=/usr/share/python-wheels)""", folder, text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="such as 3.14")
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--suite", default="unstable", help="the suite of Debian that has it")
    given = parser.parse_args()
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None or sys.platform != "linux":
        sys.exit(f"Debian has no packages that run on {platform.system()} {platform.machine()}")
    if given.target.exists():
        sys.exit(f"{given.target} exists already")
    index = download(f"{MIRROR}/dists/{given.suite}/main/binary-{architecture}/Packages.xz")
    packages = read_index(lzma.decompress(index).decode())
    names = [part.format(given.version) for part in PARTS]
    if names[0] not in packages:
        sys.exit(f"Debian {given.suite} has no Python {given.version}")
    given.target.mkdir(parents=True)
    for package in needed([name for name in names if name in packages], packages):
        print(f"{package['Package']} {package['Version']}, {int(package['Size']) / 1e6:.1f} MB", flush=True)
        unpack(package, given.target)
    starter = put_starter(given.version, given.target)
    move_wheels(given.version, given.target)
    told = subprocess.run(
        [str(starter), "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    print(f"{told}: {starter}")


if __name__ == "__main__":
    main()
