"""A checkpoint in an object store (S3, GCS, Azure, or files by URL), read by ranges, by obstore."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from mx import runtime
from mx.buffers import copy_bytes
from mx.core.naming import natural_key
from mx.core.packaging import MAX_SIDE_FILE_BYTES
from mx.errors import CheckpointError, ClosedError, ConfigError, MxError, StoreError, install_hint
from mx.storage.companions import take_companions
from mx.storage.header import MAX_HEADER_BYTES, FileTensor, fail, parse_header
from mx.storage.hints import LFS_MAGIC, lfs_pointer
from mx.storage.safetensors import Checkpoint, assembled
from mx.storage.shards import check_paths, chosen_files, shards_of, weight_map
from mx.storage.side_files import MAX_DEPTH, MAX_ENTRIES, take_side_files
from mx.storage.stores import OBJECTS, Opening
from mx.text import plain
from mx.threads import Threads
from mx.units import KIB, format_seconds

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Client

T = TypeVar("T")

_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file")
#: How many requests run at a time.
THREADS = 8
_FOLDER = "name the folder of a checkpoint"
#: What is read of each file at first: most headers are shorter.
_FIRST_BYTES = 256 * KIB
#: How often a request that failed is repeated.
_RETRIES = 3
#: How often a thread that waits for an answer looks whether the pull was closed.
_LOOK_S = 0.2


def check_url(url: str) -> None:
    """Raise ConfigError if this is not the URL of an object store."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in _SCHEMES or not (parts.netloc or parts.path.strip("/")):
        shown = shown_url(url) if "@" not in url and parts.geturl() else ""
        raise ConfigError(
            f"`object_url={shown}` is not the URL of an object store",
            hint="write s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER",
        )


def shown_url(url: str) -> str:
    """Return a URL without what may be a credential: user, password and query."""
    parts = urlsplit(url)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
    return plain(shown.geturl())


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A folder in an object store."""

    url: str = field(repr=False)
    step: str = OBJECTS
    threads: int = THREADS

    @property
    def place(self) -> str:
        return shown_url(self.url)

    def open(self, opening: Opening) -> Checkpoint:
        """List the folder, and read its files' headers. Raises as `CheckpointStore.open`."""
        return _open(Requests(self.url, opening))


