"""Who owns a name, through restarts of everybody, and next to strangers. Real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from mx import api, config
from mx.core.variant import ProcessingKey
from mx.engines.replica import choice
from mx.wire.listing import SourceStatus
from tests.integration.owners import User, user
from tests.support.commands import Command, Run, environment, start_coordinator
from tests.support.outcomes import until

# Each starts several processes.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

CHANGES = """
with source.changing():
    write(lent, {seed})
"""
LENDS = "lent = tensors({seed}); source = mx.serve(lent, model='m', copy=False, embed=False)"


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Return what the users' `tensors` makes."""
    made = np.random.default_rng(seed)
    arrays = {f"model.layers.{i}.w": made.random(1 << 16, np.float32) for i in range(3)}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Site:
    """A coordinator that restarts, and the processes of users."""

    def __init__(self, run: Run, folder: Path, stack: ExitStack) -> None:
        self._run, self._stack, self._folder = run, stack, folder
        self.address, self._process = start_coordinator(run)

    def stop(self) -> None:
        self._process.end()

    def start(self) -> None:
        port = int(self.address.rpartition(":")[2])
        self._process = start_coordinator(self._run, port=port)[1]

    def user(self, name: str) -> User:
        return self._stack.enter_context(user(self.address, self._folder / name))

    def sources(self) -> list[SourceStatus]:
        return api.list_sources("m", coordinator=self.address)

    def means(self, seed: int, name: str = "m") -> bool:
        """True if a pull of the name gets these weights."""
        expected = weights(seed)
        with api.pull(name, coordinator=self.address) as pull:
            pull.wait(60)
            found = pull.state_dict()
            return all(torch.equal(found[name], expected[name]) for name in expected)

    def replica(self) -> Command:
        """A process that holds what the name means, and is listed."""
        before = len(self.sources())
        command = self._run("pull", "m", "--coordinator", self.address, "--hold")
        command.until(lambda: len(self.sources()) > before, "listed replica")
        return command


@pytest.fixture
def site(run: Run, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(run, tmp_path, stack)


def test_a_coordinator_restarts_inside_changing_while_a_replica_lives(site: Site) -> None:
    owner = site.user("owner")
    owner.must(LENDS.format(seed=1))
    site.replica()
    owner.must("change = source.changing(); change.__enter__()")
    site.stop()
    site.start()
    until(lambda: len(site.sources()) == 1, "one source")  # the replica
    owner.must("write(lent, 2); change.__exit__(None, None, None)")
    assert owner.does("source.withdrawn") == "''"
    assert site.means(2)
    owner.must(CHANGES.format(seed=3))
    assert site.means(3)
    assert site.means(1, "m:main")  # the replica, whose revision keeps its meaning


def test_a_coordinator_restarts_inside_changing_and_no_other_source_holds_it(site: Site) -> None:
    owner = site.user("owner")
    owner.must(LENDS.format(seed=1))
    owner.must("change = source.changing(); change.__enter__()")
    site.stop()
    site.start()
    owner.must("write(lent, 2); change.__exit__(None, None, None)")
    assert site.means(2)
    # A reader that knows "main" never gets other weights under it.
    assert owner.does("str(source.model)") == "'m:main.2'"


def test_a_lender_that_was_killed_inside_changing_updates_its_name_when_it_is_back(
    site: Site,
) -> None:
    owner = site.user("owner")
    owner.must(LENDS.format(seed=1))
    site.replica()
    owner.must("change = source.changing(); change.__enter__()")
    owner.kill()
    again = site.user("owner")
    again.must(LENDS.format(seed=1))
    again.must(CHANGES.format(seed=2))
    assert again.does("source.withdrawn") == "''"
    assert site.means(2)


def test_a_lender_that_was_killed_starts_with_new_weights(site: Site) -> None:
    owner = site.user("owner")
    owner.must(LENDS.format(seed=1))
    site.replica()
    owner.must("change = source.changing(); change.__enter__()")
    owner.kill()
    again = site.user("owner")
    said = again.does("source = mx.serve(tensors(2), model='m', embed=False)")
    assert said.startswith("BindingError") and "`update`" in said
    again.must("source = mx.serve(tensors(2), model='m', embed=False, update=True)")
    assert again.does("str(source.model)") == "'m:main.2'"
    assert site.means(2)
    # Once more, with the weights that it has: they are the newest already.
    third = site.user("owner")
    third.must("source = mx.serve(tensors(2), model='m', embed=False, update=True)")
    assert third.does("str(source.model)") == "'m:main.2'"


@pytest.mark.parametrize(
    ("by", "updated"),
    [
        ("replica", True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("replica", False), ("owner", False), ("owner", True))
        ),
    ],
)
def test_an_owner_begins_anew_before_who_holds_the_old_weights_brings_a_receipt(
    site: Site, updated: bool, by: str
) -> None:
    """At a coordinator that has restarted, too, and so knows nothing of the old weights."""
    owner, other = site.user("owner"), site.user(by)
    owner.must(LENDS.format(seed=1))
    if updated:
        owner.must(CHANGES.format(seed=3))
    if by == "replica":
        other.must("pull = mx.pull('m', hold=True); pull.wait(60); source = pull.hold()")
    else:
        other.must(f"source = mx.serve(tensors({3 if updated else 1}), model='m', update=True)")
    until(lambda: len(site.sources()) == 2, "two sources")
    os.kill(other.pid, signal.SIGSTOP)
    try:
        owner.kill()
        site.stop()
        site.start()
        again = site.user("owner")
        again.must("source = mx.serve(tensors(2), model='m', embed=False, update=True)")
        assert again.does("str(source.model)") == "'m'"
    finally:
        os.kill(other.pid, signal.SIGCONT)
    number = 3 if updated else 2
    until(lambda: again.does("source.model.revision") == f"'main.{number}'", "revision")
    assert again.does("source.stats().pin_only") == "False"
    assert site.means(2)
    assert site.means(3 if updated else 1, "m:main.2" if updated else "m:main")
    assert again.does("source.update(tensors(4)).revision") == f"'main.{number + 1}'"


