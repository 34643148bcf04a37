"""Sources with the honest identity and layout that lie about bytes and block digests: each is found,
alone or beside an honest one, and no pull delivers what it sends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mx.errors import EXIT_INTEGRITY
from tests.hostile.conftest import Site, Started, Weights, failed, left, succeeded
from tests.hostile.liar import PAGES
from tests.integration.conftest import Run, serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NOBODY = 65534
OWN_DIGESTS = {"bytes": "others", "digests": "own"}
LIES = [OWN_DIGESTS, {"bytes": "others"}, {"bytes": "forged"}]
TCP = ("--transport", "tcp")
COPIED = ("--transport", "shm", "--no-attach", "--verify", "strong")
ATTACHED = ("--verify", "strong")
WAYS = [TCP, COPIED, ATTACHED]
MISMATCH = "match the model's identity"


def pull(run: Run, site: Site, *more: str) -> Any:
    return run("pull", site.pinned, "--coordinator", site.coordinator, "--json", *more)


@pytest.mark.parametrize("way", WAYS, ids=["tcp", "copied", "attached"])
@pytest.mark.parametrize("lies", LIES, ids=["own digests", "right digests", "forged"])
def test_other_bytes_alone(
    run: Run, site: Site, start: Started, tmp_path: Path, lies: Any, way: tuple[str, ...]
) -> None:
    liar, out = start.liar(**lies), tmp_path / "out"
    pulling = pull(run, site, "--from", f"peer={liar}", "--out", str(out), *way)
    failed(pulling, liar, MISMATCH, code=EXIT_INTEGRITY, out=out)


@pytest.mark.parametrize("way", WAYS, ids=["tcp", "copied", "attached"])
@pytest.mark.parametrize("lies", LIES, ids=["own digests", "right digests", "forged"])
def test_other_bytes_beside_the_right_ones(
    run: Run, site: Site, start: Started, tmp_path: Path, lies: Any, way: tuple[str, ...]
) -> None:
    liar, out = start.liar(site.coordinator, **lies), tmp_path / "out"
    report = succeeded(pull(run, site, "--out", str(out), *way), site.weights, out)
    assert MISMATCH in left(report)[liar]


def test_what_attached_memory_is_said_to_be(run: Run, site: Site, start: Started) -> None:
    """A process of the same user is believed, and the report says so."""
    liar = start.liar(**OWN_DIGESTS)
    report = pull(run, site, "--from", f"peer={liar}").json()
    assert report["verified"] == "source"
    assert [path["transport"] for path in report["paths"]] == ["shm-attach"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
@pytest.mark.parametrize("way", [(), ("--no-attach",), ("--transport", "shm")], ids=str)
def test_another_user_is_not_believed(
    run: Run, site: Site, start: Started, tmp_path: Path, way: tuple[str, ...]
) -> None:
    """It claims to be this user."""
    liar = start.liar(site.coordinator, uid=NOBODY, **OWN_DIGESTS)
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    here = pull(run, site, "--from", f"peer={liar}", "--out", str(alone), *way)
    failed(here, liar, f"of uid {NOBODY}" if "shm" in way else MISMATCH, out=alone)
    succeeded(pull(run, site, "--out", str(beside), *way), site.weights, beside)


@pytest.mark.parametrize("attach", [True, False], ids=["attach", "copy"])
def test_tickets_of_another_process(
    run: Run, site: Site, start: Started, other_weights: Weights, attach: bool
) -> None:
    """The memory that they lead to is this user's, but holds other weights."""
    honest = serve(run, other_weights.folder, "n", site.coordinator).json()["endpoint"]
    uid = {"uid": NOBODY} if os.getuid() == 0 else {}
    liar = start.liar(tickets=honest, **OWN_DIGESTS, **uid)
    here = {"model": site.pinned, "peer": liar, "attach": attach, "right": site.weights.hashes}
    failed(start.module("puller", **here), liar)


@pytest.mark.parametrize("pages", PAGES)
def test_wrong_pages_alone(
    run: Run, site: Site, start: Started, tmp_path: Path, pages: str
) -> None:
    liar, out = start.liar(pages=pages), tmp_path / "out"
    pulling = pull(run, site, "--from", f"peer={liar}", "--out", str(out), *TCP)
    failed(pulling, liar, out=out)


@pytest.mark.parametrize("pages", PAGES)
def test_wrong_pages_before_the_right_ones(
    run: Run, site: Site, start: Started, tmp_path: Path, pages: str
) -> None:
    out, name = tmp_path / "out", f"m {pages}"
    start.liar(site.coordinator, model=name, pages=pages)  # listed first, so asked first
    serve(run, site.weights.folder, name, site.coordinator)
    arguments = (f"{name}@{site.weights.identity}", "--coordinator", site.coordinator, "--json")
    succeeded(run("pull", *arguments, "--out", str(out), *TCP), site.weights, out)
