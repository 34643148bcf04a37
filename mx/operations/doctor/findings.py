"""What an examination finds, and what it looks at."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from pathlib import Path

from mx import config, discovery
from mx.api.common import transports
from mx.discovery import Topology
from mx.plugins import transport_context
from mx.transport import TlsFiles
from mx.wire.address import is_local, tls_of


class Level(enum.Enum):
    """How bad a finding is, the best first."""

    OK = "ok"  # as it should be
    NOTE = "note"  # something that this host lacks, and that nothing which was asked for needs
    WARNING = "warning"  # mx works, but slower than it could, less safely, or not for long
    FAILURE = "failure"  # stops what the settings ask for


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: what is so, and what to change (`fix`, "" for nothing).

    Settings and arguments are in backquotes. `check` is the name of the check that found it.
    """

    level: Level
    text: str
    fix: str = ""
    check: str = ""


def ok(text: str) -> Finding:
    """Return a finding of what is as it should be."""
    return Finding(Level.OK, text)


def note(text: str, fix: str = "") -> Finding:
    """Return a finding of what nothing needs."""
    return Finding(Level.NOTE, text, fix)


def warning(text: str, fix: str = "") -> Finding:
    """Return a finding of what works less well than it could."""
    return Finding(Level.WARNING, text, fix)


def failure(text: str, fix: str = "") -> Finding:
    """Return a finding of what does not work."""
    return Finding(Level.FAILURE, text, fix)


@dataclass(frozen=True)
class ExaminedHost:
    """What is examined: this process's host, by the settings.

    Attributes:
        settings: The settings.
        root: The folder that absolute paths start at.
        now_s: The time, in seconds since 1970.
    """

    settings: config.Settings
    root: Path = field(default=Path("/"))
    now_s: float = 0.0

    @property
    def coordinators(self) -> tuple[str, ...]:
        """The coordinators' addresses."""
        return tuple(each.strip() for each in self.settings.coordinator.split(","))

    @property
    def remote(self) -> tuple[str, ...]:
        """The addresses of those coordinators that are beyond this machine."""
        return tuple(each for each in self.coordinators if not is_local(each))

    @property
    def tls(self) -> TlsFiles | None:
        """The certificates that the settings name, or None."""
        return tls_of(self.settings)

    @functools.cached_property
    def topology(self) -> Topology:
        """The machine, with each transport's probe; CUDA is not started.

        Raises:
            ConfigError: The settings name an interface that is not there.
        """
        known = {**transports(), **transport_context(self.settings).broken}
        return discovery.topology(known, nics=self.settings.nics)

    def text(self, path: str) -> str:
        """Return the content of a small file, without outer spaces; "" if it can't be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
