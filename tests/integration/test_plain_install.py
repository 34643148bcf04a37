"""What `pip install` of the project alone brings is enough for the commands that need no extra."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from mx.errors import install_hint
from tests.support.commands import Run, environment, serve, start_coordinator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

#: Makes a process find nothing but the standard library, the project, and what the project's
#: metadata requires, with what that requires.
_SITE = """
import importlib.machinery, importlib.metadata, re, sys

def closure(name, found):
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in found:
        return found
    try:
        requires = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    found.add(name)
    for each in requires:
        if "extra ==" not in each:
            closure(re.match(r"[\\w.-]+", each)[0], found)
    return found

required = closure("mx-peer", set())
assert len(required) > 5, required
owners = importlib.metadata.packages_distributions()
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
refused = {
    package for package, names in owners.items() if not required & {normal(n) for n in names}
} - {"sitecustomize"}

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
"""


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, str]:
    """The environment of a process with what is required alone."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    return environment(PYTHONPATH=str(folder))


def test_serve_pull_and_look(run: Run, plain: dict[str, str], tmp_path: Path) -> None:
    plainly = functools.partial(run, env=plain)
    checkpoint = tmp_path / "m.safetensors"
    write_checkpoint(checkpoint, {f"model.layers.{n}.weight": (64, 64) for n in range(3)})
    coordinator, _ = start_coordinator(plainly)
    source = serve(plainly, checkpoint, "m", coordinator)
    assert source.json()
    given = ("--coordinator", coordinator)
    pulled = plainly("pull", "m", *given, "--out", str(tmp_path / "out"), "--json")
    assert pulled.wait() == 0, (pulled.err, source.err)
    for command in (
        ("models", "m", "--table"),
        ("sources", "m", "--table"),
        ("plan", "m"),
        ("topo",),
    ):
        looked = plainly(*command, *given, "--json")
        assert looked.wait() == 0, looked.err
        assert json.loads(looked.out)


def test_the_page_names_its_extra(run: Run, plain: dict[str, str]) -> None:
    command = run("web", env=plain)
    assert command.wait() == 2
    assert install_hint("web") in command.err


def test_the_environment_lacks_what_is_an_extra(plain: dict[str, str]) -> None:
    for package, missing in (("pytest", True), ("torch", True), ("grpc", False), ("mx", False)):
        ended = subprocess.run([sys.executable, "-c", f"import {package}"], env=plain, check=False)
        assert bool(ended.returncode) == missing, package
