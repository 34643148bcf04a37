"""`mx artifacts`: compile caches and CUDA graphs that travel with the weights."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mx.cli import options, outcome
from mx.cli.commands import Command, VerbGroup
from mx.cli.printing import Column, objects, show_rows
from mx.config import Settings
from mx.errors import ConfigError, LocalError
from mx.units import count, format_bytes, format_seconds

if TYPE_CHECKING:
    from mx.artifacts.carry import ListedSet
    from mx.artifacts.trust import SignedDocument
    from mx.artifacts.using import Obtained

app = typer.Typer(
    name="artifacts",
    cls=VerbGroup,
    no_args_is_help=True,
    help="Compile caches and CUDA graphs, which travel with the weights.",
)

Set = Annotated[str, typer.Argument(help="A file that publish made.", metavar="SET")]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        help="A field of the environment that mx can't see, like configuration=small; may be "
        "repeated.",
        metavar="NAME=VALUE",
    ),
]


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


_SETS: Sequence[Column[ListedSet]] = (
    Column("model", "model", lambda s: s.model),
    Column("set", "set", lambda s: s.set_id),
    Column("kind", "kind", lambda s: s.kind),
    Column("signer", "signed by", lambda s: s.signer),
    Column("bytes", "size", lambda s: s.nbytes, _size, right=True),
    Column("sources", "sources", lambda s: s.sources, right=True),
)


@app.callback()
def root() -> None:
    """Compile caches and CUDA graphs, which travel with the weights.

    They are code: what a set holds runs on the machine that uses it. Only a publisher's key makes
    a set, and only sets whose signer is named in the trust file (`--trust`) are used.
    """


def fields_of(texts: list[str] | None) -> dict[str, str]:
    """Return what `--field` says. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name or name in found:
            raise ConfigError(f"--field {text} is not understood", hint="it is NAME=VALUE")
        found[name] = value
    return found


@app.command("keygen", cls=Command)
@options.takes_settings
def artifacts_keygen(
    file: Annotated[str, typer.Argument(help="Where to keep it.", metavar="FILE")],
    *,
    as_json: bool,
) -> None:
    """Make a publisher's key, and print its public half for trust files.

    Who has the key can run code on every machine whose trust file names it: keep it where sets
    are published, with mode 0600, and nowhere else.

    **Example**

    - `mx artifacts keygen publisher.key`
    """
    from mx.artifacts.trust import make_key

    public = make_key(Path(file))
    if as_json:
        outcome.emit({"key_file": file, "key": public})
        return
    outcome.say(f"made the publisher's key {file}\n  in a trust file:")
    outcome.write(f'[[signer]]\nname = "NAME"\nkey = "{public}"\nmodels = ["MODEL"]')


@app.command("record", cls=Command)
@options.takes_settings
def artifacts_record(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(help="The folder to make.", metavar="DIR")],
    command: Annotated[
        list[str], typer.Argument(help="What compiles, and ends.", metavar="-- COMMAND...")
    ],
    fields: Fields = None,
    python: Annotated[
        str,
        typer.Option(
            help="The Python that COMMAND runs in, which has mx, too. (default: seen in COMMAND)",
            metavar="PATH",
        ),
    ] = "",
    *,
    as_json: bool,
) -> None:
    """Run a command, and record in DIR what torch.compile, Triton and vLLM compile in it.

    DIR must not exist. The command has to do what a replica does when it starts, and then end.
    Nothing is recorded if it fails; its exit code is this command's.

    **Example**

    - `mx artifacts record caches -- python warm_up.py`
    """
    options.settings_of(context)
    from mx.artifacts.recording import record, recorded

    code = record(Path(folder), command, fields_of(fields), python=python)
    if code:
        raise typer.Exit(code)
    found = recorded(Path(folder))
    nbytes = sum(each.nbytes for each, _ in found.files)
    if as_json:
        outcome.emit(
            {
                "folder": folder,
                "files": len(found.files),
                "bytes": nbytes,
                "environment": dict(found.environment),
            }
        )
        return
    outcome.say(
        f"recorded {count(len(found.files), 'file')}, {format_bytes(nbytes)}, in {folder}\n"
        f"  make a set of it: mx artifacts publish {shlex.quote(folder)} --model NAME --key FILE "
        "--out NAME.safetensors"
    )


