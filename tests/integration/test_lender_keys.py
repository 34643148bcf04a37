"""Lender keys: what a replica may do with one, and who believes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mx
from mx import api, config, keyfile
from mx.core.ownership import certificate_text
from mx.core.types import ModelKey, SourceRecord
from mx.engines.replica import choice
from mx.engines.replica.lender import Lender
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import slots_of
from mx.errors import BindingError, ConfigError, MxError, NotAllowedError
from mx.lenderkey import STATES, Certificate, certified, check_lender
from mx.namekey import LenderKey, NameKey
from tests.support.clients import client_of
from tests.support.commands import Run, start_coordinator
from tests.support.records import make_documents, make_record

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KEY = mx.ProcessingKey(engine="test", version="1", dtype="fp32", state="processed")
YEAR_S = 365 * 86400.0


def weights(version: int) -> dict[str, Any]:
    return {f"model.layers.{i}.w": np.full(4096, version, np.uint8) for i in range(3)}


class Fleet:
    """A coordinator, the owner of `m`, who serves its checkpoint, and replicas."""

    def __init__(self, run: Run, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._run, self._arguments = run, (*arguments, "--receipt-key", str(folder / "receipts"))
        self.address, self.daemon = start_coordinator(run, *self._arguments)
        self.owner = NameKey(keyfile.make(folder / "name.key"))
        keyfile.make(folder / "lender.key", self.issue("m", "other"))
        self.state = str(KEY)

    def issue(self, *names: str, **given: Any) -> bytes:
        """Return a lender key's file."""
        said = {"kinds": [STATES], "expires_s": int(time.time() + YEAR_S), **given}
        return LenderKey.issue(self.owner, names, **said)

    def settings(self, key: str) -> config.Settings:
        """Return those of a process that has this key file alone."""
        kind = "name_key" if key.startswith("name") else "lender_key"
        given = {"coordinator": self.address, "name_key": "", kind: str(self.folder / key)}
        return config.load(given, environ={})

    def serve(self, key: str, what: dict[str, Any], **given: Any) -> mx.Source:
        return api.serve(
            what, **{"model": "m", "embed": False, **given}, settings=self.settings(key)
        )

    def checkpoint(self, version: int = 1) -> mx.Source:
        """Serve the owner's checkpoint, of which the states are then made."""
        source = self.serve("name.key", weights(version))
        digits = source.identity_hex[: choice.CHECKPOINT_DIGITS]
        self.state = str(choice.with_checkpoint(KEY, digits))
        return source

    def chosen(self, key: str, **given: Any) -> choice.Choice:
        return choice.look("m", {"processed": KEY}, settings=self.settings(key), **given)

    def records(self) -> list[SourceRecord]:
        found = mx.list_sources("m", coordinator=self.address)
        return [each.record for each in found if each.record.model.variant == self.state]

    def restart(self) -> None:
        self.daemon.process.kill()
        self.daemon.wait()
        port = int(self.address.rpartition(":")[2])
        _, self.daemon = start_coordinator(self._run, *self._arguments, port=port)


@pytest.fixture
def fleet(run: Run, tmp_path: Path) -> Fleet:
    return Fleet(run, tmp_path)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_a_replica_lends_and_takes_states_with_a_lender_key(fleet: Fleet, stack: ExitStack) -> None:
    source = stack.enter_context(fleet.checkpoint())
    assert fleet.chosen("lender.key").state == "checkpoint"
    lent = stack.enter_context(fleet.serve("lender.key", weights(7), variant=fleet.state))
    (record,) = fleet.records()
    assert record.by_owner and not record.pin_only and record.certificate
    for key in ("name.key", "lender.key"):
        for how in ({}, {"pin": source.identity_hex}):
            found = fleet.chosen(key, **how)
            assert found.state == "processed"
            assert found.identities == {fleet.state: lent.identity_hex}
    keyfile.make(fleet.folder / "name2.key")
    assert fleet.chosen("name2.key", pin=source.identity_hex).state == "checkpoint"


