"""An object store (S3, GCS, Azure, or files by URL), read by obstore."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from mx import runtime
from mx.buffers import copy_bytes
from mx.errors import CheckpointError, ClosedError, ConfigError, MxError, StoreError, install_hint
from mx.remote.guarded import LOOK_S, error_line
from mx.remote.ranged import FOLDER_HINT
from mx.storage.side_files import MAX_ENTRIES
from mx.stores import ListedFile, Opening, shown_url
from mx.units import format_seconds

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Client

T = TypeVar("T")

#: How often a request that failed is repeated.
_RETRIES = 3


class ObjectStore:
    """A folder in an object store. Requests run on the loop, which can cancel them."""

    threads = 8

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
        self.place = shown_url(url).rstrip("/")
        self._opening = opening
        self._errors: Any = exceptions
        parts, limit = urlsplit(url), timedelta(seconds=opening.timeout_s)
        if parts.scheme == "file" and not os.path.isdir(unquote(parts.path)):
            raise ConfigError(f"{self.place} is not there, or no folder", hint=FOLDER_HINT)
        try:
            # Client options given here would replace those in the environment (AWS_ALLOW_HTTP).
            self._client: Client | None = from_url(
                url, retry_config={"max_retries": _RETRIES, "retry_timeout": limit}
            )
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"{self.place} can't be used: {error_line(error)}") from error

    def list(self) -> Iterable[ListedFile]:
        """List as `WeightStore.list` does."""
        import obstore

        async def work() -> Sequence[ObjectMeta]:
            found: list[ObjectMeta] = []
            async for batch in obstore.list(self._open(), chunk_size=1000):
                found += batch
                if len(found) >= MAX_ENTRIES:
                    break
            return found

        return [ListedFile(m["path"], m["size"], _version(m)) for m in self._run("", work)]

    def read(self, file: ListedFile, offset: int, view: memoryview) -> int:
        """Read as `WeightStore.read` does."""
        import obstore

        path, end = file.path, min(offset + len(view), file.nbytes)
        tag, _, version = file.version.partition("\n")

        async def work() -> memoryview:
            options: Any = {"range": (offset, end)}
            if tag:
                options["if_match"] = tag
            if version:
                options["version"] = version
            answer = await obstore.get_async(self._open(), path, options=options)
            # Not all stores honour the condition.
            if answer.meta["size"] != file.nbytes or (answer.meta["e_tag"] or "") != tag:
                raise _changed(f"{self.place}/{path}")
            return memoryview(await answer.bytes_async())

        if offset >= end:
            return 0
        data = self._run(path, work)
        if len(data) <= len(view):
            with view[: len(data)] as here:
                copy_bytes(here, data)
        return len(data)

    def close(self) -> None:
        """Let go of the client, which closes its connections."""
        self._client = None

    def _open(self) -> Client:
        if self._client is None:
            raise ClosedError(f"{self.place} was closed")
        return self._client

    def _run(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
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
                    return future.result(LOOK_S)
                except TimeoutError:
                    if future.done():
                        raise
                if self._opening.cancelled():
                    raise ClosedError("reading was cancelled")
        except MxError:
            raise
        except TimeoutError as error:
            raise StoreError(
                f"{self.place}/{what}: no answer within {format_seconds(limit_s)}",
                peer=self.place,
                hint="`store_timeout_s` is how long it may take",
            ) from error
        except Exception as error:
            raise self._translated(error, what) from error
        finally:
            future.cancel()

    def _translated(self, error: Exception, what: str) -> MxError:
        place, errors = f"{self.place}/{what}", self._errors
        match error:
            case errors.PreconditionError():
                return _changed(place)
            case errors.NotFoundError() | FileNotFoundError():
                return CheckpointError(
                    f"{place} is not there", hint="a file is missing: upload the checkpoint again"
                )
            case errors.PermissionDeniedError() | errors.UnauthenticatedError():
                return ConfigError(
                    f"{place} may not be read: {error_line(error)}",
                    hint="check the credentials in the environment",
                )
            case _:
                said = error_line(error)
                return StoreError(f"{place} could not be read: {said}", peer=self.place)


def _version(meta: ObjectMeta) -> str:
    return f"{meta['e_tag'] or ''}\n{meta['version'] or ''}".rstrip("\n")


def _changed(place: str) -> CheckpointError:
    return CheckpointError(
        f"{place} changed while it was read",
        hint="wait until it is completely written, then try again",
    )
