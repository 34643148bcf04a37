"""Takes the set of compile caches that fits this process, before an engine starts.

Sets may be wrong, late or missing: then the engine compiles as always, and `Obtained.reasons` says
why. Only the caller's own mistakes are errors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mx import config
from mx.artifacts import caches
from mx.artifacts.carry import FetchedDocument, fetched
from mx.artifacts.choosing import Search
from mx.artifacts.document import COMPILE_CACHE
from mx.artifacts.usage import CacheWatch, Usage
from mx.errors import ConfigError, MxError, OutputError
from mx.log import event
from mx.private import private_folder
from mx.storage.locks import Lock

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Obtained:
    """A set that is laid out, or why there is none.

    Attributes:
        set_id: The set's id, "" if there is none.
        signer: The name of its signer in the trust file.
        folder: Where it is laid out; None if there is none. An engine may add to it.
        variables: The environment variables with which an engine uses it.
        reasons: Why other sets, or all, are not used: one line each.
        seconds: How long this took.
    """

    set_id: str = ""
    signer: str = ""
    folder: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    reasons: Sequence[str] = ()
    seconds: float = 0.0


def obtain(
    model: str,
    *,
    trust: str | Path,
    root: str | Path | None = None,
    fields: Mapping[str, str] | None = None,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> Obtained:
    """Find the newest set of compile caches for this model and environment by a trusted signer,
    fetch it, and lay it out.

    Args:
        model: The model's name, as for `mx.pull`.
        trust: The trust file.
        root: A folder that only this user may write to, made if it is missing; None takes
            ~/.cache/mx/artifacts. Each set has a folder there, named by its id, and is fetched
            once.
        fields: Fields of the environment that the caller knows, such as "configuration".
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Returns:
        The set and its folder, or why there is none.

    Raises:
        ConfigError: An argument is wrong, the trust file is malformed, or others may write to it
            or to `root`.
    """
    started_s = time.monotonic()
    search = Search(
        model,
        COMPILE_CACHE,
        trust=trust,
        fields=fields,
        coordinator=coordinator,
        settings=settings,
    )
    place = private_folder(config.cache_folder() / "artifacts" if root is None else Path(root))
    laid_out: tuple[str, str] | None = None
    for choice in search.choices():
        set_id = choice.found.signed.set_id
        try:
            _lay_out(search, choice.found, place)
        except ConfigError:
            raise
        except MxError as error:
            search.refuse(set_id, error.message)
        else:
            laid_out = set_id, choice.signer
            break
    for reason in search.reasons:
        event(log, "artifacts.refused", model=search.model, reason=reason)
    reasons, seconds = tuple(search.reasons), time.monotonic() - started_s
    if laid_out is None:
        return Obtained(reasons=reasons, seconds=seconds)
    folder = place / laid_out[0]
    return Obtained(*laid_out, folder, caches.variables(folder), reasons, seconds)


def _lay_out(search: Search, found: FetchedDocument, place: Path) -> None:
    folder, document = place / found.signed.set_id, found.signed.document
    if caches.is_whole(folder, document.cache_files, document.digests):
        return
    with (
        staging(place, found.signed.set_id) as arriving,
        fetched(
            found, arriving, coordinator=search.coordinator, settings=search.settings
        ) as package,
    ):
        caches.lay_out(
            document.cache_files,
            lambda at: package.read(document.files[at].blob),
            folder,
            document.digests,
        )


@contextlib.contextmanager
def staging(place: Path, set_id: str) -> Iterator[Path]:
    """Yield a path for an arriving set, for this run alone. A later run goes on with what this one
    leaves. A process that is stopped keeps no other waiting.

    Raises:
        OutputError: `place` can't be written.
    """
    with contextlib.ExitStack() as held:
        try:
            slot = next(n for n in itertools.count() if _locked(place, f"{set_id}-{n}", held))
        except OSError as error:
            raise OutputError(f"{place} could not be written: {error.strerror}") from error
        arriving = place / f".arriving-{set_id}-{slot}"
        # Whole already: its process was killed while it read it.
        shutil.rmtree(arriving, ignore_errors=True)
        yield arriving


def _locked(place: Path, name: str, held: contextlib.ExitStack) -> bool:
    lock = held.enter_context((place / f".lock-{name}").open("ab"))
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        taken = Lock(lock.fileno(), f".claim-{name}", folder)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    held.callback(taken.release)
    return True


class Used:
    """A set in use, as `use` yields it."""

    def __init__(self, obtained: Obtained) -> None:
        self.obtained = obtained
        self._watch = None if obtained.folder is None else CacheWatch(obtained.folder)

    def report(self) -> Usage | None:
        """Return whether the engine has used the set so far: "used", "partly" or "unused", with
        counts; None if there is none."""
        return None if self._watch is None else self._watch.report()


@contextlib.contextmanager
def _inductor(variables: Mapping[str, str]) -> Iterator[None]:
    """Set in Inductor, if it is imported already, what it otherwise reads from the environment at
    its import.

    The setting is part of the keys by which Inductor finds compiled code. Each thread has its own.
    """
    loaded = sys.modules.get("torch._inductor.config")
    headers = variables.get(caches.PRECOMPILED_HEADERS)
    if loaded is None or headers is None:
        yield
        return
    with loaded.patch(cpp_cache_precompile_headers=headers == "1"):
        yield


@contextlib.contextmanager
def use(
    model: str,
    *,
    trust: str | Path,
    root: str | Path | None = None,
    fields: Mapping[str, str] | None = None,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> Iterator[Used]:
    """Let the engine that starts in the block, here or in child processes, use compile caches that
    were shipped for a model.

    The environment variables of the caches are set in the block, and restored at its end. What the
    engine compiles anew is added to the same folder, for the next start on this host.

    Args:
        model: As for `obtain`, as are all others.
        trust: The trust file.
        root: A folder for sets.
        fields: Fields of the environment.
        coordinator: HOST:PORT.
        settings: Settings to use.

    Raises:
        ConfigError: As `obtain`.

    Yields:
        The set in use. Its `report` returns at any time whether the engine has used it.
    """
    found = obtain(
        model, trust=trust, root=root, fields=fields, coordinator=coordinator, settings=settings
    )
    with contextlib.ExitStack() as using:
        if found.folder is not None:
            try:
                using.enter_context(caches.hold(found.folder))
            except OSError as error:  # another process has put it right just now
                found = Obtained(reasons=[*found.reasons, f"{found.folder}: {error.strerror}"])
        used = Used(found)
        using.enter_context(config.environment(found.variables))
        using.enter_context(_inductor(found.variables))
        try:
            yield used
        finally:
            try:
                usage = used.report()
            except OSError:  # the folder was removed: what the block raises is more important
                usage = None
            event(
                log,
                "artifacts.used",
                model=model,
                set=found.set_id,
                state="none" if usage is None else usage.state,
            )
