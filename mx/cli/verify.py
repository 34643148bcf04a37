"""`mx verify`: check a folder that was pulled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mx.cli import additions, live, options, outcome
from mx.units import count, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from mx.api.verifying import VerifiedFolder


@options.takes_settings
def verify(
    context: typer.Context,
    folder: Annotated[
        str, typer.Argument(help="The folder, or a safetensors file.", metavar="DIR")
    ],
    pin: Annotated[
        str,
        typer.Argument(
            help="What it should hold: a pin, or NAME@PIN. (default: what mx pull --out recorded)",
            metavar="PIN",
        ),
    ] = "",
    *,
    as_json: bool,
) -> None:
    """Check that a folder holds the weights of a pin, every byte of them.

    Without PIN that is what `mx pull --out` recorded of the folder, where its file system keeps
    such a record (an extended attribute); a copy may have none. A pin that covers files covers
    those here, too. Nothing is asked of a coordinator or a source. Exit code 4 if anything differs;
    the record says which tensors do, and which files.

    **Examples**

    - `mx verify /models/llama-8b`

    - `mx verify /models/llama-8b llama-8b@466847afadc6e1be`
    """
    from mx.api.verifying import verify_folder
    from mx.core.reference import check_pin

    digits = pin.rpartition("@")[2]
    if pin:
        check_pin(digits)
    of_packs = additions.of("verify", additions.VerifyAddition)
    if any(each.run(context, folder, digits, as_json=as_json) for each in of_packs):
        return
    with live.reading(folder) as on_progress:
        found = verify_folder(folder, digits, on_progress=on_progress)
    show(folder, found, as_json=as_json)


def show(folder: str, found: VerifiedFolder, *, as_json: bool, **more: object) -> None:
    """Say what was found in a folder, and `more` with `as_json`."""
    ref, layout = found.manifest.ref, found.manifest.layout
    if as_json:
        outcome.emit(
            {
                "folder": folder,
                "identity": ref.identity.hex(),
                "pin": ref.pin.hex(),
                "pin_covers_files": bool(ref.packaging),
                "recorded": found.recorded,
                "files_verified": found.files_too,
                "bytes": layout.payload_nbytes,
                "layers": len(layout.layers),
                "seconds": round(found.seconds, 6),
                "verified": "digest" if found.compared else "",
                **more,
            }
        )
        return
    against = "that its pull recorded" if found.recorded else "of the pin"
    files = "weights and files" if found.files_too else "weights"
    verdict = f"its {files} are those {against}" if found.compared else "compared with no pin"
    how = "verified by digest" if found.compared else "hashed"
    rate = format_rate(layout.payload_nbytes / found.seconds)
    outcome.summarise(
        f"{folder}: {format_bytes(layout.payload_nbytes)} in {format_seconds(found.seconds)} "
        f"({rate}), {count(len(layout.layers), 'layer')}, {how}\n"
        f"  {verdict}\n"
        f"  pin {ref.pin.hex()} {outcome.pin_covers(ref.packaging)}"
    )
