"""Hosts made of network namespaces: what the tests between machines stand on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.hosts import Hosts, Link, remove_stale
from mx.errors import LocalError
from tests.support.daemon import ROOT

pytestmark = pytest.mark.integration

ECHO = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind((sys.argv[1], 5000))
    print(flush=True)
    while True:
        s.sendto(*s.recvfrom(100))
"""
ASK = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind((sys.argv[1], 0))
    s.settimeout(float(sys.argv[3]))
    s.sendto(b"hello", (sys.argv[2], 5000))
    sys.exit(s.recv(100) != b"hello")
"""


def namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True
    ).stdout


class Net:
    """Two hosts, an echo in `b`."""

    def __init__(self, hosts: Hosts, link: Link) -> None:
        self.hosts, self.link = hosts, link
        echo(hosts, "b", link.address("b"))

    def works(self, timeout_s: float = 20.0) -> bool:
        return answers(self.hosts, self.link, "a", self.link.address("b"), timeout_s)


def echo(hosts: Hosts, host: str, address: str) -> None:
    command = [sys.executable, "-c", ECHO, address]
    process = hosts.start(host, command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"


def answers(hosts: Hosts, link: Link, host: str, far: str, timeout_s: float) -> bool:
    command = [sys.executable, "-c", ASK, link.address(host), far, str(timeout_s)]
    return hosts.start(host, command, stderr=subprocess.DEVNULL).wait() == 0


@pytest.fixture
def net(hosts: Hosts) -> Iterator[Net]:
    yield Net(hosts, hosts.link("a", "b", mbit_per_s=100, back_mbit_per_s=100))


def test_a_link_carries_can_be_cut_and_healed(net: Net) -> None:
    assert net.works()
    assert net.hosts.sent_nbytes(net.link, "a") > 0
    net.hosts.cut(net.link)
    assert not net.works(0.2)
    net.hosts.heal(net.link)
    assert net.works()


def test_one_direction_can_be_lost_and_is_as_fast_as_before_when_it_is_healed(net: Net) -> None:
    for sender in ("a", "b"):
        net.hosts.mute(net.link, sender)
        assert not net.works(0.2)
        net.hosts.heal(net.link)
        assert net.works()
    shown = subprocess.run(
        [*net.hosts.prefix("a"), "tc", "qdisc", "show", "dev", net.link.device("a")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "tbf" in shown
    assert "rate 100Mbit" in shown


def test_links_do_not_lead_to_each_other_and_a_switch_does(hosts: Hosts) -> None:
    first = hosts.link("a", "b")
    hosts.link("b", "c")
    echo(hosts, "c", "10.213.1.2")
    assert not answers(hosts, first, "a", "10.213.1.2", 0.2)
    links = hosts.star(["a", "b", "c"], up_mbit_per_s=100, down_mbit_per_s={"c": 50})
    echo(hosts, "c", links["c"].address("c"))
    for host in ("a", "b"):
        assert answers(hosts, links[host], host, links["c"].address("c"), 20.0)
    hosts.cut(links["a"])
    assert not answers(hosts, links["a"], "a", links["c"].address("c"), 0.2)
    assert answers(hosts, links["b"], "b", links["c"].address("c"), 20.0)


def test_nothing_is_left_whatever_happens_inside(hosts: Hosts) -> None:
    running = None
    with pytest.raises(LocalError, match="no-such-host"), Hosts() as other:
        other.link("a", "b")
        running = other.start("a", [sys.executable, "-c", "import time; time.sleep(600)"])
        name = other.namespace("a")
        assert name in namespaces()
        other.sent_nbytes(other.link("a", "c"), "a")
        other.throttle(Link("no-such-host", "b", ("x", "y"), ("", "")), 1, "no-such-host")
    assert running is not None
    assert running.poll() is not None
    assert name not in namespaces()


def test_what_a_killed_process_left_is_removed_by_the_next(hosts: Hosts) -> None:
    del hosts  # only for its reason to skip
    script = (
        "import os, signal; from benchmarks.hosts import Hosts; h = Hosts(); h.add('x')\n"
        "print(h.namespace('x'), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, cwd=ROOT
    )
    name = done.stdout.strip()
    assert name in namespaces()
    remove_stale()
    assert name not in namespaces()
