"""Settings: flag, then environment, then file, then default; the origin of each value is kept.

This is the only module that reads the environment. Its variables are `MX_PEER_` and the setting's
name in capitals; the file is TOML with the same names at the top level.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mx import config_values as values
from mx.errors import ConfigError
from mx.units import parse_rate, parse_seconds

ENVIRONMENT_PREFIX = "MX_PEER_"
#: Names the configuration file; not a setting itself.
FILE_VARIABLE = "MX_PEER_CONFIG"
DEFAULT_ORIGIN = "default"

_environment_lock = threading.Lock()

LOG_LEVELS = ("debug", "info", "warning", "error")


def _setting(default: object, help_text: str, read: Callable[[object], object]) -> Any:
    return field(default=default, metadata={"help": help_text, "read": read})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError('must be a string, like "text"')
    if "\0" in value:
        raise ValueError("must be without NUL characters")
    return value


def _seconds(low: float, high: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        wrong = ValueError(f"must be a time from {low:g} to {high:g} s, like 90, 500ms or 1m")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise wrong
        try:
            number = parse_seconds(value) if isinstance(value, str) else float(value)
        except (ValueError, OverflowError):
            raise wrong from None
        if not (math.isfinite(number) and low <= number <= high):
            raise wrong
        return number

    return read


def _count(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        wrong = ValueError(f"must be a whole number from {low} to {high}")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise wrong
        text = str(value).strip()
        if not re.fullmatch(r"[0-9]{1,12}", text) or not low <= int(text) <= high:
            raise wrong
        return int(text)

    return read


def _rate(value: object) -> int:
    wrong = ValueError("must be a rate of at least 1MB/s, like 500MB/s or 2Gbit/s, or 0 for none")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong
    try:
        bytes_per_s = parse_rate(str(value))
    except ValueError:
        raise wrong from None
    if bytes_per_s and not 10**6 <= bytes_per_s <= 10**15:
        raise wrong
    return bytes_per_s


def _state(value: object) -> str:
    text = _text(value)
    if text != "memory":
        raise ValueError("must be memory (nothing else is built yet)")
    return text


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, validated. `origins` maps names to where their values came from."""

    coordinator: str = _setting(
        "127.0.0.1:7600", "where the coordinator is (HOST:PORT)", values.address
    )
    coordinator_listen: str = _setting(
        "127.0.0.1:7600", "where mx-coordinator listens (HOST:PORT)", values.address
    )
    listen: str = _setting(
        "127.0.0.1:0",
        "where serve and pull listen (HOST:PORT; port 0 takes a free one)",
        values.address,
    )
    advertise: str = _setting(
        "",
        "the address that serve and pull register in place of the one they listen on",
        values.address_or_none,
    )
    data_ports: str = _setting(
        "", "ports that tcp listens on for weights, like 7602-7609 (any free one)", values.ports
    )
    state: str = _setting("memory", "where mx-coordinator keeps its state", _state)
    tls_cert: str = _setting("", "PEM file: this process's certificate", _text)
    tls_key: str = _setting("", "PEM file: its private key", _text)
    tls_ca: str = _setting("", "PEM file: the authority of its peers", _text)
    insecure: bool = _setting(False, "allow plain text beyond this machine", values.flag)
    name_key: str = _setting(
        "",
        "file with the key whose holders own the names that they bind (made at first use)",
        _text,
    )
    receipt_key: str = _setting(
        "",
        "file with the key by which a coordinator that was restarted knows its bindings again",
        _text,
    )
    data_plaintext: bool = _setting(
        False, "send weights without TLS although control uses it", values.flag
    )
    trusted_fabric: bool = _setting(
        False, "let transports that enforce no bounds (ucx) work beyond this machine", values.flag
    )
    nics: tuple[str, ...] = _setting(
        (), "network interfaces for weights (all that are up, if none is named)", values.names
    )
    lease_s: float = _setting(
        5.0, "how long a source stays listed without a heartbeat", _seconds(0.5, 3600)
    )
    reader_lease_s: float = _setting(
        6.0, "how long a reader may read without renewing", _seconds(1, 3600)
    )
    connect_timeout_s: float = _setting(
        3.0, "how long to wait for a connection", _seconds(0.1, 600)
    )
    stall_timeout_s: float = _setting(
        4.0, "how long a source may send nothing before it is given up", _seconds(0.1, 600)
    )
    wait_s: float = _setting(
        0.0, "how long a pull waits for a source when there is none", _seconds(0, 7 * 86400)
    )
    checkpoint_root: str = _setting(
        "", "folder with a checkpoint for each model's name, read if peers don't give it", _text
    )
    hub_id: str = _setting(
        "",
        "the model's id on the Hugging Face hub, ORG/MODEL[@REVISION]; {name} is its name",
        _text,
    )
    object_url: str = _setting(
        "", "its folder in an object store, like s3://BUCKET/{name} (also gs, az, file)", _text
    )
    store_timeout_s: float = _setting(
        30.0, "how long one request to an object store or the hub may take", _seconds(0.1, 3600)
    )
    max_readers: int = _setting(
        0, "how many pulls may read from a source at a time (0: any number)", _count(0, 100_000)
    )
    max_bandwidth: int = _setting(
        0, "bytes per second that a source sends at most, over all readers (0: no limit)", _rate
    )
    drain_grace_s: float = _setting(
        10.0, "how long running reads may take to finish when a source stops", _seconds(0, 3600)
    )
    cache_socket: str = _setting(
        "auto",
        "where this host's cache is: auto (in the user's folder), off, or the path of its socket",
        values.cache_socket,
    )
    cache_memory: int = _setting(
        0, "bytes that a cache holds at most (0: half of what is free at its start)", values.size
    )
    coordinated_reading: str = _setting(
        "auto",
        "when pulls of one model coordinate their reads: auto (over networks) or always",
        values.choice("auto", "always"),
    )
    streams: int = _setting(2, "TCP connections for weights, per pull", _count(1, 64))
    log_level: str = _setting(
        "warning",
        f"how much to log: {', '.join(LOG_LEVELS)} (info if not set, for servers)",
        values.choice(*LOG_LEVELS),
    )
    log_format: str = _setting("text", "how to log: text or json", values.choice("text", "json"))
    trace: str = _setting("", "write a JSON line per traced step to this file", _text)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> str:
        """Return the origin of a value: "default", or the flag, the variable, or file and line."""
        return self.origins.get(name, DEFAULT_ORIGIN)

    def is_set(self, name: str) -> bool:
        """Return True if the value is not the default one."""
        return name in self.origins


