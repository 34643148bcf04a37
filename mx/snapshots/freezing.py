"""`freeze`: writes what processes hold of a model to a snapshot, all ranks at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx import config, namekey, packs, users
from mx.api.arguments import PullArguments
from mx.api.common import check_type, variant_text
from mx.api.holding import lend
from mx.api.listing import list_sources
from mx.api.options import pull_options
from mx.api.pulling import begin
from mx.api.serving import serve_held
from mx.api.source import Source
from mx.core.reference import ModelReference, parse_reference
from mx.core.revisions import MAIN
from mx.core.types import CHECKPOINT, ModelKey
from mx.core.variant import ProcessingKey, members_of
from mx.errors import (
    BundleIncompleteError,
    ConfigError,
    UnknownModelError,
)
from mx.fleet import list_bundles
from mx.snapshots.container import (
    FILES,
    KV,
    SNAPSHOT,
    RankWriter,
    Snapshot,
    bundle_of,
    folder_of,
    read,
    read_rank,
)
from mx.snapshots.signing import signed
from mx.storage.folders import sync_entries
from mx.storage.locks import flock
from mx.storage.osfile import write_error
from mx.text import listed
from mx.units import parse_bytes

if TYPE_CHECKING:
    from mx.api.target import Pull
    from mx.core.answers import BundleStatus
    from mx.fetching.report import PullReport

#: What a freeze has in its folder.
_PARTIAL, _ALL_RANKS = f".{SNAPSHOT}.mx-partial", ".mx-freezing"
_RANK = re.compile(r"rank\d+|\.rank\d+\.mx-partial", re.ASCII)
#: Seconds between two questions for sources that are waited for.
_ASK_AGAIN_S = 0.5
#: What `source` may be.
PEER, ENGINE = "peer", "engine"
#: What waits for the pull of a rank.
Wait = Callable[["Pull", ModelKey], "PullReport"]


@dataclass(frozen=True)
class FreezeReport:
    """What `freeze` did. `bytes` were written now, in `seconds`; `kept` ranks were there already.
    `complete` is False while other ranks are still missing: then there is no snapshot yet. `signed`
    is True if the snapshot has the signature of this user's key. `pins` are those of all ranks, in
    order, once it is complete. `kv_blocks` were written now, too."""

    folder: str
    model: str
    ranks: int
    kept: int
    bytes: int
    seconds: float
    complete: bool
    signed: bool
    pins: tuple[str, ...] = ()
    kv_blocks: int = 0


@dataclass(frozen=True)
class _Asked:
    """One rank that is to be frozen."""

    number: int
    key: ModelKey
    identity: str


def freeze(
    what: str | Source | Any,
    folder: str | Path,
    *,
    model: str = "",
    revision: str = "",
    variant: str | ProcessingKey = "",
    source: str = PEER,
    coordinator: str | None = None,
    transport: str | None = None,
    kv_bytes: int | str = 0,
    settings: config.Settings | None = None,
    wait: Wait = lambda pull, key: pull.wait(),
) -> FreezeReport:
    """Write a model to a snapshot: a folder that `mx.pull(source="snapshot")`, `mx thaw` and
    engines start from. Blocks.

    Every block is verified before it counts as written, and `snapshot.json` is written last: a
    folder without it is no snapshot. A run that was ended goes on from what it has written when it
    is called again. What is written is of one revision: if the weights change meanwhile, it fails.

    Args:
        what: NAME, NAME:REVISION or NAME@PIN: all ranks are taken from the processes that hold
            them, at the same time. Or what this process holds: a `Source`, such as an engine's, or
            a module or state dict with `model`: one rank, which is a snapshot together with the
            other ranks once the last one was written, by whichever process.
        folder: The folder to make; it becomes readable by this user alone.
        model: The name of a module or a state dict.
        revision: The revision, where `what` or `model` names none.
        variant: The variant, or a bundle's; if empty, the checkpoint, or the only one there is.
        source: Which variants of a name are meant: "peer" for all that are listed, "engine" for
            those that are no checkpoint: what the engine of a replica holds.
        coordinator: HOST:PORT; None takes the address in the settings.
        transport: The name of the only transport to use.
        kv_bytes: How many bytes of KV blocks each rank may have written, too, such as "2GiB": those
            of the prompts that were of use last. They are taken from the pools of the processes
            that serve the model, or from this process's where `what` is what it holds.
        settings: Settings to use; None loads them from the environment and the files.
        wait: Called with each pull and what it is of; returns its report.

    Returns:
        What was written.

    Raises:
        ConfigError: An argument is wrong, the folder is in use or holds something else; there are
            no KV blocks, or they are not for this user's key; or the name is another owner's, and
            no pin says what it is: then nothing could vouch for it.
        BundleIncompleteError: A rank has no source.
        CapacityError, OutputError: The disk is full, or fails.
        MxError: As `mx.pull`.
    """
    settings = settings or config.load()
    where = Path(folder)
    if source not in (PEER, ENGINE) or (source == ENGINE and not isinstance(what, str)):
        raise ConfigError(
            f"`source={source}` does not say what to freeze",
            hint=f"it is {PEER} or {ENGINE}; {ENGINE} is for a name",
        )
    if not isinstance(what, str | Source):
        check_type("model", model, str, "it is NAME or NAME:REVISION")
        named = parse_reference(model, revision=revision, variant=variant_text(variant))
        key = ModelKey(named.name, named.revision or MAIN, named.variant or CHECKPOINT)
        with serve_held(lend(what, key), None, settings, live=True) as held:
            how: dict[str, Any] = {"transport": transport, "kv_bytes": kv_bytes, "wait": wait}
            return freeze(held, folder, settings=settings, **how)
    endpoints: set[str] | None = None
    asked: PullArguments = {"transport": transport, "companions": False}
    if isinstance(what, Source):
        key, may_sign = what.model, True
        members = list(members_of(bundle_of(key.variant)))
        ranks = [_Asked(members.index(key.variant), key, what.identity_hex)]
        asked["peer"] = what.endpoint
    else:
        asked["coordinator"] = coordinator or settings.coordinator
        named = parse_reference(what, revision=revision, variant=variant_text(variant))
        until_s = time.monotonic() + settings.wait_s
        while True:
            try:
                ranks, may_sign, endpoints = _listed(named, source, asked["coordinator"], settings)
                break
            except (UnknownModelError, BundleIncompleteError):
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_ASK_AGAIN_S)
        members = [each.key.variant for each in ranks]
    began_s = time.monotonic()
    with _prepared(where), _alone(where) if len(ranks) > 1 else contextlib.nullcontext():
        left = [each for each in ranks if not _is_there(where, each)]
        # First: what is wrong with them is said at once.
        kv_blocks = _kv_frozen(ranks[0].key.name, where, kv_bytes, endpoints, transport, settings)
        reports = _pulled(left, where, asked, settings, wait)
        snapshot = _finished(where, ranks[0].key, members, settings if may_sign else None)
    paths = [path for each in reports for path in each.paths]
    resumed = [path.bytes for path in paths if path.transport == "resume"]
    return FreezeReport(
        str(where),
        str(ranks[0].key._replace(variant=bundle_of(ranks[0].key.variant))),
        len(members),
        len(ranks) - len(left),
        sum(each.bytes for each in reports) - sum(resumed),
        time.monotonic() - began_s,
        snapshot is not None,
        snapshot is not None and snapshot.signature is not None,
        () if snapshot is None else tuple(each.pin for each in snapshot.ranks),
        kv_blocks,
    )


def _kv_frozen(
    name: str,
    folder: Path,
    kv_bytes: int | str,
    endpoints: set[str] | None,
    transport: str | None,
    settings: config.Settings,
) -> int:
    """Write KV blocks of a model, of these sources' processes or of this one; return how many."""
    try:
        budget_bytes = parse_bytes(str(kv_bytes))
    except ValueError as error:
        raise ConfigError(f"KV blocks: {error}") from error
    if not budget_bytes:
        return 0
    write = packs.optional("mx.kv.freezing:freeze_blocks")
    if write is None:
        raise ConfigError("KV blocks need the pack mx.kv", hint="install mx as a whole")
    found: int = write(
        name,
        folder / KV,
        budget_bytes,
        endpoints=endpoints,
        transport=transport,
        settings=settings,
    )
    return found


