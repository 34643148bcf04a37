"""How an engine's loader is configured: its extra configuration, then mx's settings."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from mx import config
from mx.errors import ConfigError
from mx.units import parse_bytes

#: What a replica may start from, besides a checkpoint. See docs/vllm.md.
STATES = ("auto", "processed", "loaded", "checkpoint")
#: Where a GPU's weights are copied to before the engine processes them, to be lent as they were.
COPIES = ("", "device", "host")
#: What fills weights again that a sleep has discarded, besides the engine's user.
WAKES = ("", "peer")


@dataclass(frozen=True)
class LoaderOptions:
    """The options of an engine's loader."""

    #: NAME, NAME:REVISION or NAME@PIN; "" for the name of the engine's model.
    model: str = ""
    #: The state to start from and to lend: "auto" is the last one that the engine can take.
    state: str = "auto"
    #: Whether to lend what was loaded to other replicas.
    lend: bool = True
    #: One of `COPIES`; "" lends what processing leaves as it was.
    copy: str = ""
    #: One of `WAKES`; "peer" has waking fail if no peer has the same weights.
    wake: str = ""
    #: Whether the engine's ordinary loader takes over where mx can't load; None: unless the model
    #: is named by its pin.
    fallback: bool | None = None
    #: The first digits of the checkpoint's identity, where replicas of several are listed.
    checkpoint: str = ""
    #: The digest of the packaging document that the engine's files came from, in hexadecimal, if
    #: mx got them from a peer: weights that come with others are not taken.
    files: str = ""
    #: The folder of a snapshot (`mx freeze`) to start from, before any source; "" for none.
    snapshot: str = ""
    #: The name of the signal at which what is lent is frozen, such as SIGUSR1, and the folder.
    freeze_on: str = ""
    freeze_to: str = ""
    #: How many bytes of KV blocks each rank then writes, too, such as 2GiB; "" for none.
    freeze_kv: str = ""
    #: The name of the only transport to use; "" for any.
    transport: str = ""
    #: Whether to use compile caches that signers named in the trust file (`trust`) have published.
    artifacts: bool = False
    settings: config.Settings = field(default_factory=config.Settings)

    @classmethod
    def read(cls, given: Mapping[str, object]) -> LoaderOptions:
        """Read an engine's extra configuration. Settings of mx may be in it, too.

        Args:
            given: Options and settings by name.

        Raises:
            ConfigError: A name or a value is wrong; it is named.
        """
        known = {each.name: each for each in fields(cls) if each.name != "settings"}
        options: dict[str, object] = {}
        settings: dict[str, object] = {}
        for name, value in given.items():
            if name in known:
                options[name] = _checked(
                    name, value, str if type(known[name].default) is str else bool
                )
            elif name in config.descriptions():
                settings[name] = value
            else:
                raise _unknown(str(name), [*known, *config.descriptions()])
        for name, words in (("state", STATES), ("copy", COPIES), ("wake", WAKES)):
            if options.get(name, words[0]) not in words:
                raise ConfigError(
                    f"`{name}={options[name]}` of the loader's extra configuration is unknown",
                    hint=f"it is one of {', '.join(filter(None, words))}",
                )
        if options.get("wake") and not options.get("lend", True):
            raise ConfigError(
                "`wake` needs `lend`: only weights that are lent are known by their hash",
                hint="leave out one of them",
            )
        on, to = options.get("freeze_on", ""), options.get("freeze_to", "")
        if bool(on) != bool(to) or (on and on not in signal.Signals.__members__):
            raise ConfigError(
                f"`freeze_on={on}` and `freeze_to={to}` of the loader's extra configuration name "
                "no signal and its folder",
                hint="they are for example SIGUSR1 and /snapshots/llama-8b; or leave out both",
            )
        try:
            kv_bytes = parse_bytes(str(options.get("freeze_kv") or 0))
        except ValueError as error:
            raise ConfigError(
                f"`freeze_kv` of the loader's extra configuration: {error}"
            ) from error
        if kv_bytes and not on:
            raise ConfigError(
                "`freeze_kv` needs `freeze_on`: it is what a signal freezes, too",
                hint="leave out `freeze_kv`, or name a signal",
            )
        if on and not options.get("lend", True):
            raise ConfigError(
                "`freeze_on` needs `lend`: what is frozen is what is lent",
                hint="leave out one of them",
            )
        merged = config.given(config.load(), **settings)
        return cls(**options, settings=merged)  # type: ignore[arg-type]


def _checked(name: str, value: object, kind: type) -> object:
    if type(value) is not kind:
        raise ConfigError(
            f"`{name}={value!r}` of the loader's extra configuration is of type "
            f"{type(value).__name__}",
            hint=f"it must be {'true or false' if kind is bool else 'text'}",
        )
    return value


def _unknown(name: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return ConfigError(f"the loader's extra configuration has no option {name!r}", hint=hint)