def test_an_engine_lends_with_the_key_that_its_options_name(fleet: Fleet, stack: ExitStack) -> None:
    stack.enter_context(fleet.checkpoint())
    given = {"coordinator": fleet.address, "lender_key": str(fleet.folder / "lender.key")}
    model = torch.nn.Linear(8, 8)
    lender = Lender(
        slots_of(model, non_persistent=True), "m", mx.ProcessingKey.parse(fleet.state),
        LoaderOptions.read(given),
    )  # fmt: skip
    stack.callback(lender.close)
    until(lambda: lender.state != "starting")
    assert lender.state == "lending", lender.why
    assert [each.by_owner for each in fleet.records()] == [True]
    lender.withdraw("an update")
    model.weight.data.add_(1)
    lender.restore("an update")
    assert lender.state == "withdrawn" and "lender key" in lender.why
    assert not fleet.records()


def test_a_lender_key_binds_and_updates_nothing_else(fleet: Fleet, stack: ExitStack) -> None:
    source = stack.enter_context(fleet.checkpoint())
    stack.enter_context(
        api.serve(weights(3), model="mine", embed=False, settings=fleet.settings("name.key"))
    )
    refused: list[dict[str, Any]] = [
        {},  # the checkpoint
        {"update": True},
        {"variant": "other"},
        {"revision": "2"},
        {"revision": "2", "variant": fleet.state},  # a state of what the owner has not bound
        {"model": "mine", "variant": fleet.state},  # not one of its names
    ]
    for given in refused:
        with pytest.raises((BindingError, NotAllowedError)):
            fleet.serve("lender.key", weights(9), **given)
    lent = stack.enter_context(fleet.serve("lender.key", weights(7), variant=fleet.state))
    with pytest.raises(NotAllowedError, match="does not update m"):
        lent.update(weights(8), grace_s=0)
    assert lent.identity_hex == fleet.records()[0].ref.identity.hex()
    assert {each.model for each in mx.list_models(coordinator=fleet.address)} == {
        ModelKey("m"), ModelKey("mine"), ModelKey("m", variant=fleet.state),
    }  # fmt: skip
    # Its end frees nothing: the owner has the name.
    source.close()
    lent.close()
    keyfile.make(fleet.folder / "name2.key")
    stack.enter_context(fleet.serve("name2.key", weights(1), revision="2"))
    assert [each.pin_only for each in mx.list_models(coordinator=fleet.address)].count(True) == 1


def test_the_owner_replaces_a_state_that_was_lent(fleet: Fleet, stack: ExitStack) -> None:
    stack.enter_context(fleet.checkpoint())
    lent = stack.enter_context(fleet.serve("lender.key", weights(7), variant=fleet.state))
    keyfile.make(fleet.folder / "lender2.key", fleet.issue("m"))
    with pytest.raises(BindingError):  # another replica's does not
        fleet.serve("lender2.key", weights(8), variant=fleet.state)
    stack.enter_context(fleet.serve("name.key", weights(8), variant=fleet.state))
    pinned = {each.ref.identity.hex(): each.pin_only for each in fleet.records()}
    assert pinned.pop(lent.identity_hex) and list(pinned.values()) == [False]
    assert fleet.chosen("lender.key").identities == {fleet.state: next(iter(pinned))}


@pytest.mark.parametrize("state", ["memory", "sqlite"])
def test_what_was_lent_is_still_lent_after_a_restart(
    run: Run, tmp_path: Path, stack: ExitStack, state: str
) -> None:
    kept = ("--state", f"sqlite:{tmp_path / 'state.db'}") if state == "sqlite" else ()
    fleet = Fleet(run, tmp_path, *kept)
    stack.enter_context(fleet.checkpoint())
    stack.enter_context(fleet.serve("lender.key", weights(7), variant=fleet.state))
    with stack.enter_context(
        api.pull("m", variant=fleet.state, hold=True, settings=fleet.settings("lender.key"))
    ) as pull:
        pull.wait(60)
        stack.enter_context(pull.hold())
        fleet.restart()
        until(lambda: len(fleet.records()) == 2)
        assert sorted(each.by_owner for each in fleet.records()) == [False, True]
        stack.enter_context(fleet.serve("name.key", weights(8), variant=fleet.state))
        assert sum(each.pin_only for each in fleet.records()) == 2


@pytest.mark.long  # the coordinator's first minute
def test_a_lender_key_waits_for_its_owner_and_binds_no_free_name(fleet: Fleet) -> None:
    """A coordinator that has just begun can't know yet that the name is its owner's."""
    began = fleet.serve  # it tries again meanwhile
    stopped: list[bool] = []

    def stop() -> bool:
        stopped.append(True)
        return len(stopped) > 20

    with pytest.raises(MxError):
        began("lender.key", weights(7), variant=fleet.state, cancelled=stop)
    assert not fleet.records()


