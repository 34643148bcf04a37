"""What `mx doctor` says of hosts that differ from this one: limits, kernels, certificates."""

from __future__ import annotations

import dataclasses
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mx import config
from mx.core.topology import Gpu, GpuPeer, Nic, Place
from mx.discovery import Topology
from mx.errors import ConfigError
from mx.operations.doctor import CHECKS, ExaminedHost, Finding, Level, examine, host, network
from mx.transport import Unavailable, Viable
from tests.support.certificates import Authority
from tests.support.daemon import ROOT


def subject(root: Path = Path("/"), **given: Any) -> ExaminedHost:
    settings = config.load(given, environ={}, file="/dev/null")
    return ExaminedHost(settings, root, time.time())


def levels(findings: Iterable[Finding]) -> list[Level]:
    return [each.level for each in findings]


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("1.82.2", Level.OK),
        ("1.83.1", Level.OK),
        ("1.83.0rc1", Level.OK),
        ("1.86.0", Level.OK),
        ("2.0", Level.OK),
        ("1.71.2", Level.FAILURE),
        ("1.82.1", Level.FAILURE),
        ("1.83.0", Level.FAILURE),
        ("1.84.0", Level.FAILURE),
        ("1.85.2", Level.FAILURE),
        ("1.70.0", Level.FAILURE),
        ("odd", Level.FAILURE),
    ],
)
def test_releases_of_grpc_with_faults_are_failures(version: str, level: Level) -> None:
    found = host.grpc_finding(version)
    assert found.level is level
    assert version in found.text
    assert bool(found.fix) is (level is Level.FAILURE)


def test_they_are_those_that_the_project_excludes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (grpc,) = (each for each in project["dependencies"] if each.startswith("grpcio>"))
    excluded = {part for part in grpc.split(",") if part.startswith("!=")}
    assert excluded == {f"!={pattern}" for pattern in host.GRPC_FAULTS}
    assert grpc.split(",")[0] == "grpcio>=" + ".".join(map(str, host._LEAST_GRPC))
    # The advice repeats them.
    assert all(part in host.grpc_finding("1.84.0").fix for part in excluded)


@pytest.mark.parametrize(
    ("release", "ulp", "found"),
    [
        ("6.1.0-13-amd64", "espintcp mptcp tls", [Level.OK]),
        ("6.18.44", "", [Level.OK, Level.NOTE]),
        ("5.15.0-91-generic", "tls", [Level.NOTE]),
        ("4.18.0-553.el8", "tls", [Level.FAILURE]),
    ],
)
def test_kernels(tmp_path: Path, release: str, ulp: str, found: list[Level]) -> None:
    write(tmp_path, "proc/sys/kernel/osrelease", release + "\n")
    write(tmp_path, "proc/sys/net/ipv4/tcp_available_ulp", ulp + "\n")
    assert levels(host.kernel(subject(tmp_path))) == found


@pytest.mark.parametrize(
    ("scope", "capabilities", "level"),
    [
        (None, "0", Level.OK),
        ("0", "0", Level.OK),
        ("1", "0", Level.WARNING),
        ("1", "80000", Level.OK),  # CAP_SYS_PTRACE
        ("2", "0", Level.WARNING),
        ("3", "1ffffffffff", Level.WARNING),
    ],
)
def test_ptrace_scopes(tmp_path: Path, scope: str | None, capabilities: str, level: Level) -> None:
    if scope is not None:
        write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", scope + "\n")
    write(tmp_path, "proc/self/status", f"Name:\tmx\nCapEff:\t{capabilities:0>16}\n")
    assert levels(host.processes(subject(tmp_path))) == [level]


@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [
        (1024, 524288, Level.OK),
        (-1, -1, Level.OK),
        (1024, 1024, Level.WARNING),
        (4096, 4096, Level.OK),
    ],
)
def test_limits_of_open_files(soft: int, hard: int, level: Level) -> None:
    assert host.descriptors_finding(soft, hard).level is level


def test_what_keeps_gpus_from_host_memory() -> None:
    old, limited = host.registering_findings("6.1.0", 8 << 20)
    assert old.level is limited.level is Level.NOTE
    assert "sealed memory" in old.text and "8.39 MB" in limited.text
    assert not list(host.registering_findings("6.7.0", -1))


