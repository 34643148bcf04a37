"""Where a process and its memory are: as much as decides which transports can reach it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class Place:
    """One process's whereabouts, as registered and compared by transports' `reach`.

    `boot_id` names the running kernel; namespaces are inode numbers; `pid` and
    `pid_start_ticks` (field 22 of /proc/PID/stat) name the process beyond pid reuse.
    `addresses` are the IP addresses its data endpoints listen on. `device` is "cpu" or
    "cuda:UUID".
    """

    boot_id: str = ""
    hostname: str = ""
    uid: int = -1
    pid: int = 0
    pid_start_ticks: int = 0
    pid_namespace: int = 0
    net_namespace: int = 0
    user_namespace: int = 0
    device: str = "cpu"
    addresses: tuple[str, ...] = ()

    @property
    def same_host_key(self) -> tuple[str, int, int]:
        """Equal for two processes that share a kernel, a network and a process namespace."""
        return (self.boot_id, self.net_namespace, self.pid_namespace)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Place:
        """Read what `to_json` wrote, unknown keys ignored. Raises ValueError if malformed."""
        data = json.loads(text or "{}")
        if not isinstance(data, dict):
            raise ValueError("a place is a JSON object")
        known = {f.name: f.default for f in fields(cls)}
        values: dict[str, object] = {}
        for name, value in data.items():
            if name not in known:
                continue
            if name == "addresses":
                if not isinstance(value, list) or not all(isinstance(a, str) for a in value):
                    raise ValueError("addresses must be a list of strings")
                value = tuple(value)
            elif type(value) is not type(known[name]):
                raise ValueError(f"{name} has the wrong type")
            values[name] = value
        return cls(**values)  # type: ignore[arg-type]
