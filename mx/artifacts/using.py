"""Takes the set of compile caches that fits this process, before an engine starts.

Whatever comes from elsewhere may be wrong, late or missing: then the engine compiles as always, and
`Obtained.reasons` says why. Only what the caller got wrong himself is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mx import config
from mx.artifacts import caches, environment
from mx.artifacts.carry import Fetched, Listed, fetch_document, fetched, find
from mx.artifacts.document import COMPILE_CACHE
from mx.artifacts.private import check_private
from mx.artifacts.trust import Trust
from mx.artifacts.usage import Usage, Watch
from mx.core.reference import parse_reference
from mx.errors import ConfigError, MxError
from mx.log import event

log = logging.getLogger(__name__)

#: Documents that are fetched at most: others may list any number of sets.
_MOST_DOCUMENTS = 16
#: Differences that a reason names at most.
_MOST_DIFFERENCES = 8


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
            ~/.cache/mx/artifacts. Each set has a folder there, of its id. What is there already is
            not fetched again.
        fields: Fields of the environment that the caller knows, such as "configuration".
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        ConfigError: An argument is wrong, the trust file is malformed, or others may write to it
            or to `root`.
    """
    started_s = time.monotonic()
    name = parse_reference(model).name
    trusted = Trust.load(Path(trust))
    settings = settings or config.load()
    place = config.cache_folder() / "artifacts" if root is None else Path(root).absolute()
    check_private(place)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{place} can't be made: {error.strerror}", hint="name a folder of this user"
        ) from error
    check_private(place)
    run = _Run(name, trusted, place, dict(fields or {}), coordinator, settings)
    try:
        found = run.obtain()
    except ConfigError:
        raise
    except MxError as error:
        run.reasons.append(error.message)
        found = None
    signer, laid_out = ("", None) if found is None else (found[1], place / found[0])
    for reason in run.reasons:
        event(log, "artifacts.refused", model=name, reason=reason)
    return Obtained(
        "" if found is None else found[0],
        signer,
        laid_out,
        {} if laid_out is None else caches.variables(laid_out),
        tuple(run.reasons),
        time.monotonic() - started_s,
    )


class _Run:
    """One search for a set."""

    def __init__(
        self,
        model: str,
        trust: Trust,
        place: Path,
        fields: Mapping[str, str],
        coordinator: str | None,
        settings: config.Settings,
    ) -> None:
        self._model = model
        self._trust = trust
        self._place = place
        self._fields = fields
        self._coordinator = coordinator
        self._settings = settings
        self.reasons: list[str] = []

    def obtain(self) -> tuple[str, str] | None:
        """Return the id of the set that is laid out, and the name of its signer; None for none."""
        fitting = [each for each in map(self._fitting, self._listed()) if each is not None]
        for found, signer in sorted(
            fitting, key=lambda each: each[0].signed.document.created_s, reverse=True
        ):
            try:
                self._lay_out(found)
            except ConfigError:
                raise
            except MxError as error:
                self._say(found.signed.set_id, error.message)
            else:
                return found.signed.set_id, signer
        return None

    def _listed(self) -> list[Listed]:
        found = find(self._model, coordinator=self._coordinator, settings=self._settings)
        found = [each for each in found if each.kind == COMPILE_CACHE]
        if not found:
            self.reasons.append(f"no set of compile caches is listed for {self._model}")
        known = {key.hex() for key in self._trust.signers}
        # Those that claim to be of a known signer come first, so that others can't crowd them out.
        found.sort(key=lambda each: not any(key.startswith(each.signer) for key in known))
        if len(found) > _MOST_DOCUMENTS:
            self.reasons.append(
                f"only {_MOST_DOCUMENTS} of {len(found)} listed sets were asked for"
            )
        return found[:_MOST_DOCUMENTS]

    def _fitting(self, listed: Listed) -> tuple[Fetched, str] | None:
        """Return a set's document and signer, if he is trusted and the set is for here."""
        try:
            found = fetch_document(listed, coordinator=self._coordinator, settings=self._settings)
            signer = self._trust.check(found.signed, self._model, time.time())
        except MxError as error:
            self._say(listed.set_id, error.message)
            return None
        theirs = found.signed.document.environment
        ours = environment.here(theirs.get("engine", ""), self._fields, names=theirs)
        differ = environment.differences(ours, theirs)
        if differ:
            shown = [
                f"{each.field} is {each.first or 'absent'} here, {each.second} there"
                for each in differ[:_MOST_DIFFERENCES]
            ]
            self._say(listed.set_id, f"its environment differs: {'; '.join(shown)}")
            return None
        return found, signer

    def _lay_out(self, found: Fetched) -> None:
        folder, document = self._place / found.signed.set_id, found.signed.document
        if caches.is_whole(folder, document.cache_files, document.digests):
            return
        with (
            _staging(self._place, found.signed.set_id) as staging,
            fetched(
                found, staging, coordinator=self._coordinator, settings=self._settings
            ) as package,
        ):
            caches.lay_out(
                document.cache_files,
                lambda at: package.read(document.files[at].blob),
                folder,
                document.digests,
            )

    def _say(self, set_id: str, why: str) -> None:
        self.reasons.append(f"the set {set_id[:8]} is not used: {why}")


@contextlib.contextmanager
def _staging(place: Path, set_id: str) -> Iterator[Path]:
    """Give a path for a set that arrives: one that a later run goes on from, or one of this run
    alone while another process fetches the same set. A process that is stopped keeps none
    waiting."""
    with open(place / f".lock-{set_id}", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield place / f".arriving-{set_id}-{secrets.token_hex(8)}"
        else:
            yield place / f".arriving-{set_id}"


class Used:
    """A set in use: what `use` gives."""

    def __init__(self, obtained: Obtained) -> None:
        self.obtained = obtained
        self._watch = None if obtained.folder is None else Watch(obtained.folder)

    def report(self) -> Usage | None:
        """Return whether the engine has used the set so far: "used", "partly" or "unused", with
        counts; None if there is none."""
        return None if self._watch is None else self._watch.report()


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

    The arguments, and what they raise, are those of `obtain`. The environment variables of the
    caches are set in the block, and restored at its end. What the engine compiles anew is added to
    the same folder, for the next start on this host.

    Yields:
        What is used. Its `report` says at any time whether the engine did use it.
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
        try:
            yield used
        finally:
            usage = used.report()
            event(
                log,
                "artifacts.used",
                model=model,
                set=found.set_id,
                state="none" if usage is None else usage.state,
            )
