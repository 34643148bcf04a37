"""Pods of deploy/kubernetes, run here: their own commands, arguments, settings, Secrets, volumes
and names, each in namespaces of its own. What is missing of a node are its cgroups and seccomp.

The root file system is that of this machine, or that of the image, and read-only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts
from tests.support.certificates import Authority
from tests.support.commands import Command, environment
from tests.support.daemon import ROOT
from tests.support.deployed import DEPLOY, documents

_VARIABLE = re.compile(r"\$\((\w+)\)")
_FILES = "..data"


def issued(folder: Path, hosts: list[str]) -> dict[str, dict[str, bytes]]:
    """Return the Secrets that cert-manager makes of the example's Certificates, by name.

    Args:
        folder: Where to make them.
        hosts: The addresses of the hosts, in place of the example's.
    """
    authority, found = Authority(folder, "authority"), {}
    for each in documents(DEPLOY / "kubernetes/cert-manager/certificates.yaml"):
        spec = each["spec"]
        if each["kind"] != "Certificate" or spec.get("isCA"):
            continue
        names = [f"DNS:{name}" for name in spec.get("dnsNames", ())]
        names += [f"URI:{uri}" for uri in spec.get("uris", ())]
        names += [f"IP:{host}" for host in hosts if spec.get("ipAddresses")]
        usages = {"server auth": "serverAuth", "client auth": "clientAuth"}
        extended = [usages[usage] for usage in spec["usages"] if usage in usages]
        lines = (
            f"subjectAltName={','.join(names)}",
            f"extendedKeyUsage={','.join(extended)}",
            "keyUsage=digitalSignature",
        )
        files = authority.certificate(each["metadata"]["name"], "\n".join(lines))
        found[spec["secretName"]] = {
            "tls.crt": Path(files.certificate).read_bytes(),
            "tls.key": Path(files.key).read_bytes(),
            "ca.crt": Path(files.authority).read_bytes(),
        }
    return found


@dataclass
class Node:
    """What pods run on, and what they find there."""

    hosts: Hosts
    folder: Path
    #: Secrets and ConfigMaps by name, each a file's contents by its key.
    secrets: dict[str, dict[str, bytes]]
    configs: dict[str, dict[str, bytes]]
    #: Folders by the name of the claim.
    claims: dict[str, Path] = field(default_factory=dict)
    #: Addresses by name.
    names: dict[str, str] = field(default_factory=dict)
    #: The root of the image `mx`, which stands for `mx-vllm` as well; None: this machine's.
    image: Path | None = None


class PodProcess(Command):
    """One container's process."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self._words = words
        super().__init__(env=env)

    def command(self, entry: str) -> list[str]:
        return self._words


