"""Options that several verbs share, and how they become settings."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_args

import typer

from mx import config
from mx.cli import outcome
from mx.cli.words import in_flags
from mx.config import Settings
from mx.config_values import COMMON, CONNECTION, LIMITS, STORES, SettingDescription
from mx.errors import ConfigError

if TYPE_CHECKING:
    from mx.coordinator.daemon import Coordinator
    from mx.core.selection import Slice

#: Titles of the groups of settings in the help, in their order; a verb's own options come first.
_PANELS = {
    COMMON: "Common",
    CONNECTION: "Network and security",
    STORES: "What peers don't serve (--from auto)",
    LIMITS: "Limits and timeouts",
}
_COMMON = _PANELS[COMMON]


def _transport_names() -> list[str]:
    from mx import plugins

    return plugins.names()


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of models that begin so, for a shell: see `mx.cli.completing`."""
    from mx.cli.completing import model_names as names

    return names(context, incomplete)


def model_argument(help: str) -> Any:
    """Return the argument MODEL of a verb, for its annotation."""
    return typer.Argument(help=help, metavar="MODEL", autocompletion=model_names)


Revision = Annotated[
    str, typer.Option(help="The revision's label. (default: the newest of main)", metavar="R")
]
Variant = Annotated[
    str,
    typer.Option(
        help="Which of its variants: a word, or FIELD=VALUE,... like tp=0/2,dtype=bf16. "
        "(default: checkpoint, else the only one)",
        metavar="V",
    ),
]
NoAttach = Annotated[
    bool, typer.Option("--no-attach", help="Copy even where memory could be shared.")
]
OneTransport = Annotated[
    str | None,
    typer.Option(
        help="Only this one, like shm, tcp or ucx.",
        metavar="NAME",
        autocompletion=_transport_names,
    ),
]
Device = Annotated[
    str, typer.Option(help="Where to put it: the host, or a GPU.", metavar="cpu|cuda:N")
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
        "or with DIM:BEGIN-END those elements of it; may be repeated.",
        metavar="PATTERN=DIM:R/N",
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
Quiet = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        help="Print no progress, notes and summaries: only errors, and what was asked for.",
        rich_help_panel=_COMMON,
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks and the debug log.", rich_help_panel=_COMMON),
]
_ConfigFile = Annotated[
    str | None,
    typer.Option(
        help="Settings in TOML. (default: ~/.config/mx/config.toml, if there is one)",
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


def takes_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb with the flags of the settings that name it, and `--config`, `--json`,
    `--quiet` and `--debug`. It gets `as_json`, and `settings` if it takes them; or `context`, if it
    makes them itself by `settings_of`."""
    from mx.cli import additions

    own = inspect.signature(verb, eval_str=True).parameters
    settings = {
        n: _option(each) for n, each in config.descriptions().items() if verb.__name__ in each.verbs
    }
    common = {"as_json": Json, "quiet": Quiet, "config": _ConfigFile, "debug": Debug}
    first = {name: settings.pop(name) for name in ("coordinator", "wait_s") if name in settings}
    of_packs = additions.of(verb.__name__, additions.VerbAddition)
    flags = {name: kind for each in of_packs for name, kind in each.flags.items()}
    added = flags | first | common | settings
    left = {name: each for name, each in own.items() if name not in (*added, "settings")}
    anywhere = inspect.Parameter.POSITIONAL_OR_KEYWORD
    context = inspect.Parameter("context", anywhere, annotation=typer.Context)
    parameters = [*({"context": context} | left).values()] + [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=False if kind in (Json, Quiet, Debug) or get_args(kind)[0] is bool else None,
        )
        for name, kind in added.items()
    ]

    @functools.wraps(verb)
    def run(**given: Any) -> None:
        if "context" not in own:
            given["settings"] = settings_of(given["context"])
        verb(**{name: value for name, value in given.items() if name in own})

    run.__doc__ = "\n\n".join([inspect.getdoc(verb) or "", *(e.help for e in of_packs if e.help)])
    parameters.sort(key=_panel)  # a panel of the help is where its first flag is
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _panel(parameter: inspect.Parameter) -> int:
    """Return where the panel of a parameter is in the help."""
    found = getattr(parameter.annotation, "__metadata__", ())
    titles = [option.rich_help_panel for option in found]
    return next((n for n, title in enumerate(_PANELS.values(), 1) if title in titles), 0)


def _option(about: SettingDescription) -> Any:
    """Return the type of a setting's flag for typer; the setting reads the text itself."""
    kind = bool if about.default is False else str
    return Annotated[
        kind | None,
        typer.Option(
            about.flag,
            help=in_flags(about.text),
            metavar=about.metavar or None,
            rich_help_panel=_PANELS.get(about.group),
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
    from mx import log

    given = {name: context.params.get(name) for name in config.descriptions()}
    settings = config.load(given, file=context.params.get("config"), typed=True)
    quiet = bool(context.params.get("quiet"))
    if settings.is_set("log_level") or not (level or quiet):
        level = settings.log_level
    elif quiet:
        level = "error"
    style = settings.log_format
    if runs_long and context.params.get("as_json") and not settings.is_set("log_format"):
        style = "json"
    log.set_up("debug" if context.params.get("debug") else level, style, words=in_flags)
    outcome.use_json_lines(style == "json")
    outcome.be_quiet(quiet)
    config.name_service_links()
    return settings


def tracing(settings: Settings) -> AbstractContextManager[None]:
    """Return a context that writes the trace where the settings name a file for it.

    Raises:
        ConfigError: The file cannot be written.
    """
    if not settings.trace:
        return nullcontext()
    from mx import trace

    try:
        open(settings.trace, "a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(
            f"{settings.origin('trace')}: cannot write {settings.trace}: {error.strerror}",
            hint="name a file in a folder that is there, and that this user may write to",
        ) from error
    return trace.writing(settings.trace)


@contextmanager
def accompanied(settings: Settings, coordinator: Coordinator | None = None) -> Iterator[None]:
    """Be in the contexts of packs while a command serves, as that of metrics.

    Raises:
        MxError: One of them can't be entered.
    """
    from mx import packs

    with ExitStack() as entered:
        for context in packs.each("contexts"):
            entered.enter_context(context(settings, coordinator))
        yield


def refuse_of_contexts(context: typer.Context) -> None:
    """Refuse flags of settings that only a command that serves has a use for.

    Raises:
        ConfigError: One was given.
    """
    from mx import packs

    of_contexts = [pack.contexts.values() for pack in packs.packs().values()]
    for name in {name for names in of_contexts for each in names for name in each}:
        if context.params.get(name) is not None:
            raise ConfigError(
                f"{config.descriptions()[name].flag} is for what stays, and this pull ends",
                hint="give --hold, or leave it out",
            )


_SLICE = re.compile(r"(.+)=(-?\d+):(\d+)([/-])(\d+)")


def slices_of(texts: list[str] | None) -> dict[str, Slice] | None:
    """Return what `--slice` says, as the argument of `pull`. Raises ConfigError."""
    if not texts:
        return None
    from mx.core.selection import Shard

    found: dict[str, Slice] = {}
    for text in texts:
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
    return found


class SourceArguments(TypedDict, total=False):
    """The arguments of `pull` that say where to pull from."""

    source: str
    peer: str
    path: str
    fallback: str


def where_from(text: str) -> SourceArguments:
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
    if how == "snapshot" and where:
        return {"source": "snapshot", "path": where}
    if how == "auto" and where:
        return {"source": "auto", "fallback": where}
    raise ConfigError(
        f"--from {text} is not understood",
        hint="it is peer, peer=HOST:PORT, disk=PATH, snapshot=DIR, auto or auto=PATH",
    )


def named(settings: Settings, name: str) -> str:
    """Return where the user has set a setting, "" if it has its default."""
    return settings.origin(name) if settings.is_set(name) else ""


def coordinator_of(settings: Settings) -> str | None:
    """Return the coordinator's address if the user chose one, else None."""
    return settings.coordinator if settings.is_set("coordinator") else None
