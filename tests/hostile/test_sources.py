"""Sources with the honest identity and layout that lie about bytes, block digests and memory: each
is found, alone or beside an honest one, and no pull delivers what it sends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mx.errors import EXIT_INTEGRITY
from tests.hostile.liar import PAGES
from tests.hostile.site import Site, Started, Weights, failed, left, succeeded
from tests.support.commands import Command, Run, serve

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

NOBODY = 65534
OWN_DIGESTS = {"bytes": "others", "digests": "own"}
TCP = ("--transport", "tcp")
COPIED = ("--transport", "shm", "--no-attach", "--verify", "strong")
ATTACHED = ("--verify", "strong")
MISMATCH = "match the model's identity"


def pull(run: Run, site: Site, *more: str) -> Command:
    return run("pull", site.pinned, "--coordinator", site.coordinator, "--json", *more)


@pytest.mark.parametrize("layout", ["garbage", "backwards"])
def test_a_layout_that_does_not_follow_from_the_weights(
    run: Run, site: Site, start: Started, tmp_path: Path, layout: str
) -> None:
    """The second one has every byte right: peers would be divided by it."""
    out, liar = tmp_path / "out", start.liar(layout=layout)
    failed(pull(run, site, "--from", f"peer={liar}", "--out", str(out)), "layout", out=out)


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "alone"])
@pytest.mark.parametrize(
    ("lies", "way"),
    [
        pytest.param(OWN_DIGESTS, TCP, id="own digests"),
        pytest.param({"bytes": "others"}, TCP, id="right digests"),
        pytest.param({"bytes": "forged"}, TCP, id="forged"),
        pytest.param({"rows": "others"}, TCP, id="rows"),
        pytest.param({"bytes": "forged"}, COPIED, id="forged, copied"),
        pytest.param(OWN_DIGESTS, ATTACHED, id="own digests, attached"),
    ],
)
def test_other_bytes(
    run: Run, site: Site, start: Started, tmp_path: Path, lies: Any, way: Any, beside: bool
) -> None:
    out = tmp_path / "out"
    if beside:
        liar = start.liar(site.coordinator, **lies)
        report = succeeded(pull(run, site, "--out", str(out), *way), site.weights, out)
        assert MISMATCH in left(report)[liar]
    else:
        liar = start.liar(**lies)
        alone = pull(run, site, "--from", f"peer={liar}", "--out", str(out), *way)
        failed(alone, liar, MISMATCH, code=EXIT_INTEGRITY, out=out)


@pytest.mark.parametrize(
    ("way", "verified"), [((), "source"), (("--no-attach",), "xxh3")], ids=["attached", "copied"]
)
def test_this_user_is_believed_and_the_report_says_so(
    run: Run, site: Site, start: Started, way: Any, verified: str
) -> None:
    """What `--verify strong` is for: see above."""
    liar = start.liar(bytes="forged")
    report = pull(run, site, "--from", f"peer={liar}", *way).json()
    assert report["verified"] == verified


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


@pytest.mark.parametrize("attach", [True, False], ids=["attached", "copied"])
def test_tickets_of_another_process(
    run: Run, site: Site, start: Started, other_weights: Weights, attach: bool
) -> None:
    """The memory that they lead to is this user's, but holds other weights."""
    honest = serve(run, other_weights.folder, "n", site.coordinator).json()["endpoint"]
    uid: dict[str, Any] = {"uid": NOBODY} if os.getuid() == 0 else {}
    liar = start.liar(tickets=honest, **OWN_DIGESTS, **uid)
    here: dict[str, Any] = {"model": site.pinned, "peer": liar, "attach": attach}
    failed(start.module("puller", **here, right=site.weights.hashes), liar)


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "alone"])
@pytest.mark.parametrize("pages", PAGES)
def test_pages(
    run: Run, site: Site, start: Started, tmp_path: Path, pages: str, beside: bool
) -> None:
    out, name = tmp_path / "out", f"m {pages}"
    arguments = [f"{name}@{site.weights.identity}", "--coordinator", site.coordinator]
    arguments += ["--out", str(out), "--json", *TCP]
    # Listed first, so asked first.
    liar = start.liar(site.coordinator if beside else None, model=name, pages=pages)
    if beside:
        serve(run, site.weights.folder, name, site.coordinator)
        succeeded(run("pull", *arguments), site.weights, out)
    else:
        failed(run("pull", *arguments, "--from", f"peer={liar}"), liar, out=out)


def test_a_crowd_that_gives_no_pages(run: Run, site: Site, start: Started, tmp_path: Path) -> None:
    """One process can register as any number of sources."""
    out = tmp_path / "out"
    start.liar(site.coordinator, model="crowded", pages="silent", crowd=30)
    serve(run, site.weights.folder, "crowded", site.coordinator)
    pinned = f"crowded@{site.weights.identity}"
    where = ("--coordinator", site.coordinator, "--out", str(out), "--json", *TCP)
    succeeded(run("pull", pinned, *where), site.weights, out)