def test_memory_is_the_containers(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/pod\n")
    write(
        tmp_path,
        "proc/self/mountinfo",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n",
    )
    assert levels(host.memory(subject(tmp_path))) == [Level.OK, Level.NOTE]  # no /dev/shm there
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", str(512 << 20))
    write(tmp_path, "sys/fs/cgroup/pod/memory.current", str(100 << 20))
    write(tmp_path, "sys/fs/cgroup/pod/memory.stat", "inactive_file 0\nactive_file 0\n")
    assert levels(host.memory(subject(tmp_path)))[0] is Level.WARNING


def test_clocks() -> None:
    assert host.clock_finding(0x2001, tls=True).level is Level.OK
    assert host.clock_finding(0x40, tls=False).level is Level.NOTE
    assert host.clock_finding(0x40, tls=True).level is Level.WARNING
    assert len(levels(host.clock(subject()))) == 1  # whatever this machine's is


def test_name_keys(tmp_path: Path) -> None:
    key = tmp_path / "name.key"
    assert levels(host.keys(subject(name_key=str(key)))) == [Level.OK]  # made at first use
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    assert levels(host.keys(subject(name_key=str(key)))) == [Level.OK]
    key.chmod(0o644)
    (found,) = host.keys(subject(name_key=str(key)))
    assert found.level is Level.FAILURE
    assert "other users" in found.text
    (found,) = host.keys(subject())  # without a home
    assert found.level is Level.WARNING
    (found,) = host.keys(subject(name_key="/proc/nowhere/name.key"))
    # The superuser may write where nothing can be made: he learns of it when the key is made.
    assert found.level in (Level.WARNING, Level.OK)


def seen(root: Path, topology: Topology, **given: Any) -> ExaminedHost:
    """Return a subject on another machine."""
    found = subject(root, **given)
    vars(found)["topology"] = topology  # where functools.cached_property keeps it
    return found


_RDMA = Nic(
    "ib0", "up", ("10.1.0.1/24",), 400_000, 4096, rdma_device="mlx5_0", link_layer="InfiniBand"
)
_UCX = {"ucx": Viable("nixl")}


def test_rdma_needs_a_library_devices_and_locked_memory(tmp_path: Path) -> None:
    found = seen(tmp_path, Topology(Place(nics=(_RDMA,)), {}, _UCX))
    texts = " ".join(each.text for each in network.rdma(found))
    assert "libibverbs is not installed" in texts
    assert "/dev/infiniband is not here" in texts
    write(tmp_path, "usr/lib/x86_64-linux-gnu/libibverbs.so.1", "")
    write(tmp_path, "dev/infiniband/uverbs0", "")
    texts = " ".join(each.text for each in network.rdma(found))
    assert "libibverbs" not in texts
    assert "/dev/infiniband" not in texts
    assert "not used beyond this machine" in texts
    trusting = seen(found.root, found.topology, trusted_fabric=True)
    assert "not used" not in " ".join(each.text for each in network.rdma(trusting))
    without = seen(tmp_path, Topology(Place(nics=(_RDMA,)), {}, {"ucx": Unavailable("no nixl")}))
    assert levels(network.rdma(without)) == [Level.WARNING]
    assert levels(network.rdma(seen(tmp_path, Topology(Place())))) == [Level.NOTE]


def test_interfaces() -> None:
    fast = Nic("eth1", "up", ("10.0.0.1/24",), 100_000, 1500)
    down = Nic("eth2", "down", ("10.0.1.1/24",), 100_000, 9000)
    found = list(network.interfaces(seen(Path("/"), Topology(Place(nics=(fast, down, _RDMA))))))
    assert levels(found) == [Level.NOTE, Level.OK]  # of eth1 and ib0
    assert "mtu 9000" in found[0].fix
    assert levels(network.interfaces(seen(Path("/"), Topology(Place())))) == [Level.NOTE]
    elsewhere = seen(Path("/"), Topology(Place()), coordinator="10.0.0.9:7600")
    assert levels(network.interfaces(elsewhere)) == [Level.FAILURE]


def test_gpus(tmp_path: Path) -> None:
    none = Topology(Place(), {"gpus": "there is no NVIDIA driver on this machine"})
    assert levels(network.gpus(seen(tmp_path, none))) == [Level.NOTE]
    write(tmp_path, "dev/nvidiactl", "")
    assert levels(network.gpus(seen(tmp_path, none))) == [Level.WARNING]  # NVML is in the way
    pair = tuple(
        Gpu(f"GPU-{n}", n, "H100", peers=(GpuPeer(f"GPU-{1 - n}", p2p_read=n == 0),))
        for n in (0, 1)
    )
    found = list(network.gpus(seen(tmp_path, Topology(Place(gpus=pair, driver="580.1")))))
    assert levels(found)[:2] == [Level.OK, Level.NOTE]
    assert "2 GPUs (H100), driver 580.1" in found[0].text
    assert found[1].text.startswith("gpu1 can't read")


def test_transports_that_a_host_needs_and_those_that_it_may_lack() -> None:
    states: dict[str, Viable | Unavailable] = {
        "shm": Unavailable("old kernel"),
        "tcp": Viable("sockets"),
        "ucx": Unavailable("no nixl"),
        "cuda_ipc": Unavailable("no CUDA"),
    }
    without = seen(Path("/"), Topology(Place(), {}, states))
    assert levels(network.transports(without)) == [
        Level.WARNING,
        Level.OK,
        Level.NOTE,
        Level.NOTE,
    ]
    with_gpu = seen(Path("/"), Topology(Place(gpus=(Gpu("GPU-0"),)), {}, states))
    assert levels(network.transports(with_gpu))[3] is Level.WARNING


def test_addresses() -> None:
    assert levels(network.address(subject())) == [Level.OK]
    away: dict[str, Any] = {"coordinator": "203.0.113.77:7600"}
    (found,) = network.address(subject(**away))
    assert found.level is Level.WARNING
    assert "can't be registered" in found.text
    assert "`listen=" in found.fix
    found, ports = network.address(subject(**away, advertise="198.51.100.1:7601"))
    assert (found.level, ports.level) == (Level.OK, Level.WARNING)
    assert "198.51.100.1:7601" in found.text
    given = subject(**away, advertise="198.51.100.1:7601", data_ports="7602-7605")
    assert levels(network.address(given)) == [Level.OK]


def test_what_plain_text_means() -> None:
    away: dict[str, Any] = {"coordinator": "203.0.113.77:7600"}
    assert levels(network.certificates(subject())) == [Level.OK]
    assert levels(network.certificates(subject(**away))) == [Level.FAILURE]
    assert levels(network.certificates(subject(**away, insecure=True))) == [Level.WARNING]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


def with_files(authority: Authority, name: str, *more: Any, **given: Any) -> ExaminedHost:
    tls = authority.certificate(name, *more)
    files: dict[str, Any] = {
        "tls_cert": tls.certificate,
        "tls_key": tls.key,
        "tls_ca": tls.authority,
    }
    Path(tls.key).chmod(0o600)
    return subject(**files, **given)


def test_certificates_that_expire_are_named_in_time(authority: Authority) -> None:
    here = "subjectAltName=IP:127.0.0.1,URI:spiffe://mx/replica"
    good = with_files(authority, "soon", here, 2)
    found = list(network.certificates(good))
    # The authority of the tests is good for two days, too.
    assert levels(found) == [Level.WARNING, Level.WARNING, Level.OK]
    assert "a certificate in `tls_cert` expires in 2.0 days" in found[0].text
    assert "spiffe://mx/replica" in found[2].text
    later = dataclasses.replace(good, now_s=good.now_s + 3 * 86_400)
    found = list(network.certificates(later))
    assert (found[0].level, found[0].text[-11:]) == (Level.FAILURE, "has expired")


@pytest.mark.parametrize(
    ("extensions", "listen", "says"),
    [
        ("subjectAltName=IP:10.9.9.9", "10.0.0.2:0", "does not name 10.0.0.2"),
        ("basicConstraints=CA:FALSE", "127.0.0.1:0", "no subjectAltName"),
        (
            "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth",
            "127.0.0.1:0",
            "lacks clientAuth",
        ),
    ],
)
def test_certificates_that_others_would_refuse(
    authority: Authority, extensions: str, listen: str, says: str
) -> None:
    found = network.certificates(with_files(authority, "wrong", extensions, 2, listen=listen))
    assert any(each.level is Level.FAILURE and says in each.text for each in found)


def test_a_key_that_every_user_may_read(authority: Authority) -> None:
    found = with_files(authority, "open")
    Path(str(found.settings.tls_key)).chmod(0o644)
    assert any("every user may read" in each.text for each in network.certificates(found))


def test_checks_by_name() -> None:
    found = examine(config.load({}, environ={}, file="/dev/null"), only=["python", "kernel"])
    assert {each.check for each in found.findings} == {"python", "kernel"}
    assert found.ok
    with pytest.raises(ConfigError, match="no check nonsense") as caught:
        examine(config.load({}, environ={}, file="/dev/null"), only=["nonsense"])
    assert all(name in str(caught.value.hint) for name in CHECKS)


def test_an_interface_that_is_not_there_is_a_finding() -> None:
    settings = config.load({"nics": "nope0"}, environ={}, file="/dev/null")
    found = examine(settings, only=["interfaces"])
    assert not found.ok
    assert "nope0" in found.findings[0].text
