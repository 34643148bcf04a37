"""What is in deploy/, read for tests: its files, and the commands that they run."""

from __future__ import annotations

import functools
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


@functools.cache
def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file. They are not to be changed."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


@functools.cache
def manifests(overlay: str = "") -> list[dict[str, Any]]:
    """Return all Kubernetes manifests of an overlay; "" is the closed one."""
    return [
        each
        for path in sorted((DEPLOY / "kubernetes" / overlay).glob("*.yaml"))
        if path.stem != "kustomization"
        for each in documents(path)
    ]


def pods(overlay: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the pod's template of each workload."""
    for each in manifests(overlay):
        if "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]


#: Where what is not a pod of the overlay is: labels of its namespace, and its own.
_OUTSIDE = {
    "prometheus": ("monitoring", {"app.kubernetes.io/name": "prometheus"}),
    "names": ("kube-system", {"k8s-app": "kube-dns"}),
    "asking": ("gateway", {"asks": "llama-8b"}),
    "stranger": ("mx", {"app.kubernetes.io/name": "stranger"}),
    "elsewhere": ("default", {"app.kubernetes.io/name": "mx-coordinator", "mx": "peer"}),
}
#: What the manifests have in place of the hosts' addresses.
HOSTS = "192.0.2.0/24"


def endpoints() -> list[str]:
    """Return all that connects or is connected to: pods of the overlay and others, `host` (caches,
    which have the host's network) and `internet`."""
    return [name for name, _ in pods() if name != "mx-cache"] + [*_OUTSIDE, "mx-cache", "internet"]


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    found = all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        found = found and labels.get(each["key"]) in each["values"]
    return found


def _place(name: str) -> tuple[str, dict[str, str]] | None:
    """Return the namespace and labels of a pod with a network of its own; None for another."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    for found, template in pods():
        if found == name and not template["spec"].get("hostNetwork"):
            return "mx", template["metadata"]["labels"]
    return None


def _is_peer(rule: dict[str, Any], name: str, namespace: str) -> bool:
    if "ipBlock" in rule:
        return name == "mx-cache" and rule["ipBlock"] == {"cidr": HOSTS}
    place = _place(name)
    if place is None:
        return False
    spaces = rule.get("namespaceSelector", {"matchLabels": {_NAME: namespace}})
    return _matches(spaces, {_NAME: place[0]}) and _matches(rule["podSelector"], place[1])


_NAME = "kubernetes.io/metadata.name"


def flows_admitted(source: str, target: str, port: int, protocol: str = "TCP") -> bool:
    """Return True if the network policies let one of `endpoints` connect to a port of another."""

    def passes(kind: str, own: str, other: str) -> bool:
        place = _place(own)
        if place is None or place[0] not in ("mx", "mx-host"):
            return True  # no policy of these is about it
        namespace, labels = place
        applying = [
            each["spec"]
            for each in manifests()
            if each["kind"] == "NetworkPolicy"
            and each["metadata"]["namespace"] == namespace
            and kind.title() in each["spec"]["policyTypes"]
            and _matches(each["spec"]["podSelector"], labels)
        ]
        return not applying or any(
            any(
                _is_peer(peer, other, namespace)
                for peer in rule["from" if kind == "ingress" else "to"]
            )
            and any(
                each["protocol"] == protocol
                and each["port"] <= port <= each.get("endPort", each["port"])
                for each in rule["ports"]
            )
            for spec in applying
            for rule in spec.get(kind, ())
        )

    return passes("egress", source, target) and passes("ingress", target, source)


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
        given = {name: context.params.get(name) for name in config.descriptions()}
        return config.load(given, environ={}, file="/dev/null", typed=True)
    except (typer.TyperException, ConfigError) as error:
        raise AssertionError(f"{' '.join(words)}: {error}") from error


Change = Callable[[str], str]


def changed(words: Sequence[str], change: Change) -> list[str]:
    """Return a command, each word changed."""
    return [change(word) for word in words]
