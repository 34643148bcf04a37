"""`python -m mx.engines.transformers SCRIPT [ARGUMENTS]`: runs a program whose `from_pretrained`
takes models from peers and from this host's cache."""

from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path

from mx import config, log
from mx.engines.transformers.patched import patch
from mx.errors import MxError

_USAGE = "usage: python -m mx.engines.transformers [-m] SCRIPT [ARGUMENTS]"


def main() -> None:
    """Patch transformers, and run the program that the arguments name, as `python` would."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    if as_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        sys.exit(0 if "-h" in arguments[:1] else 2)
    try:
        settings = config.load()
        log.set_up(settings.log_level, settings.log_format)
        if not settings.is_set("log_level"):
            # One line for each model; what else there is to tell is the settings' choice.
            logging.getLogger("mx.engines.transformers").setLevel(logging.INFO)
        patch(settings=settings)
    except MxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.argv = arguments
    if as_module:
        sys.path[0] = ""
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.exists():
        print(f"error: there is no script {script}", file=sys.stderr)
        sys.exit(2)
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