def test_what_another_holder_registers_later_is_not_updated_again(site: Site) -> None:
    first, second = site.user("owner"), site.user("owner")
    first.must("source = mx.serve(tensors(1), model='m', embed=False, update=True)")
    second.must("source = mx.serve(tensors(2), model='m', embed=False, update=True)")
    assert second.does("str(source.model)") == "'m:main.2'"
    for restarts in (False, True):  # then a receipt says what the second one has registered
        if restarts:
            site.stop()
            site.start()
            until(lambda: len(site.sources()) == 2, "two sources")
        until_s = time.monotonic() + 2.5  # the first one looks every second
        while time.monotonic() < until_s:
            assert site.means(2) and first.does("str(source.model)") == "'m'"


def test_a_rank_that_starts_again_stays_with_the_others(site: Site) -> None:
    key = "mx.ProcessingKey(engine='x', version='1', tp=({}, 2), dtype='bf16')"
    serves = "source = mx.serve(tensors({}), model='m', variant={}, embed=False, update=True)"
    ranks = [site.user("owner") for _ in range(2)]
    for rank, each in enumerate(ranks):
        each.must(serves.format(rank + 1, key.format(rank)))
    ranks[0].kill()
    again = site.user("owner")
    again.must(serves.format(1, key.format(0)))
    assert again.does("source.model.revision") == "'main'"
    (bundle,) = api.list_bundles("m", coordinator=site.address)
    assert bundle.complete and bundle.named
    # With new weights both go on, and so does one that has missed an update.
    again.kill()
    for number in (2, 3):
        assert ranks[1].does(f"source.update(tensors({number + 1})).revision") == f"'main.{number}'"
    third = site.user("owner")
    third.must(serves.format(5, key.format(0)))
    assert third.does("source.model.revision") == "'main.3'"
    named = [
        each.revision for each in api.list_bundles("m", coordinator=site.address) if each.named
    ]
    assert named == ["main.3"]


