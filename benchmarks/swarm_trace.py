"""Samples the links and processors during a round of commands, and draws what each host did.

`benchmarks.traced` writes the trace of each command, `Sampler` what went over each link;
`python -m benchmarks.swarm_commands --svg FILE` has both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .processes import Child
from .svg import INK, document, rectangle, text

_SAMPLES = "samples.json"
#: Samples until its input ends: [time, {host: [sent, received bytes]}, [all, idle seconds of the
#: processors, those that a hypervisor took], {server: its CPU seconds}].
_SAMPLER = """
import json, os, select, sys, time
ports, servers, path = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
tick = os.sysconf("SC_CLK_TCK")
def links():
    found = {}
    for line in open("/proc/net/dev"):
        name, _, rest = line.partition(":")
        if name.strip() in ports:
            fields = rest.split()
            found[ports[name.strip()]] = [int(fields[0]), int(fields[8])]
    return found
def processors():
    fields = [int(each) / tick for each in open("/proc/stat").readline().split()[1:]]
    return [sum(fields[:8]), fields[3] + fields[4], fields[7]]
def used(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / tick
found = []
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.025)[0]:
    cpu = {name: used(pid) for name, pid in servers.items()}
    found.append([time.monotonic(), links(), processors(), cpu])
with open(path, "w") as file:
    json.dump(found, file)