class Pod:
    """A pod: `run` its containers."""

    def __init__(
        self, node: Node, host: str, name: str, address: str, spec: dict[str, Any]
    ) -> None:
        """
        Args:
            node: Where it runs.
            host: Which of its hosts is the pod's network.
            name: The pod's.
            address: Its address.
            spec: What the manifest has of it.
        """
        self._node, self._host, self._spec = node, host, spec
        self._fields = {
            "metadata.name": name, "status.podIP": address, "status.hostIP": address,
        }  # fmt: skip
        self._folder = node.folder / name
        self._folder.mkdir()
        self._volumes = {each["name"]: self._volume(each) for each in spec.get("volumes", ())}
        if not self._volumes.get("data"):
            self._volumes["data"] = self._empty("data")

    def _empty(self, name: str) -> Path:
        group = self._spec["securityContext"]["fsGroup"]
        made = self._folder / name
        made.mkdir()
        os.chown(made, 0, group)
        made.chmod(0o2777)
        return made

    def _volume(self, volume: Mapping[str, Any]) -> Path:
        if "emptyDir" in volume:
            return self._empty(str(volume["name"]))
        if "hostPath" in volume:
            made = self._node.folder / ("host" + str(volume["hostPath"]["path"]).replace("/", "-"))
            made.mkdir(exist_ok=True)
            return made
        if "persistentVolumeClaim" in volume:
            return self._node.claims[volume["persistentVolumeClaim"]["claimName"]]
        made = self._folder / str(volume["name"])
        (made / _FILES).mkdir(parents=True)
        if "secret" in volume:
            source, data = volume["secret"], self._node.secrets[volume["secret"]["secretName"]]
        else:
            source, data = volume["configMap"], self._node.configs[volume["configMap"]["name"]]
        for item in source["items"]:  # and no other key
            file = made / _FILES / item["path"]
            file.write_bytes(data[item["key"]])
            os.chown(file, 0, self._spec["securityContext"]["fsGroup"])
            file.chmod(source.get("defaultMode", 0o644))
            (made / item["path"]).symlink_to(f"{_FILES}/{item['path']}")
        return made

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in container.get("env", ()):
            if "value" in each:
                found[each["name"]] = self._expanded(each["value"], found)
                continue
            source = each["valueFrom"]
            if "fieldRef" in source:
                found[each["name"]] = self._fields[source["fieldRef"]["fieldPath"]]
                continue
            kept = self._node.secrets if "secretKeyRef" in source else self._node.configs
            ((_, where),) = source.items()
            found[each["name"]] = kept[where["name"]][where["key"]].decode()
        return found

    @staticmethod
    def _expanded(text: str, values: Mapping[str, str]) -> str:
        return _VARIABLE.sub(lambda found: values.get(found[1], found[0]), text)

    def start(
        self, name: str, *words: str, without: tuple[str, ...] = (), init: bool = False
    ) -> PodProcess:
        """Start a container.

        Args:
            name: The container's.
            words: What to run in place of its command; nothing runs that.
            without: Variables to leave out.
            init: Whether it is one that runs before the others.
        """
        kind = "initContainers" if init else "containers"
        (container,) = (each for each in self._spec[kind] if each["name"] == name)
        values = {k: v for k, v in self._environment(container).items() if k not in without}
        image = self._image(container)
        entry = ["/usr/bin/tini", "-s", "--"] if image and "args" in container else []
        given = words or (*entry, *container.get("command", container.get("args", ())))
        command = [self._expanded(word, values) for word in given]
        clean = environment() if image is None else {}
        clean["PATH"] = "/app/bin:/usr/bin" if image else f"/app/bin:{os.environ['PATH']}"
        clean |= {"PYTHONPATH": "/app"} if image else {}
        clean |= {"XDG_STATE_HOME": "/var/lib", "HOME": "/", "PYTHONUNBUFFERED": "1"}
        return PodProcess([*self._entered(container), *command], clean | values)

    def _image(self, container: Mapping[str, Any]) -> Path | None:
        """Return the image's root; None for this machine's, as for Redis, which is not ours."""
        return None if container["image"] == "redis" else self._node.image

    def initialise(self) -> None:
        """Run what runs before the containers. Raises AssertionError if one ends with an error."""
        for each in self._spec.get("initContainers", ()):
            done = self.start(each["name"], init=True)
            try:
                assert done.wait(60) == 0, done.err
            finally:
                done.end()

    def _entered(self, container: Mapping[str, Any]) -> list[str]:
        node, security = self._node, container["securityContext"]
        root = self._folder / f"root-{container['name']}-{os.urandom(4).hex()}"
        root.mkdir()
        image = self._image(container)
        lower = str(image or "/")
        lines = [
            "set -e",
            f"mount -t tmpfs tmpfs {root}; mkdir {root}/up {root}/work {root}/all",
            f"mount -t overlay overlay -o lowerdir={lower},upperdir={root}/up,workdir={root}/work "
            f"{root}/all",
            f"all={root}/all; mkdir -p $all/proc $all/dev; mount -t proc proc $all/proc",
            "mount --rbind /dev $all/dev",
            f"cp {self._hosts()} $all/etc/hosts",
        ]
        for mount in container["volumeMounts"]:
            where, only = mount["mountPath"], mount.get("readOnly")
            lines.append(
                f"mkdir -p $all{where}; mount --bind {self._volumes[mount['name']]} $all{where}"
            )
            if only:
                lines.append(f"mount -o remount,ro,bind $all{where}")
        # These may be below a folder that a volume hides, or that only root enters.
        for each in sorted({str(ROOT), sys.prefix, sys.base_prefix}) if image is None else ():
            lines.append(f"mkdir -p $all{each}; mount --rbind {each} $all{each}")
            above = " ".join(
                f"$all{parent}" for parent in Path(each).parents if parent != Path("/")
            )
            lines.append(f"chmod a+x {above}")
        if image is None:
            lines.append(f"mkdir -p $all/app/bin; mount --bind {node.folder}/bin $all/app/bin")
        lines.append("mount -o remount,ro,bind $all")
        user = security.get("runAsUser", self._spec["securityContext"]["runAsUser"])
        added = security["capabilities"].get("add", ())
        # Beside what chroot(8) needs; another user than root has none.
        own = ("sys_chroot", "setuid", "setgid")
        kept = ",".join(["-all", *(f"+{each.lower()}" for each in (*own, *added))])
        lines.append(
            f"exec setpriv --bounding-set={kept} --no-new-privs "
            f'/usr/sbin/chroot --userspec={user}:{user} --groups={user} $all "$@"'
        )
        script = "; ".join(lines)
        prefix = self._node.hosts.prefix(self._host)
        return [*prefix, "unshare", "-m", "--propagation", "private", "bash", "-c", script, "-"]

    def _hosts(self) -> Path:
        path = self._folder / "hosts"
        known = {"localhost": "127.0.0.1", **self._node.names}
        # Another container that starts copies it at the same time.
        fresh = self._folder / f"hosts-{os.urandom(4).hex()}"
        fresh.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        fresh.replace(path)
        return path


def programs(folder: Path) -> None:
    """Make the commands that the image has, for this machine's root."""
    folder.mkdir()
    for name, entry in (("mx", "main"), ("mx-coordinator", "coordinator_main")):
        (folder / name).write_text(f"#!{sys.executable}\nfrom mx.cli import {entry}\n{entry}()\n")
    for script in (DEPLOY / "docker/bin").iterdir():
        lines = script.read_text().splitlines(keepends=True)
        (folder / script.name).write_text(f"#!{sys.executable}\n{''.join(lines[1:])}")
    for path in folder.iterdir():
        path.chmod(0o755)


def unavailable() -> str:
    """Return what is missing to run pods; "" if nothing is."""
    for name in ("unshare", "redis-server", "openssl"):
        if not shutil.which(name):
            return f"{name} is not installed"
    return ""


def redis_users(password: str) -> bytes:
    """Return what deploy/redis-users prints."""
    made = subprocess.run(
        [DEPLOY / "redis-users", password], capture_output=True, check=True, timeout=30
    )
    return made.stdout
