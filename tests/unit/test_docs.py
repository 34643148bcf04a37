"""The README and docs/: the index lists every page once, and no link leads nowhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
#: What is in parentheses behind the text of a link, which may go over a line's end.
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)


def links_of(page: Path) -> list[str]:
    """Return the destinations of a page's links outside of code."""
    # The text of a link may be code, so only its marks go.
    text = CODE.sub("", FENCED.sub("", page.read_text(encoding="utf-8")))
    return LINK.findall(text)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(anchor)
    return frozenset(found)


def fault_of(page: Path, link: str) -> str:
    """Return why a link of a page leads nowhere, or ""."""
    if re.match(r"[a-z]+:", link):
        return ""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return "no such file"
    if anchor and anchor not in anchors_of(target):
        return "no such heading"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    faults = {link: fault for link in links_of(page) if (fault := fault_of(page, link))}
    assert faults == {}


def test_the_index_lists_every_page_once() -> None:
    pages = sorted(page.name for page in INDEX.parent.glob("*.md") if page != INDEX)
    listed = sorted(link for link in links_of(INDEX) if "/" not in link)
    assert listed == pages


def test_faults_are_found(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    assert fault_of(page, "docs/nowhere.md") == "no such file"
    assert fault_of(page, "docs/README.md#nowhere") == "no such heading"
    assert fault_of(page, "../outside.md") == "no such file"
    assert fault_of(page, "https://example.org/nowhere") == ""
    made = tmp_path / "page.md"
    made.write_text(
        "# One `two`\n\n## A, b\n## A, b\n```\n# no\n[x](no)\n```\n[`x`](yes) `[y](no)`\n"
    )
    assert anchors_of(made) == {"one-two", "a-b", "a-b-1"}
    assert links_of(made) == ["yes"]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:mx|tests|transports|benchmarks|proto)/[\w./-]+)`", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