@app.command("publish", cls=Command)
@options.takes_settings
def artifacts_publish(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(help="What record made.", metavar="DIR")],
    model: Annotated[
        str, typer.Option(help="The name of the model that it is for.", metavar="NAME")
    ],
    key: Annotated[str, typer.Option(help="The publisher's key file.", metavar="FILE")],
    out: Annotated[str, typer.Option(help="The set to make, NAME.safetensors.", metavar="SET")],
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Take the CUDA graphs, in place of the caches.")
    ] = False,
    *,
    as_json: bool,
) -> None:
    """Sign what was recorded in DIR, and write it as a set.

    Nothing that was added or changed since is taken. Serve the set with
    `mx serve --artifacts SET`.

    **Example**

    - `mx artifacts publish caches --model llama-8b --key publisher.key
      --out llama-8b.caches.safetensors`
    """
    options.settings_of(context)
    from mx.artifacts.publishing import publish

    signed = publish(folder, model=model, key=key, out=out, graphs=graphs)
    if as_json:
        outcome.emit(_object(signed))
        return
    outcome.say(
        f"published the set {signed.set_id} for {model}: "
        f"{count(len(signed.document.files), 'file')}, {format_bytes(signed.document.nbytes)}\n"
        f"  serve it: mx serve --artifacts {shlex.quote(out)}"
    )


@app.command("list", cls=Command)
@options.takes_settings
def artifacts_list(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Only those for this.", metavar="MODEL")] = "",
    *,
    as_json: bool,
) -> None:
    """List the sets that the coordinator knows. What it says of them is not checked.

    **Example**

    - `mx artifacts list llama-8b`
    """
    settings = options.settings_of(context)
    from mx.artifacts.carry import find

    found = find(model, coordinator=options.coordinator_of(settings), settings=settings)
    if as_json:
        outcome.emit({"coordinator": settings.coordinator, "sets": objects(_SETS, found)})
        return
    if not found:
        what = f"sets for {model}" if model else "sets"
        outcome.say(f"the coordinator at {settings.coordinator} knows no {what}")
        return
    show_rows(_SETS, found, "ellipsis")


@app.command("inspect", cls=Command)
@options.takes_settings
def artifacts_inspect(
    context: typer.Context,
    path: Set,
    files: Annotated[bool, typer.Option("--files", help="Name each file, too.")] = False,
    *,
    as_json: bool,
) -> None:
    """Show what a set says of itself. Its signature and bytes are checked, its signer is not.

    **Example**

    - `mx artifacts inspect llama-8b.caches.safetensors --files`
    """
    options.settings_of(context)
    from mx.artifacts.package import ArtifactPackage

    with ArtifactPackage(Path(path)) as package:
        package.verify()
        signed = package.signed
    if as_json:
        outcome.emit(_object(signed))
        return
    document = signed.document
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(document.created_s))
    lines = [
        f"{document.kind} {signed.set_id} for {document.model}, made {made} UTC",
        f"  signed by {signed.signer}",
        f"  {count(len(document.files), 'file')}, {format_bytes(document.nbytes)}",
        *(f"  {name}: {value}" for name, value in sorted(document.environment.items())),
    ]
    if files:
        lines += [
            f"  {format_bytes(document.blobs[each.blob].nbytes):>9}  {each.path}"
            for each in document.files
        ]
    outcome.write("\n".join(lines))


@app.command("check", cls=Command)
@options.takes_settings
def artifacts_check(
    context: typer.Context,
    path: Set,
    model: Annotated[
        str, typer.Option(help="The model to use it for. (default: its own)", metavar="NAME")
    ] = "",
    fields: Fields = None,
    *,
    as_json: bool,
) -> None:
    """Say whether this machine would use a set: its bytes, its signer, its environment.

    **Example**

    - `mx artifacts check llama-8b.caches.safetensors --trust trust.toml`
    """
    settings = options.settings_of(context)
    trust = required_trust(settings)
    from mx.artifacts import environment
    from mx.artifacts.package import ArtifactPackage
    from mx.artifacts.trust import Trust

    with ArtifactPackage(Path(path)) as package:
        package.verify()
        signed = package.signed
    signer = Trust.load(trust).check(signed, model or signed.document.model, time.time())
    theirs = signed.document.environment
    differ = environment.differences(
        environment.here(theirs.get("engine", ""), fields_of(fields), names=theirs), theirs
    )
    if differ:
        lines = [
            f"{each.field} is {each.first or 'absent'} here, {each.second} there" for each in differ
        ]
        raise LocalError(
            f"the set {signed.set_id} is for another environment: {'; '.join(lines)}",
            hint="record and publish a set in an environment like this one",
        )
    if as_json:
        outcome.emit({**_object(signed), "signer_name": signer})
        return
    outcome.say(f"the set {signed.set_id} would be used: it is by {signer}, and for here")