def test_processes_of_one_user_are_one_owner_and_those_of_two_are_not(site: Site) -> None:
    first, second, other = (site.user(name) for name in ("one", "one", "two"))
    first.must("source = mx.serve(tensors(1), model='m', embed=False)")
    for each in (second, other):
        each.must("source = mx.serve(tensors(1), model='m', embed=False)")
    assert second.does("str(source.update(tensors(2)))") == "'m:main.2'"
    said = other.does("source.update(tensors(3))")
    assert said.startswith("BindingError")
    for variant in ("checkpoint", "lora"):
        said = other.does(f"mx.serve(tensors(3), model='m', variant={variant!r}, update=True)")
        assert said.startswith("BindingError") and "another name key" in said
    assert len(site.sources()) == 3
    assert site.means(2)
    # The other holder of the key has not seen that update: its own would undo it.
    assert first.does("source.update(tensors(4))").startswith("BindingError")
    assert first.does("str(source.update(tensors(2)))") == "'m:main.2'"
    assert first.does("str(source.update(tensors(4)))") == "'m:main.3'"
    assert site.means(4)


def test_weights_that_a_stranger_has_listed_by_their_pin_are_not_what_the_name_means(
    site: Site,
) -> None:
    """A lender that does not own the name may change its memory to bound weights only."""
    owner, lender, stranger = site.user("owner"), site.user("lender"), site.user("stranger")
    owner.must("source = mx.serve(tensors(1), model='m', embed=False)")
    lender.must(LENDS.format(seed=1))
    stranger.must("source = mx.serve(tensors(2), model='m', embed=False)")
    said = lender.does(f"exec({CHANGES.format(seed=2)!r})")
    assert said.startswith("BindingError") and "another name key" in said
    assert "another name key" in lender.does("source.withdrawn")
    owner.must("key = source.update(tensors(2))")
    lender.must(CHANGES.format(seed=2))
    assert lender.does("source.model.revision, source.withdrawn") == "('main.2', '')"


def test_a_stranger_who_registers_first_after_a_restart_does_not_get_the_name(site: Site) -> None:
    owner, stranger = site.user("owner"), site.user("stranger")
    owner.must("source = mx.serve(tensors(1), model='m', embed=False)")
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        site.stop()
        site.start()
        stranger.must("evil = mx.serve(tensors(6), model='m', embed=False)")
        assert site.means(6)
    finally:
        os.kill(owner.pid, signal.SIGCONT)
    until(lambda: len(site.sources()) == 2, "two sources")
    assert site.means(1)
    pinned = stranger.does("evil.pinned").strip("'")
    assert site.means(6, pinned)
    assert owner.does("source.stats().pin_only") == "False"
    assert owner.does("str(source.update(tensors(2)))") == "'m:main.2'"


@pytest.mark.long
def test_an_honest_source_that_starts_anew_on_a_taken_name_serves_its_pin(site: Site) -> None:
    stranger, owner = site.user("stranger"), site.user("owner")
    stranger.must("evil = mx.serve(tensors(6), model='m', embed=False)")
    owner.must("source = mx.serve(tensors(1), model='m', embed=False)")
    assert owner.does("source.stats().pin_only") == "True"
    pinned = owner.does("source.pinned").strip("'")
    assert site.means(1, pinned) and site.means(6)
    stranger.must("evil.close()")
    # Once the stranger has not come back for a minute.
    until(lambda: owner.does("source.stats().pin_only") == "False", "names", 120.0)
    assert site.means(1)


def test_a_stranger_that_lies_in_wait_does_not_get_the_name_when_its_owner_starts_anew(
    site: Site,
) -> None:
    first, stranger = site.user("owner"), site.user("stranger")
    first.must("source = mx.serve(tensors(1), model='m', embed=False)")
    stranger.must("evil = mx.serve(tensors(6), model='m', embed=False)")
    first.must("source.close()")
    until(lambda: len(site.sources()) == 1, "one source")
    again = site.user("owner")
    again.must("source = mx.serve(tensors(2), model='m', embed=False)")
    assert again.does("source.stats().pin_only") == "False"
    assert stranger.does("evil.stats().pin_only") == "True"
    assert again.does("str(source.update(tensors(3)))") == "'m:main.2'"
    assert site.means(3)


