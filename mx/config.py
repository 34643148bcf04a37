"""Settings: flag, then environment, then file, then default; the origin of each value is kept.

This is the only module that reads the environment. Its variables are `MX_PEER_` and the setting's
name in capitals; the file is TOML with the same names at the top level.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from mx import config_values as values
from mx.config_values import COMMON, CONNECTION, LIMITS, STORES, SettingDescription
from mx.errors import ConfigError

_T = TypeVar("_T")

ENVIRONMENT_PREFIX = "MX_PEER_"
#: Names the configuration file; not a setting itself.
FILE_VARIABLE = "MX_PEER_CONFIG"
#: Names the folder in which a command's compile caches are recorded.
RECORDING_VARIABLE = "MX_ARTIFACTS_RECORDING"
#: Names the folder in which an engine's ranks say what they loaded.
ENGINE_VARIABLE = "MX_ENGINE_LOADED"
DEFAULT_ORIGIN = "default"

#: What Kubernetes sets in a pod for a Service whose name begins with mx-peer (service links). Its
#: `_PORT` alone could be a mistyped setting: it has a URL.
_SERVICE_LINK = re.compile(
    ENVIRONMENT_PREFIX
    + r"""(\w+_)?
    (SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*
    |MX_PEER_(\w+_)?PORT=(tcp|udp|sctp)://.*""",
    re.VERBOSE | re.DOTALL,
)
_links_were_named = False

_environment_lock = threading.Lock()
#: What `environment` sets, by the blocks that have not ended; and what each name was before them.
_environments: list[dict[str, str]] = []
_outside: dict[str, str | None] = {}

_LOG_LEVELS = ("debug", "info", "warning", "error")


def _setting(
    default: object,
    read: Callable[[object], object],
    help: str,
    verbs: str = "",
    metavar: str = "",
    **about: str,
) -> Any:
    """Return the field of a setting."""
    described = SettingDescription(default, read, help, tuple(verbs.split()), metavar, **about)
    return field(default=default, metadata={"about": described})


# The settings are a table: a formatter would give each word a line.
# fmt: off

#: Verbs of `mx`, and `coordinator` for mx-coordinator.
_SERVE_PULL = "serve pull"
_PLANNING = f"{_SERVE_PULL} plan"
_ASKING = f"{_PLANNING} models sources show"

