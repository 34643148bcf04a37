"""What a setting is, and readers of values: each raises a ValueError that says what is right."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from mx.units import parse_bytes, parse_ports, parse_rate, parse_seconds

_Value = TypeVar("_Value")

#: Groups of settings.
COMMON, CONNECTION, STORES, LIMITS = "common", "connection", "stores", "limits"


class SettingDescription(NamedTuple):
    """What a setting means; flags, their help, `mx config show` and docs/settings.md come from it.

    `read` returns the checked value, or raises a ValueError. `verbs` are those that take its flag,
    by name, `metavar` is what the flag wants, `group` where the help shows it. Names of other
    settings and of arguments are in backquotes in `help` and `unset`, which says what the default
    means where its value does not. `flag` is the flag, by default the setting's name.
    """

    default: object
    read: Callable[[object], object]
    help: str
    verbs: tuple[str, ...] = ()
    metavar: str = ""
    group: str = ""
    flag: str = ""
    unset: str = ""

    @property
    def text(self) -> str:
        """What it means, and its default."""
        default = self.unset
        if not (default or self.default is False or self.default in ("", ())):
            default = format_value(self.default)
        return f"{self.help} (default: {default})" if default else self.help


def format_value(value: object) -> str:
    """Return a setting's value as users write it; sizes stay numbers of bytes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _parsed(
    right: str,
    kinds: type | tuple[type, ...],
    parse: Callable[[str], _Value],
    holds: Callable[[_Value], bool] = lambda _: True,
) -> Callable[[object], _Value]:
    """Return a reader.

    Args:
        right: What an error says.
        kinds: What a value must be an instance of; never a bool.
        parse: Reads its text, or raises ValueError or OverflowError.
        holds: Returns True for a value that is allowed.
    """

    def read(value: object) -> _Value:
        if isinstance(value, kinds) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                found = parse(str(value))
                if holds(found):
                    return found
        raise ValueError(f"must be {right}")

    return read


def seconds(low: float, high: float) -> Callable[[object], float]:
    """Return a reader of a time within these bounds."""
    return _parsed(
        f"a time from {low:g} to {high:g} s, like 90, 500ms or 1m",
        (str, int, float),
        parse_seconds,
        lambda found: math.isfinite(found) and low <= found <= high,
    )


def count(low: int, high: int, word: str = "") -> Callable[[object], int | str]:
    """Return a reader of a whole number within these bounds, or of a word."""

    def parse(text: str) -> int | str:
        if word and text == word:
            return word
        if not re.fullmatch(r"[0-9]{1,12}", text.strip()) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    right = f"a whole number from {low} to {high}"
    return _parsed(f"{right}, or {word}" if word else right, (str, int), parse)


#: Reads a number of bytes, or 0.
size = _parsed("a size, like 64GB or 512MiB", (str, int), parse_bytes)


def sizes(low: str, high: str) -> Callable[[object], int]:
    """Return a reader of a number of bytes within these bounds, or 0."""
    least, most = parse_bytes(low), parse_bytes(high)
    right = f"a size from {low} to {high}, or 0 for the default"
    return _parsed(
        right, (str, int), parse_bytes, lambda found: found == 0 or least <= found <= most
    )


#: Reads bytes per second, or 0.
rate = _parsed(
    "a rate of at least 1MB/s, like 500MB/s or 2Gbit/s, or 0 for none",
    (str, int),
    parse_rate,
    lambda found: found == 0 or 10**6 <= found <= 10**15,
)


def text(value: object) -> str:
    """Read a text."""
    if not isinstance(value, str):
        raise ValueError('must be a string, like "text"')
    if "\0" in value:
        raise ValueError("must be without NUL characters")
    return value


def state(value: object) -> str:
    """Read where a coordinator keeps its state."""
    found = text(value)
    if not re.fullmatch(r"memory|sqlite:.+|[a-z][a-z0-9+.-]*://.+", found):
        # Without the value: there may be a password in it.
        raise ValueError("must be memory, sqlite:FILE, or a URL such as redis://HOST:PORT/DB")
    return found


def without_password(value: object) -> object:
    """Return a value as it may be shown: of a URL without its password."""
    return re.sub(r"(://[^/@]*:)[^/@]*@", r"\1***@", value) if isinstance(value, str) else value


def address(value: object) -> str:
    """Read HOST:PORT."""
    wrong = ValueError("must be HOST:PORT, like 127.0.0.1:7600 or [::1]:7600")
    if not isinstance(value, str):
        raise wrong
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+):(\d{1,5})", value)
    if match is None or int(match[2]) > 65535:
        raise wrong
    return value


def addresses(value: object) -> str:
    """Read HOST:PORT, or several, separated by commas."""
    wrong = ValueError("must be HOST:PORT, or several like 10.0.0.1:7600,10.0.0.2:7600")
    texts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    try:
        return ",".join(dict.fromkeys(address(str(each).strip()) for each in texts or [""]))
    except ValueError:
        raise wrong from None


def address_or_none(value: object) -> str:
    """Read HOST:PORT, or "" for none."""
    return "" if value == "" else address(value)


def ports(value: object) -> str:
    """Read a port or a range of them, as `mx.units.parse_ports` does, or "" for none."""
    _parsed("a port or a range of ports, like 7602-7609", (str, int), parse_ports)(value)
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
