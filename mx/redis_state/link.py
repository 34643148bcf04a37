"""The connections to one Redis: its address in words, and its failures as errors of mx."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from mx.errors import CapacityError, ConfigError, CoordinatorError, MxError, install_hint

#: The longest that Redis takes to answer; a coordinator that waits longer takes it for gone.
ANSWER_S = 1.0
#: The longest that a commit with its documents takes.
WRITE_S = 4.0
_CONNECTIONS = 16


class RedisLink:
    """A client of one Redis, and the names of its keys, which share one hash tag."""

    def __init__(self, url: str) -> None:
        """
        Args:
            url: redis:// or rediss://, as redis-py reads it; `prefix=NAME` in its query tells the
                states in one database apart.

        Raises:
            ConfigError: redis-py is not installed, or the URL is none.
        """
        try:
            import redis.asyncio as redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ConfigError("`state=redis:` needs redis-py", hint=install_hint("redis")) from None
        self._errors = redis
        try:
            parts = urlsplit(url)
            query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            prefix = query.pop("prefix", "")
            # HOST:PORT/DB for messages: never the password.
            self.name = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
            if not parts.hostname or (not prefix.isidentifier() and prefix):
                raise ValueError
            bare = urlunsplit(parts._replace(query=urlencode(query)))
            self.client: Any = redis.Redis.from_url(
                bare,
                socket_timeout=WRITE_S,
                socket_connect_timeout=ANSWER_S,
                retry=Retry(NoBackoff(), 0),
                max_connections=_CONNECTIONS,
            )
        except (ValueError, TypeError, AttributeError):
            # What the error says may have a part of the password.
            raise ConfigError(
                "`state` is not the address of a Redis, or its prefix is not an identifier",
                hint="write redis://HOST:PORT/DB, or rediss:// for TLS; a password in it is "
                "percent-encoded",
            ) from None
        self._tag = f"{{mx:{prefix}}}" if prefix else "{mx}"

    def key(self, name: str) -> str:
        """Return the name of a key."""
        return f"{self._tag}:{name}"

    @contextlib.asynccontextmanager
    async def answering(self, within_s: float = ANSWER_S) -> AsyncIterator[None]:
        """Raise what Redis or the connection does wrong in the block as an error of mx.

        Raises:
            MxError: As `refused`; or it does not answer in time.
        """
        errors = self._errors
        try:
            async with asyncio.timeout(within_s):
                yield
        except (TimeoutError, errors.TimeoutError):
            raise self._unreached(f"it does not answer within {within_s:g} s") from None
        except errors.ConnectionError as error:
            raise self._unreached(str(error)) from None
        except OSError as error:
            raise self._unreached(error.strerror or str(error)) from None
        except errors.RedisError as error:
            raise self.refused(str(error)) from None

    def refused(self, said: str) -> MxError:
        """Return the error for what Redis says as it refuses, maybe within a script's error."""
        if "when used memory" in said:
            return CapacityError(
                f"the coordinator cannot write its state: {self.name} is full",
                hint="what is listed goes on; raise its maxmemory",
            )
        if "read only replica" in said:
            return CoordinatorError(
                f"the coordinator cannot write its state: {self.name} is a replica",
                hint="name the primary with `state`; after a failover, what leads there now",
            )
        if "MISCONF" in said or "unable to persist" in said:
            return CoordinatorError(
                f"the coordinator cannot write its state: {self.name} cannot save what it has",
                hint="what is listed goes on; see its log: its disk may be full or its folder gone",
            )
        return CoordinatorError(
            f"the coordinator cannot use its state at {self.name}: {said[:200]}"
        )

    def _unreached(self, why: str) -> CoordinatorError:
        return CoordinatorError(
            f"the coordinator does not reach its state at {self.name}: {why}",
            hint="what is listed goes on; another coordinator of this state may answer",
        )

    async def persistence(self) -> str:
        """Return what this Redis loses in a crash, in words."""
        try:
            found = {}
            for name in ("appendonly", "appendfsync", "save", "maxmemory-policy"):
                found.update(await self.client.config_get(name))
        except self._errors.ResponseError:
            return "its persistence cannot be read here (CONFIG is not allowed)"
        said = {
            key if isinstance(key, str) else key.decode(): (
                value if isinstance(value, str) else value.decode()
            )
            for key, value in found.items()
        }
        policy = said.get("maxmemory-policy", "")
        evicts = f"; maxmemory-policy={policy} may evict state: use noeviction"
        text = f"appendonly={said.get('appendonly')}"
        if said.get("appendonly") == "yes":
            text += f" appendfsync={said.get('appendfsync')}"
            lost = {"always": "nothing", "everysec": "the last second"}
            lost_here = lost.get(said.get("appendfsync", ""), "what the kernel had not written")
        elif said.get("save"):
            text += f" save={said['save']}"
            lost_here = "all since the last snapshot"
        else:
            lost_here = "everything"
        text += f": a crash of Redis loses {lost_here}"
        return text + (evicts if policy not in ("", "noeviction") else "")

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()
