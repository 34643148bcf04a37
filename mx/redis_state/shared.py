"""The state of coordinators that share a database of Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mx.redis_state.macs import StateMac
from mx.redis_state.store import RedisStore


class _Redis:
    """A `mx.coordinator.state.SharedState`."""

    def open(
        self,
        url: str,
        *,
        lease_s: float,
        doubt_s: float,
        key: bytes | None,
        settings: Mapping[str, Any],
    ) -> RedisStore:
        required = settings.get("state_mac") == "require"
        mac = None if key is None else StateMac(key, required=required)
        return RedisStore(url, lease_s=lease_s, doubt_s=doubt_s, mac=mac)

    def shared_by(self, url: str) -> str:
        try:
            parts = urlsplit(url)
        except ValueError:  # `open` says so
            return ""
        prefix = dict(parse_qsl(parts.query)).get("prefix", "")
        return f"a shared state {parts.path.strip('/') or '0'} {prefix}"


REDIS = _Redis()
