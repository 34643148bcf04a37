"""Every error that mx raises on purpose. Each says whose fault it is, and what to do.

There are five families, by fault: the source's (`SourceError`), this process's or machine's
(`LocalError`), the coordinator's (`CoordinatorError`), the bytes' (`IntegrityError`), the
caller's (`ConfigError`). Commands exit with an error's `exit_code`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping
from types import FrameType, MappingProxyType

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
    """The base of all errors. `hint` is one line that says what the user can do, or ""; `details`
    are what a program may want to know besides, by name."""

    exit_code = EXIT_OTHER
    details: Mapping[str, object] = MappingProxyType({})

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks show: where the user's code called mx, and
        the error. (They ask for a method of this name.)"""
        frames = []
        for frame, line in traceback.walk_tb(self.__traceback__):
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if package in _OWN:
                break
            if package != "IPython":
                frames.append((frame, line))
        shown = traceback.StackSummary.extract(iter(frames)).format()
        hint = [f"  {self.hint}"] if self.hint else []
        return [
            *(line.rstrip("\n") for line in shown),
            f"{type(self).__name__}: {self.message}",
            *hint,
        ]


def install_hint(extra: str, *others: str) -> str:
    """Return how to install an extra of mx.

    Args:
        extra: The extra's name.
        others: Extras that do as well.
    """
    instead = "".join(f" or '.[{each}]'" for each in others)
    return f"in a clone of mx: pip install '.[{extra}]'" + instead


def another(error: MxError) -> MxError:
    """Return a copy of an error, with its cause and its traceback so far.

    The copy can be raised elsewhere: the traceback of an object that is raised repeatedly grows
    each time.
    """
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


def release_frames(error: BaseException | None) -> None:
    """Release what the frames of mx hold in the tracebacks of an error and its causes, above all
    views of a model's memory.

    The tracebacks still show where the error was raised, and the callers' frames stay. Call this
    only after the work that raised the error has ended: it closes a suspended coroutine of mx that
    is part of such a traceback.
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
            while frame is not None:  # a frame refers to its callers too
                if str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN:
                    # A frame that is still executing cannot be cleared.
                    with contextlib.suppress(RuntimeError):
                        frame.clear()
                frame = frame.f_back
            trace = trace.tb_next


class ConfigError(MxError):
    """The caller's request is not possible: a bad flag, address, path or combination."""

    exit_code = EXIT_CONFIG


class LocalError(MxError):
    """This process or machine failed: memory, disk, descriptors, a busy port."""


class CapacityError(LocalError):
    """A limit is reached, or memory or disk is too small for the model; raised before anything is
    allocated if possible."""


class UnsuitedError(LocalError):
    """A transport is not for memory where this is, and others are."""


class ForkError(LocalError):
    """This process was forked from one in which mx was running, so it cannot use mx."""


class OutputError(LocalError):
    """`--out` could not be written; partial files have been removed."""


class CoordinatorError(MxError):
    """The coordinator did not answer, or refused."""

    exit_code = EXIT_NO_SOURCE


class CoordinatorVersionError(CoordinatorError):
    """The coordinator speaks other versions than this process; the message names both."""


class UnknownModelError(CoordinatorError):
    """No such model, revision or variant is registered."""


class BundleIncompleteError(CoordinatorError):
    """Not every rank of a bundle is served. `missing` has the variants of those that are not."""

    def __init__(self, message: str, *, hint: str = "", missing: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class UnknownSourceError(CoordinatorError):
    """No such source is registered: its lease ended, the coordinator restarted, or it never was."""


class BindingError(CoordinatorError):
    """The name and revision belong to another identity (or another registrant)."""

    exit_code = EXIT_NOT_ALLOWED


class UnsettledError(BindingError):
    """The coordinator can't say yet whose the name is: its state has lost some. It will within a
    minute."""


class NotAllowedError(CoordinatorError):
    """A credential, certificate or policy forbids it."""

    exit_code = EXIT_NOT_ALLOWED


class SourceError(MxError):
    """A peer's fault. `peer` names it (HOST:PORT, or "" if unknown)."""

    exit_code = EXIT_NO_SOURCE

    def __init__(self, message: str, *, peer: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.peer = peer


class NoSourceError(SourceError):
    """No reachable source holds the model; the message lists what was tried and why it failed."""


class PeerLostError(SourceError):
    """The peer died, closed or reset the connection."""


class PeerTimeoutError(SourceError):
    """The peer made no progress within the deadline: it is stopped, overloaded or cut off."""


class PathSlowError(SourceError):
    """The path works, but was given up: the other paths finish its work much sooner."""


class ChunkElsewhereError(PathSlowError):
    """What is read over the path was requested elsewhere: neither path nor peer did wrong."""


class PathError(SourceError):
    """One path to the peer does not work here: a driver's call, peer access, a registration or an
    export failed. The message names the path; others to the same peer may work."""


class LocalPathError(PathError, LocalError):
    """A path does not work since this process or machine failed, such as its own GPU."""

    exit_code = EXIT_OTHER


class PeerProtocolError(SourceError):
    """The peer sent something that the protocol does not allow."""


class PeerVersionError(SourceError):
    """The peer speaks other versions than this process; the message names both."""


class PeerRefusedError(SourceError):
    """The source refused: a wrong secret, a revoked grant, draining, an out-of-range request."""

    exit_code = EXIT_NOT_ALLOWED


class PeerUntrustedError(PeerRefusedError):
    """No secure connection to the source is possible, since its certificate or ours is wrong; or
    its policy does not let ours pull."""


class PeerBusyError(SourceError):
    """The source has no place for this reader, or has taken its place back since it read nothing
    for long. Retry after `retry_after_s`."""

    def __init__(
        self, message: str, *, peer: str = "", hint: str = "", retry_after_s: float = 0.5
    ) -> None:
        super().__init__(message, peer=peer, hint=hint)
        self.retry_after_s = retry_after_s


class StaleGenerationError(SourceError):
    """The source's memory has changed since the read was planned."""


class SourceChangedError(StaleGenerationError):
    """The source's own process has written to the memory that it serves, and serves it no more."""


class StoreError(SourceError):
    """A hub or an object store does not answer, refuses, or breaks off. `peer` names it."""


class RevisionChangedError(SourceError):
    """A pull that follows its model went over to a newer revision: layers that were ready are not
    any more, and become ready again."""

    exit_code = EXIT_INCOMPLETE


class ClosedError(LocalError):
    """The session, exposure or pull was closed by this process before the work was done."""


class IntegrityError(MxError):
    """Bytes or a document do not match their digest, or a checkpoint is malformed."""

    exit_code = EXIT_INTEGRITY


class CheckpointError(IntegrityError):
    """A checkpoint on disk is truncated, malformed or hostile. The message says file and place."""


class ManifestError(IntegrityError):
    """A manifest document is malformed, contradicts itself, or is not the announced one."""


class DigestError(IntegrityError):
    """A chunk, tensor or document does not match its digest. `peer` names its sender."""

    def __init__(self, message: str, *, peer: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.peer = peer


class IncompleteError(SourceError):
    """A pull ended before every layer was ready; the message says how far it came."""

    exit_code = EXIT_INCOMPLETE


class SupersededError(IncompleteError):
    """What a name meant when a pull began can't be obtained whole any more, and what it means now
    can."""


class ArtifactError(IntegrityError):
    """A set of artefacts is malformed, or its bytes are not what its document says."""


class SignerError(IntegrityError):
    """The trust file does not let this signer sign sets for this model."""

    exit_code = EXIT_NOT_ALLOWED