@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, validated. `origins` maps names to where their values came from, and `file` is
    the configuration file, which need not exist."""

    coordinator: str = _setting(
        "127.0.0.1:7600", values.addresses,
        "Where the coordinator is. Of several that share a state, the next one is asked where one "
        "does not answer.",
        _ASKING, "HOST:PORT[,...]", group=COMMON,
    )
    coordinator_listen: str = _setting(
        "127.0.0.1:7600", values.address, "Where to listen; port 0 takes a free one.",
        "coordinator", "HOST:PORT", flag="listen",
    )
    listen: str = _setting(
        "127.0.0.1:0", values.address, "Where this process listens; port 0 takes a free one.",
        f"{_SERVE_PULL} show", "HOST:PORT", group=CONNECTION,
    )
    advertise: str = _setting(
        "", values.address_or_none,
        "What others dial in place of `listen`, behind address translation or in a container; "
        "port 0 is the one listened on.",
        _SERVE_PULL, "HOST:PORT", group=CONNECTION,
    )
    data_ports: str = _setting(
        "", values.ports,
        "Ports for the weights over tcp, to be published as they are where `advertise` is given, "
        "like 7602-7605.",
        _SERVE_PULL, "FIRST-LAST", group=CONNECTION, unset="any free ones",
    )
    state: str = _setting(
        "memory", values.state,
        "Where to keep what is registered: memory, sqlite:FILE, or redis://HOST:PORT/DB, which "
        "several coordinators may share.",
        "coordinator", "STATE",
    )
    tls_cert: str = _setting(
        "", values.text, "PEM file with this process's certificate.",
        f"{_ASKING} coordinator", "FILE", group=CONNECTION,
    )
    tls_key: str = _setting(
        "", values.text, "PEM file with its private key.",
        f"{_ASKING} coordinator", "FILE", group=CONNECTION,
    )
    tls_ca: str = _setting(
        "", values.text, "PEM file with the authority that signed the peers' certificates.",
        f"{_ASKING} coordinator", "FILE", group=CONNECTION,
    )
    tls_crl: str = _setting(
        "", values.text,
        "PEM file with lists of the certificates that the authority has revoked; read again when "
        "it changes.",
        f"{_ASKING} coordinator", "FILE", group=CONNECTION, unset="none",
    )
    connection_age_s: float = _setting(
        0.0, values.seconds(0, 30 * 86400),
        "With TLS, the largest age of a connection, after which clients connect again.",
        "serve pull coordinator", "TIME", group=CONNECTION, flag="connection-age",
        unset="until its certificate expires",
    )
    policy: str = _setting(
        "", values.text, "TOML file that says which certificate may do what (docs/policy.md).",
        "serve pull coordinator", "FILE", group=CONNECTION,
    )
    insecure: bool = _setting(
        False, values.flag, "Allow plain text beyond this machine.",
        f"{_ASKING} coordinator", group=CONNECTION,
    )
    name_key: str = _setting(
        "", values.text,
        "The key whose holders own the names that they bind, and may update them; `mx keygen` "
        "makes one.",
        "serve keygen", "FILE", group=CONNECTION,
        unset="~/.local/state/mx/name.key, made at first use",
    )
    lender_key: str = _setting(
        "", values.text,
        "The key with which replicas lend states of an engine's, certified by the name's owner; "
        "`mx keygen` makes one. It takes the place of `name_key`.",
        "serve", "FILE", group=CONNECTION, unset="none",
    )
    receipt_key: str = _setting(
        "", values.text,
        "The key by which a coordinator knows names and their owners again after a restart; made "
        "at first use.",
        "coordinator", "FILE", group=CONNECTION, unset="~/.local/state/mx/receipt.key",
    )
    trust: str = _setting(
        "", values.text,
        "The file that names whose artefacts (code) this user's processes may use, and for which "
        "models; and who owns which names.",
        "pull plan", "FILE", group=CONNECTION,
        unset="none are used",
    )
    owner: str = _setting(
        "", values.text,
        "Take names from this owner alone, whatever the coordinator says: the key that "
        "`mx keygen` prints, or the name's own.",
        "pull plan", "ed25519:HEX", group=CONNECTION,
        unset="the key that `trust` has for the name, if any",
    )
    data_plaintext: bool = _setting(
        False, values.flag, "Send the weights without TLS although control uses it.",
        _SERVE_PULL, group=CONNECTION,
    )
    trusted_fabric: bool = _setting(
        False, values.flag,
        "Use ucx beyond this machine, and trust every host that reaches that network.",
        _PLANNING, group=CONNECTION,
    )
    nics: tuple[str, ...] = _setting(
        (), values.names, "Network interfaces for the weights, like eth0,eth1.",
        _PLANNING, "NAMES", group=CONNECTION, unset="all that are up",
    )
    lease_s: float = _setting(
        5.0, values.seconds(0.5, 3600), "How long a source stays listed without a heartbeat.",
        "coordinator", "TIME", group=LIMITS,
    )
    reader_lease_s: float = _setting(
        6.0, values.seconds(1, 3600), "How long a reader may read without renewing."
    )
    connect_timeout_s: float = _setting(
        3.0, values.seconds(0.1, 600), "How long to wait for a connection."
    )
    stall_timeout_s: float = _setting(
        4.0, values.seconds(0.1, 600), "Give a source up that sends nothing for so long.",
        "pull", "TIME", group=LIMITS,
    )
    wait_s: float = _setting(
        0.0, values.seconds(0, 7 * 86400),
        "Wait so long for a source when there is none (any more); mx serve: for the coordinator "
        "that was named. 90 (seconds), 1m.",
        _SERVE_PULL, "TIME", group=COMMON, flag="wait",
    )
    checkpoint_root: str = _setting(
        "", values.text,
        "Folder with a checkpoint for each model, in a folder of the model's name.",
        "pull", "DIR", group=STORES,
    )
    hub_id: str = _setting(
        "", values.text,
        "The model on the Hugging Face hub, or in its cache; {name} stands for its name.",
        "pull", "ORG/MODEL[@REVISION]", group=STORES,
    )
    object_url: str = _setting(
        "", values.text,
        "Its folder in an object store: s3://BUCKET/{name}, gs://, az://, file://, or a URL of "
        "another store that is installed.",
        "pull", "URL", group=STORES,
    )
    store_timeout_s: float = _setting(
        30.0, values.seconds(0.1, 3600),
        "How long one request to the hub or an object store may take.",
        "pull", "TIME", group=STORES,
    )
    max_readers: int = _setting(
        0, values.count(0, 100_000),
        "How many may read from here at a time; others go elsewhere, or wait.",
        _SERVE_PULL, "N", group=LIMITS, unset="any number",
    )
    max_bandwidth: int = _setting(
        0, values.rate,
        "What is served at most, to all readers together: 500MB/s, 2Gbit/s, or bytes per second.",
        _SERVE_PULL, "RATE", group=LIMITS, unset="no limit",
    )
    control_memory: int = _setting(
        0, values.sizes("64MiB", "1024GiB"),
        "The memory that clients may take of this process by calls and registrations, like 512MB; "
        "docs/bounds.md has the limits that follow.",
        f"{_SERVE_PULL} coordinator", "SIZE", group=LIMITS, unset="1GiB",
    )
    max_request: int = _setting(
        0, values.sizes("65KiB", "4MiB"),
        "The largest message that this process takes from a client. Releases before this one may "
        "send more: 1100kB while a fleet has some.",
        f"{_SERVE_PULL} coordinator", "SIZE", group=LIMITS, unset="65KiB",
    )
    drain_grace_s: float = _setting(
        10.0, values.seconds(0, 3600), "How long running reads may take to finish.",
        "serve", "TIME", group=LIMITS,
    )
    cache_socket: str = _setting(
        "auto", values.cache_socket,
        "Where this host's cache is: in the user's folder (auto), nowhere, or at this socket.",
        _SERVE_PULL, "auto|off|PATH", group=CONNECTION,
    )
    coordinated_reading: str = _setting(
        "auto", values.choice("auto", "always"),
        "When pulls of one model coordinate their reads: over networks (auto), or always.",
    )
    gpudirect: str = _setting(
        "auto", values.choice("auto", "always", "off"),
        "When a GPU is filled past host memory: by ucx over RDMA, from disk (auto), or always.",
    )
    streams: int | str = _setting(
        "auto", values.count(1, 32, "auto"),  # more a source does not let a grant have
        "Connections for the weights to each source: a number, or as many as make the pull faster, "
        "from 2 up to 16 to all sources (auto).",
        "pull", "auto|N", group=CONNECTION,
    )
    log_level: str = _setting(
        "warning", values.choice(*_LOG_LEVELS), "How much to log on standard error.",
        f"{_SERVE_PULL} keygen coordinator", "|".join(_LOG_LEVELS),
        group=COMMON, unset="info for servers, else warning",
    )
    log_format: str = _setting(
        "text", values.choice("text", "json"), "How to log.",
        f"{_SERVE_PULL} keygen coordinator", "text|json", group=COMMON,
        unset="text, and json with `json`",
    )
    trace: str = _setting(
        "", values.text, "Append a JSON line for each step that starts, completes or fails.",
        _SERVE_PULL, "FILE", group=COMMON,
    )
    # fmt: on
    #: The settings of packs that are set, by name: see `value`.
    added: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    file: str = field(default="", repr=False, compare=False)

    def origin(self, name: str) -> str:
        """Return the origin of a value: "default", or the flag, the variable, or file and line."""
        return self.origins.get(name, DEFAULT_ORIGIN)

    def is_set(self, name: str) -> bool:
        """Return True if the value is not the default one."""
        return name in self.origins

    def value(self, name: str) -> Any:
        """Return the value of any setting, also of one that a pack adds."""
        if name in _OWN:
            return getattr(self, name)
        return self.added[name] if name in self.added else descriptions()[name].default

    def fill(self, kind: Callable[..., _T], **given: Any) -> _T:
        """Return options with the values of the settings that they have fields of.

        Args:
            kind: A dataclass.
            given: The other fields, and those that are made otherwise.
        """
        shared = {}
        for each in fields(kind):  # type: ignore[arg-type]
            if each.name in _OWN and each.name not in given:
                shared[each.name] = getattr(self, each.name)
        return kind(**shared, **given)


def _with_flag(name: str, about: SettingDescription) -> SettingDescription:
    return about._replace(flag=f"--{about.flag or name.replace('_', '-')}")


#: The kernel's settings by name, in the order of display.
_OWN = {
    item.name: _with_flag(item.name, about)
    for item in fields(Settings)
    if (about := item.metadata.get("about"))
}


@functools.cache
def descriptions() -> Mapping[str, SettingDescription]:
    """Return all settings by name, in the order of display: the kernel's, then those of packs."""
    from mx import packs  # for a command's settings, or a name that is not the kernel's

    found = dict(_OWN)
    for owner, pack in packs.packs().items():
        for name, about in pack.settings.items():
            mine = _with_flag(name, about)
            if found.setdefault(name, mine) is not mine:
                packs.warn(f"the setting {name} of the pack {owner}", "there is one of this name")
    for pack in packs.packs().values():
        for verb, names in pack.takes.items():
            for name in names:
                found[name] = found[name]._replace(verbs=(*found[name].verbs, verb))
    return found


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


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what this user can get again. It need not exist.

    Args:
        environ: The environment, by default this process's.
    """
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/"), ".cache")
    return home / "mx"


def hub_cache() -> Path:
    """Return the folder in which Hugging Face's library keeps what it has downloaded."""
    if named := os.environ.get("HF_HUB_CACHE", ""):
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME", "") or str(cache_folder().parent / "huggingface")
    return Path(home).expanduser() / "hub"


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