class Requests:
    """Requests to one folder, from any thread. They run on the loop, which can cancel them."""

    def __init__(self, url: str, opening: Opening) -> None:
        """
        Args:
            url: The folder's.
            opening: The loop, how long one request may take, and whether the pull was closed.

        Raises:
            ConfigError: obstore is not installed, or the URL or the environment is wrong.
        """
        try:
            from obstore import exceptions
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "obstore":
                raise
            raise ConfigError(
                "object stores need obstore, which is not installed",
                hint=install_hint("objects"),
            ) from error
        runtime.settle_at_exit("tokio")
        self.where = shown_url(url).rstrip("/")
        self._opening = opening
        self._errors: Any = exceptions
        parts, limit = urlsplit(url), timedelta(seconds=opening.timeout_s)
        if parts.scheme == "file" and not os.path.isdir(unquote(parts.path)):
            raise ConfigError(f"{self.where} is not there, or no folder", hint=_FOLDER)
        try:
            # Client options given here would replace those in the environment (AWS_ALLOW_HTTP).
            self.client: Client = from_url(
                url, retry_config={"max_retries": _RETRIES, "retry_timeout": limit}
            )
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"{self.where} can't be used: {_line(error)}") from error

    def run(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a request to its end.

        Args:
            what: The object's path, for errors.
            work: Makes the request.

        Raises:
            CheckpointError: The object is gone, or has changed.
            ConfigError: It may not be read.
            StoreError: The store does not answer, or breaks off.
            ClosedError: The pull was closed.
        """
        limit_s = self._opening.timeout_s

        async def bounded() -> T:
            async with asyncio.timeout(limit_s):
                return await work()

        future: Future[T] = asyncio.run_coroutine_threadsafe(bounded(), self._opening.loop)
        try:
            while True:
                try:
                    return future.result(_LOOK_S)
                except TimeoutError:
                    if future.done():
                        raise
                if self._opening.cancelled():
                    raise ClosedError("reading was cancelled")
        except MxError:
            raise
        except TimeoutError as error:
            raise StoreError(
                f"{self.where}/{what}: no answer within {format_seconds(limit_s)}",
                peer=self.where,
                hint="`store_timeout_s` is how long it may take",
            ) from error
        except Exception as error:
            raise self._translated(error, what) from error
        finally:
            future.cancel()

    def _translated(self, error: Exception, what: str) -> MxError:
        place, errors = f"{self.where}/{what}", self._errors
        match error:
            case errors.PreconditionError():
                return _changed(place)
            case errors.NotFoundError() | FileNotFoundError():
                return CheckpointError(
                    f"{place} is not there", hint="a file is missing: upload the checkpoint again"
                )
            case errors.PermissionDeniedError() | errors.UnauthenticatedError():
                return ConfigError(
                    f"{place} may not be read: {_line(error)}",
                    hint="check the credentials in the environment",
                )
            case _:
                return StoreError(f"{place} could not be read: {_line(error)}", peer=self.where)

    def listing(self) -> list[ObjectMeta]:
        """Return the objects in the folder, at most `MAX_ENTRIES`."""
        import obstore

        async def work() -> list[ObjectMeta]:
            found: list[ObjectMeta] = []
            async for batch in obstore.list(self.client, chunk_size=1000):
                found += batch
                if len(found) >= MAX_ENTRIES:
                    break
            return found[:MAX_ENTRIES]

        return self.run("", work)

    def get(self, meta: ObjectMeta, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of an object.

        Args:
            meta: The object, as it was listed. If it has changed since, this raises.
            begin, end: Within its size.
        """
        import obstore

        path, nbytes = meta["path"], end - begin

        async def work() -> memoryview:
            if not nbytes:
                return memoryview(b"")
            options: Any = {"range": (begin, end)}
            if meta["e_tag"] is not None:
                options["if_match"] = meta["e_tag"]
            if meta["version"] is not None:
                options["version"] = meta["version"]
            answer = await obstore.get_async(self.client, path, options=options)
            now = answer.meta
            # Not all stores honour the condition.
            if now["size"] != meta["size"] or now["e_tag"] != meta["e_tag"]:
                raise _changed(f"{self.where}/{path}")
            return memoryview(await answer.bytes_async())

        data = self.run(path, work)
        if len(data) != nbytes:
            raise CheckpointError(
                f"{self.where}/{path}: bytes {begin} to {end} were asked for, {len(data)} came",
                hint="it was truncated while it was read: upload it again",
            )
        return data


def _changed(place: str) -> CheckpointError:
    return CheckpointError(
        f"{place} changed while it was read",
        hint="wait until it is completely written, then try again",
    )


def _line(error: BaseException) -> str:
    """Return the first line of an error, which may go on with its insides."""
    lines = [line.strip() for line in str(error).splitlines()]
    return plain(next(filter(None, lines), type(error).__name__))[:300]


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """A `StoredFile` in an object store. Its bytes are read while it is as it was listed."""

    path: str
    metadata: dict[str, str] | None
    tensors: tuple[FileTensor, ...]
    meta: ObjectMeta
    requests: Requests = field(repr=False)

    @property
    def location(self) -> str:
        return f"{self.requests.where}/{self.path}"

    def open(self) -> ObjectBytes:
        """Return its bytes, without a request."""
        return ObjectBytes(self)


class ObjectBytes:
    """The `StoredBytes` of an `ObjectFile`."""

    direct = False

    def __init__(self, file: ObjectFile) -> None:
        self._file = file

    def read_exactly(self, view: memoryview, position: int, nbytes: int) -> None:
        """Read as `StoredBytes.read_exactly` does. Raises also ConfigError, StoreError."""
        with self.window(position, position + nbytes, view) as window, view[:nbytes] as here:
            copy_bytes(here, window)

    def window(self, begin: int, end: int, buffer: memoryview) -> memoryview:
        """Return the bytes of one request, not in the buffer."""
        return self._file.requests.get(self._file.meta, begin, end)

    def check_unchanged(self) -> None:
        """Do nothing: every read has checked it."""

    def stamp(self) -> None:
        """Return None: it is not a file of this machine."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _open(requests: Requests) -> Checkpoint:
    left_out: dict[str, str] = {}
    listed = {}
    for meta in requests.listing():
        path = meta["path"]
        if _is_near(path):
            listed[path] = meta
        else:
            left_out[path] = f"is hidden, or more than {MAX_DEPTH} folders deep"
    names = sorted((path for path in listed if "/" not in path), key=natural_key)
    where = requests.where
    shards, index = chosen_files(names, where)
    shard_of = None
    if index is not None:
        shard_of = _index(requests, listed[index])
        shards = shards_of(shard_of)
    if not shards:
        what = "holds no .safetensors file" if listed else "is not there, or is empty"
        raise ConfigError(f"{where} {what}", hint=_FOLDER)
    check_paths(shards, where)
    missing = next((shard for shard in shards if shard not in listed), None)
    if missing is not None:
        hint = "a shard is missing: upload the checkpoint again"
        raise CheckpointError(f"{where}/{missing} is not there", hint=hint)
    with Threads(THREADS, "mx-store") as pool:
        files = list(pool.map(lambda shard: _file(requests, listed[shard]), shards))

    def read(meta: ObjectMeta) -> bytes:
        return bytes(requests.get(meta, 0, min(meta["size"], MAX_SIDE_FILE_BYTES + 1)))

    def open_file(name: str, meta: ObjectMeta) -> ObjectFile:
        return replace(_file(requests, meta), path=name)

    walked = sorted(listed.items(), key=lambda item: _walked(item[0]))
    companions = take_companions(walked, open_file, files, (), left_out)
    taken = [*shards, *(each for each, _ in companions)]
    side = take_side_files(walked, read, taken, left_out)
    checkpoint = assembled(where, files, index, shard_of, side)
    return replace(checkpoint, companions=companions)


def _is_near(path: str) -> bool:
    folders = path.split("/")[:-1]
    return len(folders) <= MAX_DEPTH and not any(name.startswith(".") for name in folders)


def _walked(path: str) -> tuple[int, list[str]]:
    """Return the key that sorts files as a walk by levels meets them: a pin covers this order."""
    parts = path.split("/")
    return len(parts), parts


def _index(requests: Requests, meta: ObjectMeta) -> dict[str, str]:
    where = f"{requests.where}/{meta['path']}"
    if meta["size"] > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where} has {meta['size']} bytes; 100 MB is the most")
    return weight_map(bytes(requests.get(meta, 0, meta["size"])), where)


def _file(requests: Requests, meta: ObjectMeta) -> ObjectFile:
    """Read and check one file's header."""
    where, size = f"{requests.where}/{meta['path']}", meta["size"]
    first = requests.get(meta, 0, min(size, _FIRST_BYTES))
    if bytes(first[: len(LFS_MAGIC)]) == LFS_MAGIC:
        raise lfs_pointer(where)
    if len(first) < 8:
        fail(where, f"it has {len(first)} bytes, too few for a header's length")
    nbytes = int.from_bytes(first[:8], "little")
    if nbytes > MAX_HEADER_BYTES:
        fail(where, f"its header would have {nbytes} bytes; 100 MB is the most")
    if 8 + nbytes > size:
        fail(where, f"it ends at byte {size}, inside its header of {nbytes} bytes")
    header = bytes(first[8 : 8 + nbytes])
    if len(header) < nbytes:
        header += bytes(requests.get(meta, len(first), 8 + nbytes))
    metadata, tensors = parse_header(header, where, size)
    return ObjectFile(meta["path"], metadata, tensors, meta, requests)
