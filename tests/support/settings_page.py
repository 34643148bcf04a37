"""docs/settings.md, made of the fields of `mx.config.Settings`.

python -m tests.support.settings_page
"""

from __future__ import annotations

from pathlib import Path

from mx.cli.words import in_flags
from mx.config import descriptions

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

_HEAD = """# Settings

Each has a name in the file (`~/.config/mx/config.toml`, or `--config FILE`), a variable in the
environment, its name in capitals behind `MX_PEER_`, and mostly a flag: `streams = 4`,
`MX_PEER_STREAMS=4`, `--streams 4`. A flag beats the environment, that beats the file, that beats
the default. `mx config show` shows the values and where they come from. In Python they are
`settings=mx.config.load({"streams": 4})`.

This page is made of the fields of `mx.config.Settings` by `python -m tests.support.settings_page`.
"""


def page() -> str:
    """Return the page as the fields have it."""
    rows = ["| setting | flag | of | meaning |", "|---|---|---|---|"]
    for name, about in descriptions().items():
        verbs = ", ".join(
            {"coordinator": "mx-coordinator", "show": "config show"}.get(verb, verb).replace(
                "_", " "
            )
            for verb in about.verbs
        )
        flag = f"`{about.flag} {about.metavar}".strip() + "`" if verbs else ""
        cells = (f"`{name}`", flag, verbs, in_flags(about.text))
        escaped = [cell.replace("|", "\\|") for cell in cells]
        rows.append(f"| {' | '.join(escaped)} |")
    return "\n".join([_HEAD, *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
