"""`mx keygen`: make a name key, or a lender key for replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mx import keyfile, namekey
from mx.cli import options, outcome
from mx.config import Settings
from mx.errors import ConfigError
from mx.publickey import PublicKey
from mx.units import parse_seconds


@options.takes_settings
def keygen(
    settings: Settings,
    file: Annotated[
        str,
        typer.Argument(
            help="Where to keep it. (default: the file that `name_key` names)", metavar="FILE"
        ),
    ] = "",
    public: Annotated[
        bool, typer.Option("--public", help="Make none: print the owner's key of FILE.")
    ] = False,
    *,
    lender: Annotated[
        bool,
        typer.Option("--lender", help="Make a lender key, certified by the name key."),
    ] = False,
    name: Annotated[
        list[str] | None,
        typer.Option(help="With --lender: a name that it is for; more than once for several."),
    ] = None,
    kinds: Annotated[
        str,
        typer.Option("--for", help="With --lender: what it lends.", metavar="states,kv,snapshots"),
    ] = "states",
    expires: Annotated[
        str,
        typer.Option(help="With --lender: for how long it is good.", metavar="TIME"),
    ] = "365d",
    principal: Annotated[
        str,
        typer.Option(
            help="With --lender: whom the certificate has to name that replicas register with. "
            "(default: any)",
            metavar="PRINCIPAL",
        ),
    ] = "",
    as_json: bool,
) -> None:
    """Make a name key: who has it owns the names that are bound with it, and may update them.

    It prints the owner's key, which is public: `mx pull NAME --owner KEY` takes a name from this
    owner alone.

    A process that binds a name makes one by itself where there is none, in
    ~/.local/state/mx/name.key. Make one here to give several hosts or users the same: copy the
    file, with mode 0600, and name it with `--name-key` or `MX_PEER_NAME_KEY`. It belongs into no
    image and no repository. An existing file is never replaced.

    With `--lender`: a key for replicas, named with `lender_key` (`MX_PEER_LENDER_KEY`). They take
    and lend states of engines with it, and can bind or update nothing else.

    **Examples**

    - `mx keygen`

    - `mx keygen /etc/mx/team.key`

    - `mx keygen --lender lender.key --name llama-8b --name-key name.key`

    - `mx keygen /etc/mx/team.key --public`
    """
    path = Path(file if lender else file or settings.name_key)
    if not path.name:
        why = "name a FILE for the lender key" if lender else "name a FILE"
        raise ConfigError("there is no file to keep the key in", hint=why)
    key = _lender(settings, name or (), kinds, expires, principal) if lender else b""
    try:
        if not (file or settings.is_set("name_key")):
            keyfile.require_own_folder(path)
        key = keyfile.read(path) if public else keyfile.make(path, key)
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}", hint="leave out --public") from None
    except FileExistsError:
        raise ConfigError(
            f"there is a file {path} already",
            hint="name another FILE: names that this one owns would be lost",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} can't be kept: {error.strerror}", hint="name a FILE in a folder of yours"
        ) from error
    said = {"lender_key": str(path)}
    if not lender:
        said = {"name_key": str(path), "owner": str(PublicKey(namekey.NameKey(key).owner))}
    if as_json:
        outcome.emit(said)
    elif not lender:
        outcome.write(said["owner"])
    if public:
        return
    may = f"lend {kinds} of {', '.join(name or ())}" if lender else "take over the names it is for"
    outcome.say(f"made the key {path}\n  keep it secret: who has it can {may}")


def _lender(
    settings: Settings, names: Sequence[str], kinds: str, expires: str, principal: str
) -> bytes:
    from mx.codec import check_model_key
    from mx.core.types import ModelKey
    from mx.lenderkey import KINDS

    if not names:
        raise ConfigError("a lender key is for some names", hint="give each with --name NAME")
    for each in names:
        check_model_key(ModelKey(each))
    words = kinds.split(",")
    if not set(words) <= set(KINDS):
        raise ConfigError(f"--for {kinds}: it is of {', '.join(KINDS)}")
    try:
        expires_s = time.time() + parse_seconds(expires)
    except ValueError as error:
        raise ConfigError(f"--expires {expires}: {error}", hint="such as 90d") from None
    try:
        owner = namekey.NameKey(keyfile.read(Path(settings.name_key)))
    except OSError as error:
        raise ConfigError(
            f"the name key {settings.name_key} can't be read: {error.strerror}",
            hint="name the owner's key file with --name-key FILE",
        ) from error
    return namekey.LenderKey.issue(owner, names, words, int(expires_s), principal)
