"""Options that several verbs share, and how they become settings."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, TypedDict

import typer

from mx import config, log, trace
from mx.cli import outcome
from mx.cli.words import in_flags
from mx.config import Settings
from mx.core.selection import Shard, Slice
from mx.errors import ConfigError
from mx.transport import TlsFiles

_CONNECTION = "Coordinator and security"
_COMMON = "Common"

Coordinator = Annotated[
    str | None,
    typer.Option(
        help="Where the coordinator is. (default: 127.0.0.1:7600)",
        metavar="HOST:PORT",
        rich_help_panel=_CONNECTION,
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option(
        help="PEM file with this process's certificate.",
        metavar="FILE",
        rich_help_panel=_CONNECTION,
    ),
]
TlsKey = Annotated[
    str | None,
    typer.Option(
        help="PEM file with its private key.", metavar="FILE", rich_help_panel=_CONNECTION
    ),
]
TlsCa = Annotated[
    str | None,
    typer.Option(
        help="PEM file with the authority that signed the peers' certificates.",
        metavar="FILE",
        rich_help_panel=_CONNECTION,
    ),
]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure",
        help="Allow plain text beyond this machine.",
        rich_help_panel=_CONNECTION,
    ),
]
NameKey = Annotated[
    str | None,
    typer.Option(
        help="The key whose holders own the names that they bind, and may update them; `mx keygen` "
        "makes one. (default: ~/.local/state/mx/name.key, made at first use)",
        metavar="FILE",
        rich_help_panel=_CONNECTION,
    ),
]
DataPlaintext = Annotated[
    bool | None,
    typer.Option(
        "--data-plaintext",
        help="Send the weights without TLS although control uses it.",
        rich_help_panel=_CONNECTION,
    ),
]
TrustedFabric = Annotated[
    bool | None,
    typer.Option(
        "--trusted-fabric",
        help="Use ucx beyond this machine, and trust every host that reaches that network.",
        rich_help_panel=_CONNECTION,
    ),
]
Nics = Annotated[
    str | None,
    typer.Option(
        help="Network interfaces for the weights, like eth0,eth1. (default: all that are up)",
        metavar="NAMES",
        rich_help_panel=_CONNECTION,
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        help="Where this process listens; port 0 takes a free one. (default: 127.0.0.1:0)",
        metavar="HOST:PORT",
        rich_help_panel=_CONNECTION,
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        help="What others dial in place of --listen, behind address translation or in a "
        "container; port 0 is the one listened on.",
        metavar="HOST:PORT",
        rich_help_panel=_CONNECTION,
    ),
]
DataPorts = Annotated[
    str | None,
    typer.Option(
        help="Ports for the weights over tcp, to be published as they are where --advertise is "
        "given, like 7602-7605. (default: any free ones)",
        metavar="FIRST-LAST",
        rich_help_panel=_CONNECTION,
    ),
]
CacheSocket = Annotated[
    str | None,
    typer.Option(
        help="Where this host's cache is: in the user's folder (auto), nowhere, or at this socket. "
        "(default: auto)",
        metavar="auto|off|PATH",
    ),
]
MaxReaders = Annotated[
    int | None,
    typer.Option(
        help="How many may read from here at a time; others go elsewhere, or wait. "
        "(default: any number)",
        metavar="N",
    ),
]
MaxBandwidth = Annotated[
    str | None,
    typer.Option(
        help="What is given at most, to all readers together: 500MB/s, 2Gbit/s, or bytes per "
        "second. (default: no limit)",
        metavar="RATE",
    ),
]

_STORES = "What peers don't give (--from auto)"
CheckpointRoot = Annotated[
    str | None,
    typer.Option(
        help="Folder with a checkpoint for each model, in a folder of the model's name.",
        metavar="DIR",
        rich_help_panel=_STORES,
    ),
]
HubId = Annotated[
    str | None,
    typer.Option(
        help="The model on the Hugging Face hub, or in its cache; {name} stands for its name.",
        metavar="ORG/MODEL[@REVISION]",
        rich_help_panel=_STORES,
    ),
]
ObjectUrl = Annotated[
    str | None,
    typer.Option(
        help="Its folder in an object store: s3://BUCKET/{name}, gs://, az:// or file://.",
        metavar="URL",
        rich_help_panel=_STORES,
    ),
]
StoreTimeout = Annotated[
    str | None,
    typer.Option(
        help="How long one request to the hub or an object store may take. (default: 30)",
        metavar="TIME",
        rich_help_panel=_STORES,
    ),
]


def _transport_names() -> list[str]:
    from mx import plugins

    return plugins.names()


Variant = Annotated[
    str,
    typer.Option(
        help="Which of its variants: a word, or FIELD=VALUE,... like tp=0/2,dtype=bf16. "
        "(default: checkpoint, else the only one)",
        metavar="V",
    ),
]
OneTransport = Annotated[
    str | None,
    typer.Option(
        help="Only this one, like shm, tcp or ucx.",
        metavar="NAME",
        autocompletion=_transport_names,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        help="Only the tensors of this name or shell-style pattern; may be repeated.",
        metavar="PATTERN",
    ),
]
Slices = Annotated[
    list[str] | None,
    typer.Option(
        "--slice",
        help="Of the tensors of this name or pattern only rank R's share of N along dimension DIM, "
        "or elements BEGIN to END of it; may be repeated.",
        metavar="PATTERN=DIM:R/N|DIM:BEGIN-END",
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        help="Settings in TOML. (default: ~/.config/mx/config.toml, if there is one)",
        metavar="FILE",
        rich_help_panel=_COMMON,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON object on standard output, errors too; progress stays on standard error.",
        rich_help_panel=_COMMON,
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        help="How much to log on standard error. (default: info for servers, else warning)",
        metavar="debug|info|warning|error",
        rich_help_panel=_COMMON,
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        help="How to log. (default: text, and json with --json)",
        metavar="text|json",
        rich_help_panel=_COMMON,
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks and the debug log.", rich_help_panel=_COMMON),
]
Trace = Annotated[
    str | None,
    typer.Option(
        "--trace",
        help="Append a JSON line for each step that starts, completes or fails.",
        metavar="FILE",
        rich_help_panel=_COMMON,
    ),
]


def _show_version(wanted: bool, context: typer.Context) -> None:
    if wanted:
        import mx

        print(f"{context.find_root().info_name} {mx.__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        help="Show the version and exit.",
        is_eager=True,
        callback=_show_version,
        rich_help_panel=_COMMON,
    ),
]


def settings_of(context: typer.Context, *, runs_long: bool = False, level: str = "") -> Settings:
    """Return the settings for a verb, and set up logging on standard error.

    Args:
        context: The verb's; its options come before the environment, the file and the defaults.
        runs_long: With `--json`, write all further lines on standard error as JSON, unless a log
            format is chosen. `--log-format json` does that for every verb.
        level: The log level where none is set; "" for the settings' default.

    Raises:
        ConfigError: A setting is wrong.
    """
    known = set(config.setting_names())
    given: dict[str, Any] = {n: v for n, v in context.params.items() if n in known}
    settings = config.load(
        given,
        file=context.params.get("config") or context.params.get("config_file"),
        flag_names={
            option.name: option.opts[0] for option in context.command.params if option.name
        },
    )
    if settings.is_set("log_level") or not level:
        level = settings.log_level
    style = settings.log_format
    if runs_long and context.params.get("as_json") and not settings.is_set("log_format"):
        style = "json"
    log.set_up("debug" if context.params.get("debug") else level, style, words=in_flags)
    outcome.use_json_lines(style == "json")
    return settings


def tracing(settings: Settings) -> AbstractContextManager[None]:
    """Return a context that writes the trace where the settings name a file for it.

    Raises:
        ConfigError: The file cannot be written.
    """
    if not settings.trace:
        return nullcontext()
    try:
        open(settings.trace, "a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(
            f"{settings.origin('trace')}: cannot write {settings.trace}: {error.strerror}"
        ) from error
    return trace.writing(settings.trace)


def tls_of(settings: Settings) -> TlsFiles | None:
    """Return the TLS files, or None. `mx.config` has checked that there are three or none."""
    if not settings.tls_cert:
        return None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)


_SLICE = re.compile(r"(.+)=(-?\d+):(\d+)([/-])(\d+)")


def slices_of(texts: list[str] | None) -> dict[str, Slice] | None:
    """Return what `--slice` says, as the argument of `pull`. Raises ConfigError."""
    found: dict[str, Slice] = {}
    for text in texts or ():
        match = _SLICE.fullmatch(text)
        if match is None or match[1] in found:
            raise ConfigError(
                f"--slice {text} is not understood"
                if match is None
                else f"--slice names {match[1]} twice",
                hint="it is like '*.o_proj.weight=1:0/8' (dimension 1, rank 0 of 8) or "
                "'*.q_proj.weight=0:0-512' (its elements 0 to 511)",
            )
        dim, first, second = int(match[2]), int(match[3]), int(match[5])
        found[match[1]] = Shard(dim, first, second) if match[4] == "/" else (dim, first, second)
    return found or None


class Where(TypedDict, total=False):
    """The arguments of `pull` that say where to pull from."""

    source: str
    peer: str
    path: str
    fallback: str


def where_from(text: str) -> Where:
    """Return what `--from` says, as the arguments of `pull`. Raises ConfigError."""
    if text == "peer":
        return {}
    if text == "auto":
        return {"source": "auto"}
    how, _, where = text.partition("=")
    if how == "peer" and where:
        return {"peer": where}
    if how == "disk" and where:
        return {"path": where}
    if how == "auto" and where:
        return {"source": "auto", "fallback": where}
    raise ConfigError(
        f"--from {text} is not understood",
        hint="it is peer, peer=HOST:PORT, disk=PATH, auto or auto=PATH",
    )


def named(settings: Settings, name: str) -> str:
    """Return where the user has set a setting, "" if it has its default."""
    return settings.origin(name) if settings.is_set(name) else ""


def coordinator_of(settings: Settings) -> str | None:
    """Return the coordinator's address if the user chose one, else None."""
    return settings.coordinator if settings.is_set("coordinator") else None