def notify_socket() -> str:
    """Return the socket at which a service manager waits for this process; "" if none does."""
    return os.environ.get("NOTIFY_SOCKET", "")


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


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, for what starts in the block, and restore them at its end.

    Blocks may end in any order: the value is that of the last that has not, then as before all.
    """
    mine = dict(values)
    with _environment_lock:
        for name in mine:
            if not any(name in each for each in _environments):
                _outside[name] = os.environ.get(name)
        _environments.append(mine)
        os.environ.update(mine)
    try:
        yield
    finally:
        with _environment_lock:
            _environments[:] = [each for each in _environments if each is not mine]
            for name in mine:
                others = [each[name] for each in _environments if name in each]
                text = others[-1] if others else _outside.pop(name)
                if text is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = text


def recording() -> Path | None:
    """Return the folder in which this process's compile caches are recorded; None if none is."""
    folder = os.environ.get(RECORDING_VARIABLE)
    return Path(folder) if folder else None


def engine_folder() -> Path | None:
    """Return the folder in which the ranks of this process's engine say what they loaded; None if
    none was named. It need not exist."""
    folder = os.environ.get(ENGINE_VARIABLE)
    return Path(folder) if folder else None


def set_default(name: str, text: str) -> None:
    """Set a variable for good, unless it is set: for a library that others load later."""
    with _environment_lock:
        os.environ.setdefault(name, text)


