"""What is in deploy/, read for tests: its files, and the commands that they run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

import mx.cli.app
import mx.cli.coordinator
from mx import config
from mx.errors import ConfigError
from tests.support.daemon import ROOT

DEPLOY = ROOT / "deploy"
#: The commands of mx in the image, by their first word.
PROGRAMS = ("mx", "mx-coordinator")


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def manifests() -> list[dict[str, Any]]:
    """Return all Kubernetes manifests."""
    return [
        each
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        if path.stem != "kustomization"
        for each in documents(path)
    ]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the pod's template of each workload."""
    for each in manifests():
        if "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]


def units() -> list[Path]:
    """Return the systemd units."""
    return sorted((DEPLOY / "systemd").glob("*.service"))


def started(unit: Path) -> list[str]:
    """Return the words of a unit's ExecStart, for the instance `one`."""
    (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.M)
    return shlex.split(line.replace("%i", "one"))


def settings_of(words: Sequence[str]) -> config.Settings:
    """Read a command line of `mx` or `mx-coordinator` as the command does, and run nothing.

    Args:
        words: The command, $(NAME) in them stands for an address.

    Returns:
        The settings.

    Raises:
        AssertionError: It is not understood.
    """
    program, *arguments = (re.sub(r"\$\([A-Z_]+\)", "127.0.0.1", word) for word in words)
    command: Any = typer.main.get_command(
        mx.cli.app.app if program == "mx" else mx.cli.coordinator.app
    )
    if program == "mx":
        name, *arguments = arguments
        command = command.get_command(None, name)
    try:
        context = command.make_context(program, list(arguments))
        given = {name: context.params.get(name) for name in config.DESCRIPTIONS}
        return config.load(given, environ={}, file="/dev/null", typed=True)
    except (typer.TyperException, ConfigError) as error:
        raise AssertionError(f"{' '.join(words)}: {error}") from error


Change = Callable[[str], str]


def changed(words: Sequence[str], change: Change) -> list[str]:
    """Return a command, each word changed."""
    return [change(word) for word in words]
