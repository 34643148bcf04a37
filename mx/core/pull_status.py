"""What a pull reports to the coordinator of its progress. Pure."""

from __future__ import annotations

import enum
from typing import NamedTuple

from mx.core.types import ModelKey


class PullPhase(enum.Enum):
    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"


class PullStatus(NamedTuple):
    """The progress of one pull.

    `ready` is a bit set: bit i is layer i. `sources` are the HOST:PORT that it reads from now.
    `seconds` is the time since it began, `gb_per_s` its recent rate. With `requests_port` its
    process takes an engine's requests at that port of `requests_host`. `measured_host` is what the
    coordinator knows it by, where its rate is a measurement; "" where it is none.
    """

    pull_id: str
    model: ModelKey
    host: str
    pid: int
    phase: PullPhase
    layers: int
    ready: int
    nbytes: int
    done_bytes: int
    seconds: float
    sources: tuple[str, ...] = ()
    retries: int = 0
    gb_per_s: float = 0.0
    requests_port: int = 0
    requests_host: str = ""
    measured_host: str = ""

    @property
    def requests(self) -> str:
        """The HOST:PORT at which its process takes an engine's requests; "": at none."""
        host, port = self.requests_host, self.requests_port
        if not host or not port:
            return ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def layers_ready(self) -> int:
        """The number of ready layers."""
        return self.ready.bit_count()
