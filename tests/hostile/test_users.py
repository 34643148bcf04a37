"""A source of another user, whom the kernel shows to the reader by the reader's own uid: the
reader's user namespace does not map that user. Namespaces and users are real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.errors import EXIT_INTEGRITY
from tests.hostile.site import Site, Started, failed, left, succeeded
from tests.support.commands import Command
from tests.support.privileges import NOBODY, as_root
from tests.support.user_namespaces import entering, number, user_namespace

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300), as_root]

ATTACKER = 4321
MISMATCH = "match the model's identity"
AMBIGUOUS = f"other users may have this process's uid {NOBODY}"


class Readers:
    """Starts commands of nobody in a user namespace that maps no attacker, beside the host's
    network and processes, as rootless containers may have it."""

    def __init__(self, pid: int) -> None:
        self.namespace = number(pid)
        self._change = entering(pid, NOBODY)
        self._started: list[Command] = []

    def __call__(self, *arguments: str) -> Command:
        class Reader(Command):
            change = self._change

        # A new interpreter where none is forked could not import what only root may read.
        self._started.append(Reader(*arguments))
        return self._started[-1]

    def end(self) -> None:
        for each in self._started:
            each.end()


@pytest.fixture
def read() -> Iterator[Readers]:
    with user_namespace(0, NOBODY) as pid:
        readers = Readers(pid)
        yield readers
        readers.end()


def lying(start: Started, site: Site, read: Readers) -> str:
    """Start a source of the attacker with other weights, which claims to be the reader's user."""
    place = {"uid": NOBODY, "user_namespace": read.namespace}
    return start.liar(site.coordinator, bytes="forged", uid=ATTACKER, place=place)


@pytest.mark.parametrize("way", [(), ("--no-attach",)], ids=["attached", "copied"])
def test_it_is_not_believed_alone(
    site: Site, start: Started, read: Readers, way: tuple[str, ...]
) -> None:
    liar = lying(start, site, read)
    where = ("--from", f"peer={liar}", "--coordinator", site.coordinator, "--json")
    failed(read("pull", site.pinned, *where, *way), liar, MISMATCH, code=EXIT_INTEGRITY)


def test_beside_an_honest_source_the_weights_are_right(
    site: Site, start: Started, read: Readers, tmp_path: Path
) -> None:
    """What nobody writes is nobody's, though other users' files are shown as such."""
    liar, out = lying(start, site, read), tmp_path / "out"
    where = ("--coordinator", site.coordinator, "--out", str(out), "--json")
    report = succeeded(read("pull", site.pinned, *where), site.weights, out)
    assert {each["transport"] for each in report["paths"]} == {"tcp"}
    assert MISMATCH in left(report).get(liar, MISMATCH)


def test_the_reason_is_shown(site: Site, start: Started, read: Readers) -> None:
    liar = lying(start, site, read)
    where = ("--from", f"peer={liar}", "--coordinator", site.coordinator)
    plan = read("plan", site.pinned, *where)
    assert plan.wait() == 0
    assert AMBIGUOUS in " ".join(plan.out.split()), plan.out
    failed(read("pull", site.pinned, *where, "--transport", "shm", "--json"), AMBIGUOUS)