@app.command("pull", cls=Command)
@options.takes_settings
def artifacts_pull(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model's name.", metavar="MODEL")],
    folder: Annotated[
        str,
        typer.Option(
            "--out",
            help="A folder of yours to lay the set out in. (default: ~/.cache/mx/artifacts)",
            metavar="DIR",
        ),
    ] = "",
    fields: Fields = None,
    *,
    as_json: bool,
) -> None:
    """Get the set of compile caches that fits this machine, and print how to use it.

    Of several it takes the newest. Where none fits it says why, for each, and ends with exit
    code 3: an engine then compiles as always.

    **Example**

    - `eval "$(mx artifacts pull llama-8b --trust trust.toml)" && python serve.py`
    """
    settings = options.settings_of(context)
    found = obtain(model, settings, folder, fields)
    if as_json:
        outcome.emit({"model": model, **obtained_object(found)})
    if found.folder is None:
        from mx.errors import NoSourceError

        if as_json:
            raise typer.Exit(NoSourceError.exit_code)
        raise NoSourceError(
            "; ".join(found.reasons), hint="an engine compiles as always; publish a set for here"
        )
    if as_json:
        return
    outcome.say(obtained_line(found))
    for name, value in found.variables.items():
        outcome.write(f"export {name}={shlex.quote(value)}")


def required_trust(settings: Settings) -> Path:
    """Return the trust file. Raises ConfigError: none is named."""
    if not settings.trust:
        raise ConfigError(
            "artefacts are code, and no trust file says whose may run here",
            hint="name one with `trust`",
        )
    return Path(settings.trust)


def obtain(
    model: str, settings: Settings, folder: str = "", fields: list[str] | None = None
) -> Obtained:
    """Get the set that fits, as `mx.artifacts.obtain`; the flags are those of the verbs."""
    trust = required_trust(settings)
    from mx.artifacts.using import obtain

    return obtain(
        model,
        trust=trust,
        root=folder or None,
        fields=fields_of(fields),
        coordinator=options.coordinator_of(settings),
        settings=settings,
    )


def obtained_object(found: Obtained) -> dict[str, Any]:
    """Return the fields of `--json` for a set that was got, or why there is none."""
    return {
        "set": found.set_id,
        "signer": found.signer,
        "folder": None if found.folder is None else str(found.folder),
        "variables": dict(found.variables),
        "reasons": list(found.reasons),
        "seconds": round(found.seconds, 6),
    }


def obtained_line(found: Obtained) -> str:
    """Return the lines that say which set was got, or why there is none."""
    lines = [f"  {reason}" for reason in found.reasons]
    if found.folder is not None:
        lines.insert(
            0,
            f"compile caches {found.set_id[:8]} by {found.signer}, in "
            f"{format_seconds(found.seconds)}, are in {found.folder}",
        )
    else:
        lines.insert(0, "no compile caches for this machine: an engine compiles as always")
    return "\n".join(lines)


def _object(signed: SignedDocument) -> dict[str, Any]:
    document = signed.document
    return {
        "set": signed.set_id,
        "model": document.model,
        "kind": document.kind,
        "signer": signed.signer,
        "created_s": document.created_s,
        "environment": dict(document.environment),
        "bytes": document.nbytes,
        "pin": document.pin or None,
        "files": [
            {
                "path": each.path,
                "bytes": document.blobs[each.blob].nbytes,
                "blake3": document.blobs[each.blob].blake3.hex(),
            }
            for each in document.files
        ],
    }