def load(
    flags: Mapping[str, object] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    typed: bool = False,
) -> Settings:
    """Read all settings.

    Args:
        flags: The values given on the command line or as arguments, by name; None if not given.
        file: The configuration file, by default `MX_PEER_CONFIG`, else `default_file`. A named file
            must exist; the default one need not.
        environ: The environment, by default this process's.
        typed: Whether errors name `flags` as they are typed, else as arguments. Then the caller
            also calls `name_service_links`, once it has set up the log.

    Raises:
        ConfigError: A value is not valid. The message names the flag, the variable, or the file
            and line, and says what would be right.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    added: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def take(name: str, raw: object, origin: str) -> None:
        about = _OWN.get(name) or descriptions()[name]
        try:
            (values if name in _OWN else added)[name] = about.read(raw)
        except ValueError as error:
            raise ConfigError(f"{origin}: {name} = {raw!r}: it {error}") from None
        origins[name] = origin

    chosen = file or environ.get(FILE_VARIABLE) or None
    path = Path(chosen).absolute() if chosen else default_file(environ)
    for name, (raw, line) in _read_file(path, required=chosen is not None).items():
        take(name, raw, f"{path}, line {line}" if line else str(path))
    found, links = _read_environment(environ)
    for name, text in found.items():
        take(name, text, f"environment {ENVIRONMENT_PREFIX}{name.upper()}")
    for name, given in (flags or {}).items():
        about = (_OWN.get(name) or descriptions().get(name))
        if about is None:
            raise _unknown("`flags`", name, [*descriptions()])
        if given is not None:
            take(name, given, f"flag {about.flag}" if typed else f"`{name}`")
    if _has_home(environ):
        folder = state_folder(environ)
        for name in ("name_key", "receipt_key"):
            values.setdefault(name, str(folder / name.replace("_", ".")))
    settings = Settings(**values, added=added, origins=origins, file=str(path))
    _check_tls(settings)
    if links and not typed:
        name_service_links(links)
    return settings


def name_service_links(links: Sequence[str] | None = None) -> None:
    """Log which variables of Kubernetes' are ignored, once in a process.

    Args:
        links: Their names, by default those of this process.
    """
    global _links_were_named
    links = _read_environment(os.environ)[1] if links is None else links
    if links and not _links_were_named:
        _links_were_named = True
        import logging

        logging.getLogger(__name__).warning(
            "%s are not settings and are ignored: Kubernetes sets them for a Service of this name "
            "(enableServiceLinks: false in the pod's spec leaves them out)",
            ", ".join(sorted(links)),
        )


def given(settings: Settings, **arguments: object) -> Settings:
    """Return the settings with a call's arguments, as far as those are not None.

    Raises:
        ConfigError: A value is not valid.
    """
    values: dict[str, Any] = {}
    added: dict[str, Any] = {}
    for name, raw in arguments.items():
        if raw is not None:
            about = _OWN.get(name) or descriptions()[name]
            try:
                (values if name in _OWN else added)[name] = about.read(raw)
            except ValueError as error:
                raise ConfigError(f"{name} = {raw!r}: it {error}") from None
    origins = {**settings.origins, **dict.fromkeys([*values, *added], "argument")}
    return replace(settings, **values, added={**settings.added, **added}, origins=origins)


def _unknown(origin: str, name: str, known: list[str]) -> ConfigError:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return ConfigError(f"{origin}: there is no setting {name}", hint=hint)


def _read_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return name -> text, and the names of Kubernetes' service links."""
    found, links = {}, []
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == FILE_VARIABLE:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        exact = variable == ENVIRONMENT_PREFIX + name.upper()
        if not exact or (name not in _OWN and name not in descriptions()):
            if not _SERVICE_LINK.fullmatch(f"{variable}={text}"):
                known = [ENVIRONMENT_PREFIX + each.upper() for each in descriptions()]
                raise _unknown("environment", variable, [*known, FILE_VARIABLE])
            links.append(variable)
        elif text:  # an empty variable counts as not set
            found[name] = text
    return found, links


