"""Readers of settings' values. Each raises a ValueError that says what would be right."""

from __future__ import annotations

import re
from collections.abc import Callable

from mx.units import parse_bytes, parse_ports


def address(value: object) -> str:
    """Read HOST:PORT."""
    wrong = ValueError("must be HOST:PORT, like 127.0.0.1:7600 or [::1]:7600")
    if not isinstance(value, str):
        raise wrong
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+):(\d{1,5})", value)
    if match is None or int(match[2]) > 65535:
        raise wrong
    return value


def address_or_none(value: object) -> str:
    """Read HOST:PORT, or "" for none."""
    return "" if value == "" else address(value)


def ports(value: object) -> str:
    """Read a port or a range of them, as `mx.units.parse_ports` does, or "" for none."""
    wrong = ValueError("must be a port or a range of ports, like 7602-7609")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong
    try:
        parse_ports(str(value))
    except ValueError:
        raise wrong from None
    return str(value)


_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}


def flag(value: object) -> bool:
    """Read true or false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _FLAGS:
        return _FLAGS[value.strip().lower()]
    raise ValueError("must be true or false")


def names(value: object) -> tuple[str, ...]:
    """Read a list of names, or a text with commas between names."""
    wrong = ValueError('must be names, like "eth0,eth1" or ["eth0", "eth1"]')
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise wrong
    found = tuple(name for name in value if isinstance(name, str) and name.strip())
    if len(found) != len(value):
        raise wrong
    return found


def choice(*choices: str) -> Callable[[object], str]:
    """Return a reader of one of these words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value.lower()

    return read


def cache_socket(value: object) -> str:
    """Read where a cache is: auto, off, or the path of its socket."""
    if not isinstance(value, str) or not (value in ("auto", "off") or value.startswith("/")):
        raise ValueError("must be auto, off, or the path of a socket, from the root")
    return value


def size(value: object) -> int:
    """Read a number of bytes, or 0."""
    wrong = ValueError("must be a size, like 64GB or 512MiB")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong
    try:
        return parse_bytes(str(value))
    except ValueError:
        raise wrong from None
