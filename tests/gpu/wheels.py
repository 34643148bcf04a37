"""Which wheels a machine needs for these tests, whose image has Python, torch and Triton."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).resolve().parents[2]
#: What a torch for CUDA brings itself.
_OF_THE_IMAGE = {"torch", "triton"}


def wheels() -> list[str]:
    """Return NAME==VERSION of each wheel, as installed here, and cuda-bindings of both majors."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], "nvidia-ml-py", "pytest", "cuda-pathfinder"]
    found: dict[str, str] = {}
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name in found or name in _OF_THE_IMAGE or not needed:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # what cuda-bindings needs, which has its own folder
            found[name] = name
            continue
        found[name] = f"{name}=={distribution.version}"
        wanted += distribution.requires or []
    bindings = re.findall(r"cuda-bindings==\S+", (_ROOT / "Makefile").read_text())
    return sorted([*found.values(), *bindings])


def text() -> str:
    """Return the list with the commands that fetch and install the wheels."""
    *others, cuda12, cuda13 = sorted(wheels(), key=lambda each: each.startswith("cuda-bindings"))
    names = " \\\n  ".join(others)
    return f"""\
# Where there is a registry, for Python 3.12 (the GPUs' machine has torch and Triton):
pip download --no-deps --only-binary :all: --python-version 3.12 -d wheels \\
  {names} \\
  {cuda13}   # {cuda12} for a torch of CUDA 12
# On the machine with the GPUs:
pip install --no-index --no-deps --find-links wheels wheels/*.whl
PYTHONPATH=.:transports python -m tests.gpu"""