async def test_what_a_coordinator_and_readers_refuse(fleet: Fleet, stack: ExitStack) -> None:
    stack.enter_context(fleet.checkpoint())
    wrong = {
        "expired": fleet.issue("m", expires_s=int(time.time()) - 1),
        "kv alone": fleet.issue("m", kinds=["kv"]),
        "of another principal": fleet.issue("m", principal="spiffe://mx/replica"),
    }
    for why, content in wrong.items():
        path = fleet.folder / f"lender {why}.key"
        keyfile.make(path, content)
        with pytest.raises(NotAllowedError):
            fleet.serve(path.name, weights(7), variant=fleet.state)
    stack.enter_context(fleet.serve("lender.key", weights(7), variant=fleet.state))
    async with client_of(fleet.address) as client:
        listed = await client.list_sources("m")
    record = next(each.record for each in listed if each.record.certificate)
    lender = LenderKey.read(fleet.folder / "lender.key")
    assert fleet.owner.vouched(record) and lender.vouched(record)
    stolen = replace(record, model=record.model._replace(name="mine"))
    for spoilt in (
        replace(record, certificate=record.certificate[:-1]),
        replace(record, certificate=bytes(64) + record.certificate[64:]),
        replace(record, statement=bytes(64)),
        replace(record, commitment=NameKey(b"o" * 32).commitment("m")),
        replace(record, model=record.model._replace(variant="checkpoint")),
        replace(record, model=record.model._replace(variant=f"{fleet.state},x=1")),
        stolen,
    ):
        assert not fleet.owner.vouched(spoilt) and not lender.vouched(spoilt)
    found = certified(record)
    assert check_lender(record, None, updates=False) == found.public
    late = Certificate(found.public, found.kinds, int(time.time()) - 1)
    said = late.encode()
    expired = fleet.owner.sign("m", certificate_text("m", said)) + said
    assert not fleet.owner.vouched(replace(record, certificate=expired))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is none"),
        (b"[]", "it is none"),
        (b"{}", "it is none"),
        (b"\xff" * 32, "none"),
        (b'{"seed": "00", "certificates": {}}', "none"),
    ],
)
def test_a_file_that_is_no_lender_key_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "lender.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=why):
        LenderKey.read(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="0644"):
        LenderKey.read(path)
    with pytest.raises(ConfigError, match="mx keygen"):
        LenderKey.read(tmp_path / "missing")


def test_keygen_makes_a_lender_key(run: Run, tmp_path: Path) -> None:
    owner, path = tmp_path / "name.key", tmp_path / "lender.key"
    assert run("keygen", str(owner)).wait() == 0
    words = ("--name", "m", "--name", "n", "--expires", "90d", "--name-key", str(owner))
    made = run("keygen", "--lender", str(path), *words, "--json")
    assert made.json()["lender_key"] == str(path) and made.wait() == 0
    assert path.stat().st_mode & 0o777 == 0o600
    lender = LenderKey.read(path)
    assert lender.commitment("n") == NameKey(keyfile.read(owner)).commitment("n")
    assert lender.signs_for(ModelKey("m", variant=str(KEY))) and not lender.signs_for(ModelKey("m"))
    for more, says in (
        ((), "--name NAME"),
        (("--name", "m", "--for", "weights"), "states, kv, snapshots"),
        (("--name", "m", "--expires", "soon"), "--expires soon"),
        (("--name", "m", "--name-key", str(tmp_path / "none")), "--name-key FILE"),
    ):
        refused = run("keygen", "--lender", str(tmp_path / "no.key"), *more)
        assert refused.wait() == 2 and says in refused.err
    assert not (tmp_path / "no.key").exists()


@pytest.mark.parametrize(
    "said", [b"[1]", b'["00", ["states"], Infinity, ""]', b"[" * 2000, b"\xff"]
)
def test_a_certificate_that_its_signer_wrote_wrongly_is_refused(said: bytes) -> None:
    """Everyone may sign one, with a key pair of their own."""
    key = NameKey(b"o" * 32)
    signed = key.sign("m", certificate_text("m", said)) + said
    record = make_record(make_documents("A"), name="m", variant=str(KEY))
    record = replace(record, commitment=key.commitment("m"), certificate=signed)
    with pytest.raises(NotAllowedError):
        certified(record)
    assert not key.vouched(record)
