"""`mx keygen`: make a name key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mx import keyfile, namekey
from mx.cli import options, outcome
from mx.errors import ConfigError
from mx.publickey import PublicKey


@options.takes_settings
def keygen(
    context: typer.Context,
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
    as_json: bool,
) -> None:
    """Make a name key: who has it owns the names that are bound with it, and may update them.

    It prints the owner's key, which is public: `mx pull NAME --owner KEY` takes a name from this
    owner alone.

    A process that binds a name makes one by itself where there is none, in
    ~/.local/state/mx/name.key. Make one here to give several hosts or users the same: copy the
    file, with mode 0600, and name it with `--name-key` or `MX_PEER_NAME_KEY`. It belongs into no
    image and no repository. An existing file is never replaced.

    **Examples**

    - `mx keygen`

    - `mx keygen /etc/mx/team.key`

    - `mx keygen /etc/mx/team.key --public`
    """
    settings = options.settings_of(context)
    path = Path(file or settings.name_key)
    if not path.name:
        raise ConfigError("there is no home folder to keep a key in", hint="name a FILE")
    try:
        if not (file or settings.is_set("name_key")):
            keyfile.require_own_folder(path)
        key = namekey.NameKey(keyfile.read(path) if public else keyfile.make(path))
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
    owner = str(PublicKey(key.owner))
    if as_json:
        outcome.emit({"name_key": str(path), "owner": owner})
    else:
        outcome.write(owner)
    if public:
        return
    outcome.say(
        f"made the key {path}\n  keep it secret: who has it can take over the names it is for"
    )