def setting_names() -> list[str]:
    """Return the settings' names in the order of display."""
    return [item.name for item in fields(Settings) if item.name != "origins"]


def describe(name: str) -> str:
    """Return one line on what a setting means."""
    return str(_metadata(name)["help"])


def _metadata(name: str) -> Mapping[str, Any]:
    return next(item.metadata for item in fields(Settings) if item.name == name)


def format_value(value: object) -> str:
    """Return a setting's value as users write it; sizes stay numbers of bytes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def default_file(environ: Mapping[str, str]) -> Path:
    """Return the configuration file that is read if none is named."""
    base = environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification says to ignore a relative path.
    home = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/"), ".config")
    return home / "mx" / "config.toml"


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for this user's keys and what mx remembers, which is neither configuration
    nor cache. It need not exist.

    Args:
        environ: The environment, by default this process's.
    """
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME", "")
    home = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/"), ".local", "state")
    return home / "mx"


def _has_home(environ: Mapping[str, str]) -> bool:
    """Return True if the state folder is named, or in a home that exists."""
    named = environ.get("XDG_STATE_HOME", "").startswith("/")
    home = environ.get("HOME", "")
    return named or (home.startswith("/") and os.path.isdir(home))


def inherited(*prefixes: str) -> dict[str, str]:
    """Return the environment variables whose names begin with one of the prefixes.

    They are the user's settings of a library, for a child process that uses it.
    """
    return {name: text for name, text in os.environ.items() if name.startswith(prefixes)}