def _listed(
    named: ModelReference, source: str, coordinator: str | None, settings: config.Settings
) -> tuple[list[_Asked], bool, set[str]]:
    """Return all ranks of what a name means, whether this user's key is of their owner, and the
    addresses of all sources of that revision."""
    found = list_bundles(named.name, coordinator=coordinator, settings=settings)
    bundle = _bundle(named, found, source)
    records: dict[str, list[Any]] = {}
    for status in list_sources(named.name, coordinator=coordinator, settings=settings):
        model = status.record.model
        if model.revision == bundle.revision and not status.record.pin_only:
            records.setdefault(model.variant, []).append(status.record)
    if bundle.missing:
        raise BundleIncompleteError(
            f"{bundle} has {bundle.missing_count} of {bundle.ranks} ranks that no source serves: "
            f"{listed(bundle.missing)}",
            hint="freeze it while all of its ranks are served",
        )
    ranks, key, vouched = [], namekey.load(settings), True
    for number, variant in enumerate(bundle.variants):
        held = [each for each in records.get(variant, ()) if each.ref.pinned_by(named.pin)]
        if not held:
            raise UnknownModelError(
                f"no source holds {named.pinned_name} as [{variant}]", hint="mx models lists them"
            )
        own = [each for each in held if key.vouched(each)]
        vouched = vouched and bool(own)
        model = ModelKey(named.name, bundle.revision, variant)
        ranks.append(_Asked(number, model, (own or held)[0].ref.identity.hex()))
    if not vouched and not named.pin:
        pin = f"{named.name}@{ranks[0].identity}"
        raise ConfigError(
            f"{bundle} is another owner's, as far as this user's key can tell, and no pin says "
            "which weights it is to be",
            hint=f"freeze {pin}, or where its owner's key is (`name_key`)"
            if len(ranks) == 1
            else "freeze it where its owner's key is (`name_key`, `lender_key`)",
        )
    return ranks, vouched, {each.endpoint for held in records.values() for each in held}


