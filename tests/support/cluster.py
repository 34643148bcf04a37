"""All pods of the closed overlay of deploy/kubernetes, run here, and what holds of them."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from benchmarks.hosts import Hosts
from mx.lenderkey import STATES
from mx.namekey import LenderKey, NameKey
from tests.support.deployed import DEPLOY, flows_admitted, pods
from tests.support.kubelet import Node, Pod, PodProcess, issued, programs, redis_users

_PODS = {
    "redis": "mx-redis-0",
    "coord0": "mx-coordinator-0",
    "coord1": "mx-coordinator-1",
    "origin": "mx-origin-0",
    "cache": "mx-cache",
    "rep0": "llama-8b-0",
    "rep1": "llama-8b-1",
}
_SERVICES = {
    "mx-coordinator": "mx-coordinator",
    "mx-origin": "mx-origin",
    "llama-8b": "llama-8b-peers",
}


def workload(pod: str) -> str:
    return re.sub(r"-\d$", "", pod)


class Cluster:
    """All pods of the overlay, and what they run."""

    def __init__(self, hosts: Hosts, folder: Path, image: Path | None = None) -> None:
        """
        Args:
            hosts: Where to make the pods' networks.
            folder: Where to keep what they use.
            image: The root of the image `mx`; None: this machine's.
        """
        links = hosts.star([*_PODS])
        self.addresses = {_PODS[host]: links[host].address(host) for host in _PODS}
        (folder / "certificates").mkdir()
        (folder / "model/llama-8b").mkdir(parents=True)
        shapes = {f"model.layers.{n}.weight": (256, 256) for n in range(4)}
        write_checkpoint(folder / "model/llama-8b/model.safetensors", shapes)
        programs(folder / "bin")
        kubernetes, name_key = DEPLOY / "kubernetes", os.urandom(32)
        until_s = int(time.time()) + 86400
        lender_key = LenderKey.issue(NameKey(name_key), ["llama-8b"], [STATES], until_s)
        self.node = Node(
            hosts,
            folder,
            {
                **issued(folder / "certificates", [self.addresses["mx-cache"]]),
                "mx-redis-users": {
                    "users.acl": redis_users("secret") + b"user look on nopass +@all\n"
                },
                "mx-redis-password": {"password": b"secret"},
                "mx-coordinator-keys": {"receipt.key": os.urandom(32), "other.key": b"other"},
                "mx-origin-keys": {"name.key": name_key, "other.key": b"other"},
                "llama-8b-keys": {"lender.key": lender_key, "name.key": b"never here"},
            },
            {
                "mx-policy": {"policy.toml": (kubernetes / "policy.toml").read_bytes()},
                "mx-redis": {"redis.conf": (kubernetes / "redis.conf").read_bytes()},
                "mx-model": {"MODEL": b"llama-8b@PIN"},
            },
            {"models": folder / "model"},
            image=image,
        )
        for pod, address in self.addresses.items():
            if service := _SERVICES.get(workload(pod)):
                self.node.names[f"{pod}.{service}.mx.svc"] = address
        self.node.names["mx-redis.mx.svc"] = self.addresses["mx-redis-0"]
        self._specs = {name: template["spec"] for name, template in pods()}
        self._started: list[PodProcess] = []
        self._pods: dict[str, Pod] = {}

    def pod(self, name: str) -> Pod:
        if name not in self._pods:
            host = next(host for host, pod in _PODS.items() if pod == name)
            spec = self._specs[workload(name)]
            self._pods[name] = Pod(self.node, host, name, self.addresses[name], spec)
        return self._pods[name]

    def start(self, name: str, container: str, *words: str) -> PodProcess:
        self._started.append(self.pod(name).start(container, *words))
        return self._started[-1]

    def probe(self, name: str, kind: str) -> PodProcess:
        (container,) = self._specs[workload(name)]["containers"]
        return self.start(name, container["name"], *container[kind]["exec"]["command"])

    def up(self, name: str, container: str) -> PodProcess:
        """Start a container, and return it once its own startup or readiness probe says so."""
        self.pod(name).initialise()
        running = self.start(name, container)
        spec = next(each for each in self._specs[workload(name)]["containers"])
        kind = "startupProbe" if "startupProbe" in spec else "readinessProbe"

        def answers() -> bool:
            asked = self.probe(name, kind)
            return asked.wait(30) == 0 and (name != "mx-redis-0" or "PONG" in asked.out)

        running.until(answers, f"probe of {name}")
        return running

    def connections(self) -> set[tuple[str, str, int]]:
        """Return who is connected with whom, at which port of it."""
        found: set[tuple[str, str, int]] = set()
        pods_at = {address: pod for pod, address in self.addresses.items()}
        for host, pod in _PODS.items():
            at = [*self.node.hosts.prefix(host), "ss", "-Htn"]
            listening = subprocess.run([*at, "-l"], capture_output=True, text=True, check=True)
            own = {
                int(line.split()[3].rpartition(":")[2]) for line in listening.stdout.splitlines()
            }
            shown = subprocess.run(at, capture_output=True, text=True, check=True)
            for line in shown.stdout.splitlines():
                here, there = (word.rpartition(":") for word in line.split()[3:5])
                other = pods_at.get(there[0].strip("[]").removeprefix("::ffff:"))
                if int(here[2]) in own and other not in (None, pod):
                    found.add((str(other), pod, int(here[2])))
        return found

    def close(self) -> None:
        for each in reversed(self._started):
            each.end()


def redis_says(cluster: Cluster, user: str, password: str, *words: str, shows: bool = True) -> str:
    files = ("--cert", "/etc/mx/tls/tls.crt", "--key", "/etc/mx/tls/tls.key")
    shown = ("--tls", "--cacert", "/etc/mx/tls/ca.crt", *(files if shows else ()))
    who = ("--user", user, "--pass", password, "--no-auth-warning")
    asked = cluster.start("mx-redis-0", "redis", "redis-cli", *shown, *who, *words)
    asked.wait(30)
    return asked.out + asked.err


def check_closed(cluster: Cluster) -> None:
    """Run the overlay, and check what it admits. Raises AssertionError if anything is not so."""
    cluster.up("mx-redis-0", "redis")
    for name in ("mx-coordinator-0", "mx-coordinator-1"):
        cluster.up(name, "coordinator")
    origin = cluster.up("mx-origin-0", "source")
    origin.until(lambda: "pin llama-8b@" in origin.err, "pin")
    (pin,) = re.findall(r"pin llama-8b@([0-9a-f]{64})", origin.err)

    # No replica runs without the whole pin.
    for wrong in (b"llama-8b", b"llama-8b@PIN", b"llama-8b@" + pin[:8].encode()):
        cluster.node.configs["mx-model"]["MODEL"] = wrong
        with pytest.raises(AssertionError, match="does not pin weights"):
            cluster.pod("llama-8b-0").initialise()
    cluster.node.configs["mx-model"]["MODEL"] = f"llama-8b@{pin}".encode()
    cluster.up("mx-cache", "cache")
    replicas: list[PodProcess] = []
    seen: set[tuple[str, str, int]] = set()
    for name in ("llama-8b-0", "llama-8b-1"):
        pod = cluster.pod(name)
        pod.initialise()
        # Its one key is the lender's.
        code = "import os; print(*os.listdir('/var/lib/mx'))"
        looked = cluster.start(name, "vllm", "python3", "-c", code)
        assert (looked.wait(30), looked.out.split()) == (0, ["lender.key"])
        words = ("mx", "pull", "$(MODEL)", "--hold", "--json")
        replicas.append(cluster.start(name, "vllm", *words))
        assert replicas[-1].json()["pin"] == pin
        seen |= cluster.connections()
    operator = cluster.start("mx-coordinator-0", "coordinator", "mx", "sources", "--json",
                             "--coordinator", "localhost:7600")  # fmt: skip
    assert operator.wait(30) == 0, operator.err
    assert "llama-8b-1.llama-8b-peers.mx.svc" in operator.out

    # What went over the network is what the network policies admit.
    seen |= cluster.connections()
    assert {(a, b) for a, b, _ in seen} >= {
        ("mx-coordinator-0", "mx-redis-0"),
        ("mx-coordinator-1", "mx-redis-0"),
    }
    called = {to.rpartition("-")[0] for source, to, _ in seen if source.startswith("llama-8b")}
    assert "mx-coordinator" in called
    for source, target, port in seen:
        assert flows_admitted(workload(source), workload(target), port), (source, target, port)

    # Redis has refused mx nothing, and lets in only its users, with a certificate.
    assert redis_says(cluster, "look", "any", "acl", "log").strip() == ""
    assert "PONG" in redis_says(cluster, "mx", "secret", "ping")
    assert "PONG" not in redis_says(cluster, "mx", "secret", "ping", shows=False)
    assert "WRONGPASS" in redis_says(cluster, "mx", "wrong", "ping")
    assert "WRONGPASS" in redis_says(cluster, "default", "", "ping")
    for command in ("get other", "keys *", "flushall", "acl list", "config set dir /", "eval 0 0"):
        assert "NOPERM" in redis_says(cluster, "mx", "secret", *command.split()), command
    assert "NOPERM" in redis_says(cluster, "probe", "any", "hgetall", "{mx}:meta")
