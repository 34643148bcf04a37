"""The right weights beside other files, and other weights on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from mx.errors import EXIT_INTEGRITY
from tests.hostile.conftest import CONFIG, SIDE_FILE, Site, Started, Weights, failed, succeeded
from tests.integration.conftest import Run, serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


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