def _bundle(named: ModelReference, found: list[BundleStatus], source: str) -> BundleStatus:
    """Return what a name means. Raises ConfigError."""
    wanted = bundle_of(named.variant) if named.variant else ""
    current = [
        each
        for each in found
        if (each.revision == named.revision if named.revision else named.pin or each.named)
        and wanted in ("", each.variant)
        and (source == PEER or each.variant != CHECKPOINT)
    ]
    usual = [each for each in current if each.variant == CHECKPOINT]
    for choice in (usual, current):
        if len(choice) == 1:
            if named.pin and choice[0].ranks > 1:
                raise ConfigError("a pin is of one rank", hint="leave out the pin")
            return choice[0]
    if not current and source == ENGINE:
        raise UnknownModelError(
            f"no replica of {named.name} lends what its engine holds"
            + (f" as [{named.variant}]" if named.variant else ""),
            hint="load a replica through mx, with `lend` (vLLM: load format `mx-peer`; SGLang: "
            "option `mx_peer`); its log says what it lends, or why nothing (engine.lending, "
            "engine.not_lent)",
        )
    if not current:
        raise UnknownModelError(
            f"no source of {named.name} is listed as asked for", hint="mx models lists them"
        )
    raise ConfigError(
        f"{named.name} has several variants: {listed([str(each) for each in current])}",
        hint="name one of them with `variant`",
    )


