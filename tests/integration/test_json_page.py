"""docs/json.md names the fields that the verbs print, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Run, serve

pytestmark = pytest.mark.integration

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
NAME = re.compile(r"`([a-z_]+)`")
#: Fields that only some objects have, or that are those of another verb.
SOMETIMES = {
    "pull": {
        *("defined_by", "steps", "files", "moved_bytes", "newest"),
        *("left_out_more", "base", "companions", "hub", "stages"),
    },
    "serve": {"base", "companions", "hub"},
    "models": {"left_out", "base", "companions", "hub"},
    "plan": {"subset"},
    "verify": {"digests", "remembered"},
}


def sections() -> dict[str, str]:
    """Return the text below each heading of a verb, by the verb."""
    _, *parts = PAGE.read_text(encoding="utf-8").split("\n## ")
    heads = [part.partition("\n") for part in parts]
    return {head.removeprefix("mx "): text for head, _, text in heads}


def fields(text: str) -> set[str]:
    """Return the names in the first column of the tables of a section, whose heads are `field`."""
    found: set[str] = set()
    for table in re.split(r"\n\n", text):
        if table.lstrip().startswith("| field"):
            for row in table.strip().splitlines()[2:]:
                found |= set(NAME.findall(row.split("|")[1]))
    return found


def keys(value: Any) -> set[str]:
    """Return the keys of an object and of those in it."""
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set[str]().union(*map(keys, value)) if isinstance(value, list) else set()


def test_the_page_names_what_is_printed(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    at = ("--coordinator", coordinator, "--json")
    out = str(tmp_path / "out")
    source = serve(run, checkpoint, "small", coordinator)
    printed = {"serve": json.loads(source.out)}
    for verb, *arguments in (
        ("pull", "small", "--out", out, "--transport", "tcp", *at),
        ("models", *at),
        ("sources", *at),
        ("top", *at),
        ("plan", "small", *at),
        ("verify", out, "--json"),
    ):
        command = run(verb, *arguments)
        command.wait(60)
        printed[verb] = command.json()
    said = sections()
    for verb, found in printed.items():
        assert found.pop("schema") == 1
        text = said[verb] + said["sources"] * (verb == "top")
        if verb == "plan":  # the memory's own fields are the Python API's
            for memory in found["sources"]:
                memory["regions"] = memory["layers"] = memory["devices"] = None
            for path in found["paths"]:
                path["devices"] = None
        assert keys(found) <= set(NAME.findall(text)), verb
        missing = fields(said[verb]) - keys(found) - SOMETIMES.get(verb, set())
        # There is neither a bundle nor a pull that runs.
        missing -= {"ranks", "complete", "missing", "missing_count", "named"}
        if verb != "top":
            assert not missing, verb
