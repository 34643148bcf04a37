"""What the snapshots pack adds to `mx verify`: `--index`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import typer

from mx.cli import additions


class _Index(additions.VerifyAddition):
    flags: ClassVar = {
        "index": Annotated[
            bool,
            typer.Option(
                "--index",
                help="Keep the digests of its blocks for pulls from it: beside the weights, or "
                "elsewhere if the folder is not yours.",
            ),
        ]
    }
    help = (
        "With `--index` a pull of NAME@PIN from the folder has its first layers at once, one of "
        "some tensors reads no others, and an engine may take a peer's weights in place of the "
        "folder's. There may be no PIN then, and nothing recorded.\n\n"
        "- `mx verify /models/llama-8b --index`  once, after a download"
    )

    def run(self, context: Any, folder: str, pin: str, *, as_json: bool) -> bool:
        """Hash a folder and keep its digests, if that is asked for. Raises as `index_folder`."""
        if not context.params["index"]:
            return False
        from mx.cli import live, outcome
        from mx.cli.verify import show
        from mx.snapshots.indexing import index_folder

        with live.reading(folder) as on_progress:
            indexed = index_folder(folder, pin, on_progress=on_progress)
        object = {"digests": indexed.digests, "remembered": indexed.remembered}
        show(folder, indexed.found, as_json=as_json, **object)
        if not as_json:
            said = indexed.digests or f"not kept: {indexed.why_not}"
            engines = "" if indexed.remembered else (
                "; engines do not know the folder by them: its files are on a file system whose "
                "changes this host does not see"
            )  # fmt: skip
            outcome.summarise(f"  digests {said}{engines}")
        return True


INDEX = _Index()