# -- the folder -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _prepared(folder: Path) -> Iterator[None]:
    """Have a folder for a snapshot, and remove it after a failure that leaves nothing in it."""
    try:
        os.makedirs(folder.absolute().parent, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if os.path.exists(folder / SNAPSHOT):
            raise ConfigError(
                f"{folder} is a snapshot of {read(folder).key(0)} already",
                hint="name another folder, or first move that away",
            )
        names = set(os.listdir(folder))
        strange = [each for each in names if not _is_ours(each)]
        if strange or not users.is_own(os.stat(folder).st_uid, folder):
            why = f"holds {listed(sorted(strange))}" if strange else "is another user's"
            raise ConfigError(f"{folder} {why}", hint="name a folder that is not there yet")
        os.chmod(folder, 0o700)
    except OSError as error:
        raise write_error(error, folder) from error
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # something is kept there
            os.rmdir(folder)
        raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time write all ranks: else each of two may have a rank that the other
    one is to write, and both are refused. Raises ConfigError: another one does."""
    path = folder / _ALL_RANKS
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise write_error(error, path) from error
    try:
        try:
            flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another mx is writing {folder} right now",
                hint="wait for it, stop it, or name another folder",
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def _is_ours(name: str) -> bool:
    return name in (FILES, KV, _PARTIAL, _ALL_RANKS) or bool(_RANK.fullmatch(name))


def _is_there(folder: Path, rank: _Asked) -> bool:
    """Return True if an earlier run has written a rank. Raises ConfigError if another is there."""
    found = read_rank(folder_of(folder, rank.number))
    if found is None:
        return False
    key, held = found
    if (key, held.identity.hex()) != (rank.key, rank.identity):
        raise ConfigError(
            f"{folder} holds a part of a snapshot of {key}, with other weights or of another name",
            hint="name another folder, or remove that",
        )
    return True


def _pulled(
    ranks: list[_Asked],
    folder: Path,
    asked: PullArguments,
    settings: config.Settings,
    wait: Wait,
) -> list[PullReport]:
    """Pull and write ranks, all at a time."""
    with contextlib.ExitStack() as pulls:
        running = []
        for each in ranks:
            one: PullArguments = {
                **asked,
                "revision": each.key.revision,
                "variant": each.key.variant,
                "out": folder_of(folder, each.number),
            }
            name = f"{each.key.name}@{each.identity}"
            options = pull_options(name, settings, one)
            options = replace(options, writer=partial(RankWriter, each.key))
            pull = pulls.enter_context(begin(options, settings, time.monotonic()))
            running.append((pull, each.key))
        return [wait(*each) for each in running]


def _finished(
    folder: Path, key: ModelKey, members: list[str], settings: config.Settings | None
) -> Snapshot | None:
    """Write `snapshot.json`, signed with the key that the settings name, once all ranks are there;
    return None while some are missing."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flock(fd, fcntl.LOCK_EX)  # of ranks that end at the same time one writes it
        with contextlib.suppress(ConfigError):
            return read(folder)
        ranks = []
        for number, variant in enumerate(members):
            found = read_rank(folder_of(folder, number))
            if found is None:
                return None
            held, rank = found
            if held != key._replace(variant=variant):
                raise ConfigError(
                    f"{folder} holds rank {number} of {held}, and others of {key}",
                    hint="freeze all ranks of one revision, into a new folder",
                )
            ranks.append(rank)
        snapshot = Snapshot(folder, key.name, key.revision, tuple(ranks))
        if settings is not None:
            snapshot = signed(snapshot, namekey.load(settings))
        _gather_files(folder, snapshot)
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(_PARTIAL, flags, 0o600, dir_fd=fd), "wb") as file:
            file.write(snapshot.encode())
            file.flush()
            os.fsync(file.fileno())
        os.rename(_PARTIAL, SNAPSHOT, src_dir_fd=fd, dst_dir_fd=fd)
        sync_entries(fd)
    except OSError as error:
        raise write_error(error, folder) from error
    finally:
        os.close(fd)
    return snapshot


def _gather_files(folder: Path, snapshot: Snapshot) -> None:
    """Have the files of all ranks once, beside them. A rank with others keeps its own. What a run
    that was killed has left beside a rank is removed."""
    for number, rank in enumerate(snapshot.ranks):
        own = folder_of(folder, number) / FILES
        shutil.rmtree(folder / f".rank{number}.mx-partial", ignore_errors=True)
        if not number and own.exists() and not (folder / FILES).exists():
            os.rename(own, folder / FILES)
        elif number and rank.packaging == snapshot.ranks[0].packaging:
            shutil.rmtree(own, ignore_errors=True)