def quieten_grpc() -> None:
    """Keep gRPC's own log off standard error, unless the user has set its level.

    Call this before grpc is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@contextlib.contextmanager
def library_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that are not set yet, and remove them at the end of the block.

    For loading a library that reads its settings from the environment alone.
    """
    with _environment_lock:
        added = {name: text for name, text in values.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def load(
    flags: Mapping[str, object] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> Settings:
    """Read all settings.

    Args:
        flags: The values given on the command line or as arguments, by name; None if not given.
        file: The configuration file, by default `MX_PEER_CONFIG`, else `default_file`. A named file
            must exist; the default one need not.
        environ: The environment, by default this process's.
        flag_names: The spelling of each flag, for errors; by default flags are named as arguments.

    Raises:
        ConfigError: A value is not valid. The message names the flag, the variable, or the file
            and line, and says what would be right.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    origins: dict[str, str] = {}

    def take(name: str, raw: object, origin: str) -> None:
        try:
            values[name] = _metadata(name)["read"](raw)
        except ValueError as error:
            raise ConfigError(f"{origin}: {name} = {raw!r}: it {error}") from None
        origins[name] = origin

    chosen = file or environ.get(FILE_VARIABLE) or None
    path = Path(chosen) if chosen else default_file(environ)
    for name, (raw, line) in _read_file(path, required=chosen is not None).items():
        take(name, raw, f"{path}, line {line}" if line else str(path))
    for name, text in _read_environment(environ).items():
        take(name, text, f"environment {ENVIRONMENT_PREFIX}{name.upper()}")
    for name, given in (flags or {}).items():
        if given is not None:
            flag = (flag_names or {}).get(name)
            take(name, given, f"flag {flag}" if flag else f"`{name}`")
    if _has_home(environ):
        folder = state_folder(environ)
        for name in ("name_key", "receipt_key"):
            values.setdefault(name, str(folder / name.replace("_", ".")))
    settings = Settings(**values, origins=origins)  # type: ignore[arg-type]
    _check_tls(settings)
    return settings


def given(settings: Settings, **arguments: object) -> Settings:
    """Return the settings with a call's arguments, as far as those are not None.

    Raises:
        ConfigError: A value is not valid.
    """
    values: dict[str, Any] = {}
    for name, raw in arguments.items():
        if raw is not None:
            try:
                values[name] = _metadata(name)["read"](raw)
            except ValueError as error:
                raise ConfigError(f"{name} = {raw!r}: it {error}") from None
    origins = {**settings.origins, **dict.fromkeys(values, "argument")}
    return replace(settings, **values, origins=origins)


def _unknown(origin: str, name: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return ConfigError(f"{origin}: there is no setting {name}", hint=hint)


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    known = {ENVIRONMENT_PREFIX + name.upper(): name for name in setting_names()}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == FILE_VARIABLE:
            continue
        if variable not in known:
            raise _unknown("environment", variable, [*known, FILE_VARIABLE])
        if text:  # an empty variable counts as not set
            found[known[variable]] = text
    return found


def _read_file(path: Path, *, required: bool) -> dict[str, tuple[object, int]]:
    """Return name -> (value, line number, or 0 if it is unknown)."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        if required:
            raise ConfigError(f"there is no configuration file {path}") from None
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", hint='write lines like coordinator = "host:7600"'
        ) from None
    lines = text.splitlines()
    found: dict[str, tuple[object, int]] = {}
    for name, value in table.items():
        pattern = re.compile(rf"""\s*\[*["']?{re.escape(name)}["']?\s*[=.\]]""")
        line = next((n for n, at in enumerate(lines, 1) if pattern.match(at)), 0)
        if name not in setting_names():
            raise _unknown(f"{path}, line {line}" if line else str(path), name, setting_names())
        found[name] = (value, line)
    return found


def _check_tls(settings: Settings) -> None:
    names = ("tls_cert", "tls_key", "tls_ca")
    missing = [name for name in names if not getattr(settings, name)]
    if missing and len(missing) < len(names):
        given = ", ".join(
            f"{name} ({settings.origin(name)})" for name in names if name not in missing
        )
        raise ConfigError(
            f"TLS needs three files; given: {given}; missing: {', '.join(missing)}",
            hint="give `tls_cert`, `tls_key` and `tls_ca`, or none of them",
        )
    for name in names:
        path = getattr(settings, name)
        if path and not os.access(path, os.R_OK):
            raise ConfigError(
                f"{settings.origin(name)}: {name} = {path}: no such file, or not readable"
            )
