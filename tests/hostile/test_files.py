"""The right weights beside other files, and other weights on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from mx.errors import EXIT_INTEGRITY, EXIT_NO_SOURCE, EXIT_OK
from tests.hostile.site import (
    CONFIG,
    END_S,
    SIDE_FILE,
    Site,
    Started,
    Weights,
    failed,
    left,
    succeeded,
)
from tests.support.commands import Run, serve, start_coordinator

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(240)]


@pytest.mark.parametrize("named", ["with files", "weights alone"])
def test_other_files_that_were_there_first(
    run: Run, site: Site, other_files: Weights, tmp_path: Path, named: str
) -> None:
    """The pin with files gets those files; the identity gets the weights, with whichever."""
    out, name, weights = tmp_path / "out", f"m {named}", site.weights
    serve(run, other_files.folder, name, site.coordinator)
    serve(run, weights.folder, name, site.coordinator)
    pin = weights.pin if named == "with files" else weights.identity
    where = ("--coordinator", site.coordinator, "--out", str(out))
    succeeded(run("pull", f"{name}@{pin}", *where, "--json"), weights, out)
    assert named == "weights alone" or (out / SIDE_FILE).read_bytes() == CONFIG


def test_the_pin_with_files_of_a_source_that_has_others(
    run: Run, site: Site, other_files: Weights, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    liar = serve(run, other_files.folder, "n", site.coordinator).json()["endpoint"]
    pinned = f"n@{site.weights.pin}"
    where = ("--coordinator", site.coordinator, "--out", str(out), "--json")
    failed(run("pull", pinned, *where), "n", out=out)
    failed(run("pull", pinned, "--from", f"peer={liar}", *where), liar, out=out)


def test_other_bytes_of_the_pinned_files(
    run: Run, site: Site, start: Started, tmp_path: Path
) -> None:
    weights, pinned = site.weights, f"m@{site.weights.pin}"
    liar = start.liar(site.coordinator, files="others")
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    where = ("--coordinator", site.coordinator, "--json")
    succeeded(run("pull", pinned, "--out", str(beside), *where), weights, beside)
    assert (beside / SIDE_FILE).read_bytes() == CONFIG
    pull = run("pull", pinned, "--from", f"peer={liar}", "--out", str(alone), *where)
    failed(pull, liar, out=alone)


@pytest.mark.parametrize("lie", ["others", "endless", "silent", "stopped"])
def test_files_alone_come_from_a_source_that_does_not_lie(
    run: Run, weights: Weights, start: Started, tmp_path: Path, lie: str
) -> None:
    """The liar, the oldest source, is asked first; what it sent is not among what is written."""
    pinned, (coordinator, _) = f"m@{weights.pin}", start_coordinator(run)
    liar = start.liar(coordinator, files=lie)
    honest = serve(run, weights.folder, "m", coordinator).json()["endpoint"]
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    where = ("--coordinator", coordinator, "--files-only", "--json")
    pull = run("pull", pinned, "--out", str(beside), *where)
    report = pull.json(END_S)
    assert pull.wait(END_S) == EXIT_OK, pull.err
    assert {path.name: path.read_bytes() for path in beside.iterdir()} == {SIDE_FILE: CONFIG}
    assert report["files"] == {"count": 1, "bytes": len(CONFIG), "source": honest}
    assert set(left(report)) == {liar} and report["pin"] == weights.pin
    pull = run("pull", pinned, "--from", f"peer={liar}", "--out", str(alone), *where)
    failed(pull, liar, code=EXIT_INTEGRITY if lie == "others" else EXIT_NO_SOURCE, out=alone)
    assert [path.name for path in tmp_path.iterdir()] == ["beside"]


def test_files_alone_of_a_pin_that_no_source_has(
    run: Run, site: Site, other_files: Weights, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    other = serve(run, other_files.folder, "o", site.coordinator).json()["endpoint"]
    where = ("--coordinator", site.coordinator, "--files-only", "--out", str(out), "--json")
    failed(run("pull", f"o@{site.weights.pin}", *where), "o", out=out)
    pinned = f"o@{site.weights.pin}"
    failed(run("pull", pinned, "--from", f"peer={other}", *where), other, out=out)
    auto = f"auto={other_files.folder}"
    failed(run("pull", pinned, "--from", auto, *where), "o", out=out)
    assert not out.exists()


@pytest.mark.parametrize("how", ["disk", "auto"])
def test_other_weights_on_the_disk(
    run: Run, site: Site, other_weights: Weights, tmp_path: Path, how: str
) -> None:
    """A pin holds wherever the weights come from. No source has this model."""
    out = tmp_path / "out"
    pinned = f"nowhere@{site.weights.identity}"
    where = ("--coordinator", site.coordinator, "--from", f"{how}={other_weights.folder}")
    pull = run("pull", pinned, *where, "--out", str(out), "--json")
    failed(pull, str(other_weights.folder), code=EXIT_INTEGRITY, out=out)
