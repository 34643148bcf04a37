"""Every error that mx raises on purpose, each saying whose fault it was and what to do.

The five families are whose fault: the source's (`SourceError`), this process's or machine's
(`LocalError`), the coordinator's (`CoordinatorError`), the bytes' (`IntegrityError`), the
caller's (`ConfigError`). `exit_code` is what the commands end with.
"""

from __future__ import annotations

import contextlib
from types import FrameType

#: Whose frames `release_frames` may clear.
_OWN = ("mx", "mx_transports")

EXIT_OK = 0
EXIT_OTHER = 1
EXIT_CONFIG = 2
EXIT_NO_SOURCE = 3
EXIT_INTEGRITY = 4
EXIT_NOT_ALLOWED = 5
EXIT_INCOMPLETE = 6


class MxError(Exception):
    """Base of all. `hint` is one line that says what the user can do about it, or ""."""

    exit_code = EXIT_OTHER

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def another(error: MxError) -> MxError:
    """Return an error like this one, with its cause and its traceback so far, to be raised beside
    it: an object that is raised again and again has a traceback that grows each time."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


def release_frames(error: BaseException | None) -> None:
    """Let the tracebacks of an error, and of what it came from, keep nothing that mx has: views of
    a model's memory above all. Where it was raised they still say, and the callers' frames stay.

    Only once the work that raised it has ended: a coroutine of mx's that is yet to go on, and is in
    such a traceback, would be closed.
    """
    seen = set()
    left = [error]
    while left:
        error = left.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        left += [error.__cause__, error.__context__]
        trace = error.__traceback__
        while trace is not None:
            frame: FrameType | None = trace.tb_frame
            while frame is not None:  # it keeps those that called it too
                if str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN:
                    # One that is still being executed needs what it has.
                    with contextlib.suppress(RuntimeError):
                        frame.clear()
                frame = frame.f_back
            trace = trace.tb_next


class ConfigError(MxError):
    """What the caller asked for can't be done: a bad flag, address, path or combination."""

    exit_code = EXIT_CONFIG


class LocalError(MxError):
    """This process or machine could not: memory, disk, descriptors, a busy port."""


class CapacityError(LocalError):
    """Too little memory or disk for the model; said before anything is allocated if possible."""


class ForkError(LocalError):
    """This process was forked from one in which mx was running, and can't use mx itself."""


class OutputError(LocalError):
    """`--out` could not be written; what was begun has been removed."""


class CoordinatorError(MxError):
    """The coordinator did not answer, or refused."""

    exit_code = EXIT_NO_SOURCE


class UnknownModelError(CoordinatorError):
    """No such model, revision or variant is registered."""


class UnknownSourceError(CoordinatorError):
    """No such source is registered (any more): its lease ended, or the coordinator restarted."""


class BindingError(CoordinatorError):
    """The name and revision belong to another identity (or another registrant)."""

    exit_code = EXIT_NOT_ALLOWED


class NotAllowedError(CoordinatorError):
    """A credential, certificate or policy forbids it."""

    exit_code = EXIT_NOT_ALLOWED


class SourceError(MxError):
    """A peer's fault. `peer` names it (HOST:PORT, or "" where unknown)."""

    exit_code = EXIT_NO_SOURCE

    def __init__(self, message: str, *, peer: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.peer = peer


class NoSourceError(SourceError):
    """Nobody that can be reached holds the model; lists what was tried and why it failed."""


class PeerLostError(SourceError):
    """The peer died, closed or reset the connection."""


class PeerTimeoutError(SourceError):
    """The peer is there but made no progress within the deadline (stopped, clogged, cut off)."""


class PathSlowError(SourceError):
    """The path works, but the others would do its work long before it: it was given up."""


class PathError(SourceError):
    """One way to the peer does not work here: a driver's call, peer access, a registration or an
    export failed. The message names the way; others to the same peer may well work."""


class PeerProtocolError(SourceError):
    """The peer said something that the protocol does not allow."""


class PeerRefusedError(SourceError):
    """The source refused: wrong secret, revoked grant, draining, out-of-range request."""

    exit_code = EXIT_NOT_ALLOWED


class PeerUntrustedError(PeerRefusedError):
    """There is no secure connection to the source: its certificate, or ours there, is wrong."""


class PeerBusyError(SourceError):
    """The source has as many readers as it admits. It may be asked again after `retry_after_s`."""

    def __init__(
        self, message: str, *, peer: str = "", hint: str = "", retry_after_s: float = 0.5
    ) -> None:
        super().__init__(message, peer=peer, hint=hint)
        self.retry_after_s = retry_after_s


class StaleGenerationError(SourceError):
    """The source's memory has changed since the read was planned."""


class ClosedError(LocalError):
    """The session, exposure or pull was closed by this process before the work was done."""


class IntegrityError(MxError):
    """Bytes or a document do not match their digest, or a checkpoint is malformed."""

    exit_code = EXIT_INTEGRITY


class CheckpointError(IntegrityError):
    """A checkpoint on disk that is not one: truncated, malformed, hostile. Says file and place."""


class ManifestError(IntegrityError):
    """A manifest document that is malformed, contradicts itself, or is not what was promised."""


class DigestError(IntegrityError):
    """A chunk, tensor or document whose digest differs. `peer` names who sent it."""

    def __init__(self, message: str, *, peer: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.peer = peer


class IncompleteError(SourceError):
    """A pull that ended before every layer was ready; the message says how far it came."""

    exit_code = EXIT_INCOMPLETE