def _read_file(path: Path, *, required: bool) -> dict[str, tuple[object, int]]:
    """Return name -> (value, line number, or 0 if it is unknown)."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        if required:
            raise ConfigError(
                f"there is no configuration file {path}", hint="name one that is there, or none"
            ) from None
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    import tomllib

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
        if (_OWN.get(name) or descriptions().get(name)) is None:
            where = f"{path}, line {line}" if line else str(path)
            raise _unknown(where, name, [*descriptions()])
        found[name] = (value, line)
    return found


def _check_tls(settings: Settings) -> None:
    names = ("tls_cert", "tls_key", "tls_ca")
    missing = [name for name in names if not getattr(settings, name)]
    found = [name for name in (*names, "tls_crl") if getattr(settings, name)]
    if missing and found:
        given = ", ".join(f"{name} ({settings.origin(name)})" for name in found)
        raise ConfigError(
            f"TLS needs three files; given: {given}; missing: {', '.join(missing)}",
            hint="give `tls_cert`, `tls_key` and `tls_ca`, or none of them",
        )
    for name in (*names, "tls_crl"):
        path = getattr(settings, name)
        if path and not os.access(path, os.R_OK):
            raise ConfigError(
                f"{settings.origin(name)}: {name} = {path}: no such file, or not readable",
                hint="name a PEM file that this user may read",
            )