"""
_WIDTH, _LEFT, _RIGHT = 1200, 84, 16
_TOP, _ROW, _LANE = 84, 66, 7
#: Rates are means over this time.
_WINDOW_S = 0.15
_START, _CONTROL, ORIGIN, PEER, IDLE = "#9aa4af", "#8e6fd8", "#d98200", "#1f83e0", "#d1495b"
_UP = "#2e9a5b"


class Sampler:
    """Samples the ports of a switch and the processors of this machine, from when it is made until
    it is closed."""

    def __init__(
        self,
        prefix: Sequence[str],
        ports: Mapping[str, str],
        servers: Mapping[str, int],
        folder: Path,
    ) -> None:
        """
        Args:
            prefix: What a command in the switch's namespace begins with.
            ports: The host of each port.
            servers: Process ids by name.
            folder: Where the samples are written.
        """
        path = str(folder / _SAMPLES)
        self._child = Child(
            "-c", _SAMPLER, json.dumps(ports), json.dumps(servers), path, prefix=prefix
        )
        self._child.hear()

    def close(self) -> None:
        """Write the samples."""
        self._child.close()


class _Host:
    """What one command did; times are seconds since the first sample."""

    def __init__(self, trace: dict[str, Any], zero_s: float) -> None:
        began = [at_s - zero_s for name, kind, at_s in trace["spans"] if name == "pull.locate"]
        self.control_s: float = began[0]
        self.ended_s: float = trace["ended_s"] - zero_s
        self.cpu_s: float = trace["cpu_s"]
        self.hashed_s: float = trace["hashed_s"]
        self.messages = sum(trace["sent"].values()) + sum(trace["heard"].values())
        self.answers_s = [each_s for kind, each_s in trace["answers"] if kind == "allow"]
        reads: dict[tuple[str, int], list[float]] = {}
        for peer, chunk, begin_s, end_s in trace["reads"]:
            if end_s is not None:
                found = reads.setdefault((peer, chunk), [begin_s - zero_s, 0.0])
                found[1] = max(found[1], end_s - zero_s)
        #: (source's endpoint, begin, end), by begin.
        self.reads: list[tuple[str, float, float]] = sorted(
            ((peer, begin_s, end_s) for (peer, _), (begin_s, end_s) in reads.items()),
            key=lambda read: read[1],
        )


def picture(folder: Path, names: Sequence[str], origin: str, mbit_per_s: float) -> str:
    """Return the picture of a traced round.

    Args:
        folder: Has the traces and the samples.
        names: The hosts of the commands.
        origin: The origin's address.
        mbit_per_s: The speed of their links.
    """
    samples = json.loads((folder / _SAMPLES).read_text())
    zero_s: float = samples[0][0]
    traces = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    hosts = {name: _Host(trace, zero_s) for name, trace in traces.items()}
    end_s = max(host.ended_s for host in hosts.values())
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s

    def x(seconds: float) -> float:
        return _LEFT + scale * min(max(seconds, 0.0), end_s)

    full = mbit_per_s * 1e6 / 8
    parts = _legend()
    parts += _axis(x, end_s, len(names))
    for row, name in enumerate(["origin", *names]):
        y = _TOP + row * _ROW
        parts.append(text(_LEFT - 10, y + 34, name, INK, 13, "end"))
        sent, got = (_rates(samples, zero_s, name, side) for side in (0, 1))
        if name in hosts:
            parts += _phases(hosts[name], x, y, origin)
            parts.append(_area(got, x, y + 58, 30, full, PEER))
        parts.append(_curve(sent, x, y + 58, 30, full, _UP))
    parts += _processors(samples, zero_s, x, _TOP + (1 + len(names)) * _ROW)
    height = _TOP + (2 + len(names)) * _ROW + 44
    parts.append(text(_LEFT, height - 8, _summary(hosts, samples), INK, 12))
    title = f"{len(names)} cold pulls at once over links of {mbit_per_s:g} Mbit/s: one round"
    return document(title, _WIDTH, height, parts)


def _legend() -> list[str]:
    parts, x = [], float(_LEFT)
    for color, label in (
        (_START, "start, imports; end"),
        (_CONTROL, "control"),
        (ORIGIN, "a chunk from the origin"),
        (PEER, "a chunk from a peer; rate in"),
        (IDLE, "nothing is read"),
        (_UP, "rate out"),
    ):
        parts += [rectangle(x, 46, 14, 10, color), text(x + 20, 55, label, INK)]
        x += 40 + 6.6 * len(label)
    return parts


def _axis(x: Callable[[float], float], end_s: float, count: int) -> list[str]:
    bottom = _TOP + (2 + count) * _ROW
    parts = []
    for second in range(int(end_s) + 1):
        at = x(second)
        parts.append(
            f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="{INK}" stroke-opacity="0.3" '
            'stroke-width="0.6"/>'
        )
        parts.append(text(at, _TOP - 6, f"{second} s", INK, anchor="middle"))
    return parts


def _phases(host: _Host, x: Callable[[float], float], y: float, origin: str) -> list[str]:
    """Draw start, control, the reads in lanes, and when nothing is read."""

    def bar(begin_s: float, end_s: float, top: float, color: str) -> str:
        return rectangle(x(begin_s), top, max(x(end_s) - x(begin_s) - 0.6, 0.6), _LANE - 1, color)

    first_s, last_s = host.reads[0][1], max(read[2] for read in host.reads)
    parts = [
        bar(0.0, host.control_s, y, _START),
        bar(host.control_s, first_s, y, _CONTROL),
        bar(last_s, host.ended_s, y, _START),
    ]
    free = [first_s] * 3
    covered_s = first_s
    for peer, begin_s, end_s in host.reads:
        lane = min(range(len(free)), key=lambda number: (free[number] > begin_s, number))
        free[lane] = end_s
        parts.append(
            bar(begin_s, end_s, y + lane * _LANE, ORIGIN if peer.startswith(f"{origin}:") else PEER)
        )
        if begin_s > covered_s + 0.01:
            parts.append(bar(covered_s, begin_s, y, IDLE))
        covered_s = max(covered_s, end_s)
    return parts


def _rates(
    samples: Sequence[Any], zero_s: float, host: str, side: int
) -> list[tuple[float, float]]:
    """Return (time, bytes per second) of a link: what it carried from (0) or to (1) a host."""
    found, begin = [], 0
    for end in range(1, len(samples)):
        passed_s = samples[end][0] - samples[begin][0]
        if passed_s >= _WINDOW_S:
            moved = samples[end][1][host][side] - samples[begin][1][host][side]
            found.append((samples[end][0] - zero_s - passed_s / 2, moved / passed_s))
            begin = end
    return found


def _points(
    rates: Iterable[tuple[float, float]], x: Callable[[float], float], bottom: float, high: float
) -> str:
    return " ".join(f"{x(at_s):.1f},{bottom - high * rate:.1f}" for at_s, rate in rates)


def _area(
    rates: Sequence[tuple[float, float]],
    x: Callable[[float], float],
    bottom: float,
    high: float,
    full: float,
    color: str,
) -> str:
    inner = _points(rates, x, bottom, high / full)
    begin, end = x(rates[0][0]), x(rates[-1][0])
    return (
        f'<polygon points="{begin:.1f},{bottom} {inner} {end:.1f},{bottom}" fill="{color}" '
        'fill-opacity="0.3"/>'
    )


def _curve(
    rates: Sequence[tuple[float, float]],
    x: Callable[[float], float],
    bottom: float,
    high: float,
    full: float,
    color: str,
) -> str:
    inner = _points(rates, x, bottom, high / full)
    return f'<polyline points="{inner}" fill="none" stroke="{color}" stroke-width="1.3"/>'


def _processors(
    samples: Sequence[Any], zero_s: float, x: Callable[[float], float], y: float
) -> list[str]:
    busy, taken, servers, begin = [], [], [], 0
    for end in range(1, len(samples)):
        passed_s = samples[end][0] - samples[begin][0]
        if passed_s >= _WINDOW_S:
            at_s = samples[end][0] - zero_s - passed_s / 2
            both = zip(samples[begin][2], samples[end][2], strict=True)
            all_s, idle_s, taken_s = (after - before for before, after in both)
            busy.append((at_s, 1 - idle_s / max(all_s, 1e-9)))
            taken.append((at_s, taken_s / max(all_s, 1e-9)))
            used_s = sum(samples[end][3].values()) - sum(samples[begin][3].values())
            servers.append((at_s, used_s / max(all_s, 1e-9)))
            begin = end
    return [
        text(_LEFT - 10, y + 34, "cores", INK, 13, "end"),
        _area(busy, x, y + 58, 50, 1.0, _START),
        _area(servers, x, y + 58, 50, 1.0, ORIGIN),
        _area(taken, x, y + 58, 50, 1.0, IDLE),
        text(
            _LEFT + 4,
            y + 72,
            "part of all cores that is busy; of it origin and coordinator; taken by the hypervisor",
            INK,
        ),
    ]


def _summary(hosts: Mapping[str, _Host], samples: Sequence[Any]) -> str:
    count = len(hosts)
    used = sum(host.cpu_s for host in hosts.values()) / count
    hashed = sum(host.hashed_s for host in hosts.values()) / count
    messages = sum(host.messages for host in hosts.values()) / count
    answers = sorted(each for host in hosts.values() for each in host.answers_s) or [0.0]
    reads = sum(len(host.reads) for host in hosts.values()) / count
    servers = sum(samples[-1][3].values()) - sum(samples[0][3].values())
    return (
        f"By host: {used:.2f} s of CPU time, {hashed:.2f} s of it verifying; {messages:.0f} "
        f"messages for {reads:.0f} chunks, a slot after {1e3 * answers[len(answers) // 2]:.0f} ms "
        f"(median). Origin and coordinator: {servers:.2f} s of CPU time."
    )