def test_without_a_receipt_weights_are_found_by_their_pin_only(site: Site, tmp_path: Path) -> None:
    """A relay, whose word proves nothing."""
    owner = site.user("owner")
    owner.must("source = mx.serve(tensors(1), model='m', embed=False)")
    pinned = owner.does("source.pinned").strip("'")
    site.replica()
    owner.must("source.close()")
    site.stop()
    state = Path(environment()["XDG_STATE_HOME"], "mx", "receipt.key")
    kept = state.rename(tmp_path / "receipt.key")
    try:
        site.start()
        until(lambda: bool(site.sources()), "a source")
        assert [each.record.pin_only for each in site.sources()] == [True]
        assert site.means(1, pinned)
    finally:
        site.stop()
        kept.rename(state)
    site.start()
    until(lambda: bool(site.sources()), "a source")
    assert site.means(1)


KEY = ProcessingKey(engine="vllm", version="1", tp=(0, 1), dtype="bf16", state="processed")


@pytest.mark.parametrize("whose", ["owner", "stranger"])
def test_a_state_is_taken_from_the_names_owner_only(site: Site, whose: str) -> None:
    owner, lender = site.user("owner"), site.user(whose)
    owner.must("source = mx.serve(tensors(1), model='m', embed=False)")
    identity = owner.does("source.identity_hex").strip("'")
    variant = str(choice.with_checkpoint(KEY, identity[:16]))
    lender.must(f"s = mx.serve(tensors(6), model='m', variant={variant!r}, embed=False)")
    settings = config.load({"coordinator": site.address})
    found = choice.look("m", {"processed": KEY}, settings=settings)
    assert found.state == ("processed" if whose == "owner" else "checkpoint")


@pytest.mark.parametrize("reader", ["owner", "stranger"])
def test_under_a_pin_a_state_is_taken_only_by_a_holder_of_the_key(site: Site, reader: str) -> None:
    owner = site.user("owner")
    owner.must("source = mx.serve(tensors(1), model='m', embed=False)")
    identity = owner.does("source.identity_hex").strip("'")
    variant = str(choice.with_checkpoint(KEY, identity[:16]))
    owner.must(f"s = mx.serve(tensors(6), model='m', variant={variant!r}, embed=False)")
    reading = site.user(reader)
    reading.must("from mx.engines.replica import choice")
    reading.must(f"key = mx.ProcessingKey.parse({str(KEY)!r})")
    reading.must(f"found = choice.look('m', dict(processed=key), pin={identity!r})")
    expected = "processed" if reader == "owner" else "checkpoint"
    assert reading.does("found.state") == repr(expected)
    assert reading.does("found.refused") == str(reader != "owner")


def test_serve_update_and_keys_in_files(run: Run, site: Site, tmp_path: Path) -> None:
    folders = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        from safetensors.torch import save_file

        save_file(weights(seed), folder / "model.safetensors")
        folders.append(str(folder))
    key = tmp_path / "team.key"
    made = run("keygen", str(key), "--json")
    assert made.json()["name_key"] == str(key)
    assert made.wait() == 0 and key.stat().st_mode & 0o777 == 0o600
    again = run("keygen", str(key))
    assert again.wait() == 2 and "already" in again.err

    def serve(folder: str, *more: str) -> Command:
        return run("serve", folder, "--model", "m", "--coordinator", site.address, "--json", *more)

    first = serve(folders[0], "--name-key", str(key))
    assert first.json()["revision"] == "main"
    refused = serve(folders[1], "--name-key", str(key))
    assert refused.wait() == 5 and "--update" in refused.err
    stranger = serve(folders[1], "--update")
    assert stranger.wait() == 5 and "--name-key" in stranger.err
    updated = serve(folders[1], "--name-key", str(key), "--update")
    assert updated.json()["revision"] == "main.2"
    assert site.means(2)
    key.chmod(0o644)
    wrong = serve(folders[0], "--name-key", str(key))
    assert wrong.wait() == 2 and "0644" in wrong.err and "chmod 600" in wrong.err
