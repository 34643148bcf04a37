"""What a coordinator believes of those who register: signatures, nonces, receipts. Real calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from mx import codec
from mx.coordinator.daemon import Coordinator
from mx.coordinator.proofs import NONCE_S, Nonces, Proofs
from mx.core.ownership import Purpose, Receipt, proof, statement
from mx.core.types import SourceRecord, SourceRole
from mx.errors import BindingError, MxError, NotAllowedError, UnknownSourceError
from mx.namekey import NameKey
from mx.wire.client import CoordinatorClient
from mx.wire.registering import _proved
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.records import by_digest, make_documents, make_record, register_at, registration

pytestmark = pytest.mark.integration

KEY, OTHER = NameKey(b"k" * 32), NameKey(b"o" * 32)
SECRET, THEFT = b"s" * 32, b"t" * 32
OLD, NEW = make_documents("A"), make_documents("B")


@asynccontextmanager
async def coordinator(receipt_key: bytes | None = None) -> AsyncIterator[CoordinatorClient]:
    running = Coordinator(receipt_key=receipt_key)
    client = CoordinatorClient(await running.start("127.0.0.1:0"))
    try:
        yield client
    finally:
        await client.close()
        await running.stop()


async def register(client: CoordinatorClient, record: SourceRecord, **given: Any) -> Any:
    documents = by_digest(OLD) | by_digest(NEW)
    more: dict[str, Any] = {"source_secret": SECRET, "name_key": KEY, **given}
    return await register_at(client, record, documents, **more)


async def nonce_of(client: CoordinatorClient, record: SourceRecord) -> bytes:
    """Have the documents held, and return a nonce."""
    digests = [digest for digest, _ in record.ref.documents]
    found = await client.link.stub.Missing(pb.MissingRequest(digests=digests))
    return bytes(found.nonce)


def signed(record: SourceRecord, nonce: bytes, *, key: NameKey = KEY, **said: Any) -> pb.Source:
    """A registration, in which `said` has what is signed for, and `sent` what is sent instead."""
    sent: dict[str, Any] = said.pop("sent", {})
    replaces, secret = said.pop("replaces", ""), said.pop("secret", SECRET)
    what = replace(record, **said)
    purpose = Purpose.UPDATE if replaces else Purpose.REGISTER
    model = what.model._replace(revision=replaces or what.model.revision)
    text = proof(
        purpose, model, what.ref.identity, what.source_id, what.endpoint, blake3(secret).digest(),
        nonce,
    )  # fmt: skip
    name = record.model.name
    vouched = statement(record.model, record.ref.identity, replaces=replaces)
    record = replace(record, commitment=key.commitment(name), statement=key.sign(name, vouched))
    asked = registration(record, SECRET, replaces=replaces)
    message = codec.registration_to_wire(asked, key.sign(name, text), nonce)
    for field, value in sent.items():
        setattr(message, field, value)
    return message


async def send(client: CoordinatorClient, source: pb.Source) -> pb.RegisterResponse:
    async def requests() -> AsyncIterator[pb.RegisterRequest]:
        yield pb.RegisterRequest(source=source)
        documents = by_digest(OLD) | by_digest(NEW)
        for digest in (source.manifest.identity.digest, source.manifest.layout.digest):
            page = pb.RegisterRequest().page
            page.digest, page.nbytes, page.data = digest, len(documents[digest]), documents[digest]
            yield pb.RegisterRequest(page=page)

    from mx.wire.channel import translating

    with translating(client.remote):
        answer: pb.RegisterResponse = await client.link.stub.Register(requests())
    return answer


async def test_an_update_is_good_once_for_one_source_and_what_was_signed() -> None:
    async with coordinator() as client:
        await register(client, make_record(OLD))
        held = make_record(NEW, name="held")
        await register(client, held)  # so that the documents of NEW are there
        record = make_record(NEW)
        nonce = await nonce_of(client, record)
        for wrong in (
            signed(record, nonce),  # to register is not to update
            signed(record, nonce, replaces="main", sent={"replaces": "main.2"}),
            signed(record, nonce, replaces="main", secret=THEFT),
            signed(record, nonce, replaces="main", source_id=held.source_id),
            signed(record, nonce, replaces="main", endpoint="10.6.6.6:1"),
            signed(record, nonce, replaces="main", ref=make_record(OLD).ref),
            signed(record, nonce, replaces="main", model=held.model),
            signed(record, nonce, replaces="main", sent={"proof": b"\0" * 64}),
            signed(record, nonce, replaces="main", sent={"proof": b""}),
        ):
            if wrong.replaces == "":
                wrong.replaces = "main"
            with pytest.raises(NotAllowedError, match="does not hold the key"):
                await send(client, wrong)
        sent = signed(record, nonce, replaces="main")
        with pytest.raises(BindingError, match="another name key"):
            await send(client, signed(record, nonce, key=OTHER, replaces="main"))
        nonce = await nonce_of(client, record)
        sent = signed(record, nonce, replaces="main")
        assert (await send(client, sent)).model.revision == "main.2"
        await register(client, make_record(OLD), replaces="main.2")
        # Sent again as it was, or under another id and secret: the name does not go back.
        theft = signed(make_record(NEW), nonce, replaces="main", secret=THEFT)
        theft.proof = sent.proof
        for again in (sent, theft):
            with pytest.raises(NotAllowedError):
                await send(client, again)
        assert (await client.resolve("llama")).model.revision == "main.3"


async def test_a_nonce_of_another_life_is_not_good() -> None:
    record = make_record(OLD)
    async with coordinator() as client, coordinator() as other:
        nonce = await nonce_of(other, record)
        await register(client, make_record(OLD))
        with pytest.raises(UnknownSourceError, match="restarted"):
            await send(client, signed(record, nonce))
        with pytest.raises(UnknownSourceError):
            await send(client, signed(record, b""))


def test_nonces_end() -> None:
    nonces = Nonces(10)
    early, late = nonces.issue(10.0), nonces.issue(10.0)
    nonces.use(10.0 + NONCE_S - 1, early, "a")
    with pytest.raises(UnknownSourceError, match="took more than"):
        nonces.use(10.0 + NONCE_S, late, "a")
    for now in (10.0 + NONCE_S - 1, 10.0 + NONCE_S, 10.0 + 3 * NONCE_S):
        with pytest.raises(MxError):
            nonces.use(now, early, "a")
    assert len({nonces.issue(1.0) for _ in range(100)}) == 100


def test_receipts_are_the_coordinators_own() -> None:
    def of(key: bytes, epoch: str) -> Proofs:
        return Proofs(key, lambda: 0.0, lambda: epoch)

    mine, again, other = of(b"a" * 32, "1"), of(b"a" * 32, "2"), of(b"b" * 32, "1")
    bound = Receipt(make_record(OLD).model, b"i" * 32, b"c" * 32, "", 0)
    given = mine.receipt(bound)
    found = again.read(given)
    assert found is not None and found._replace(issued_s=0.0) == bound and found.issued_s > 0
    own = mine.read(given)
    assert own is not None and own.this_life and not found.this_life
    assert other.read(given) is None and mine.read(b"") is None
    for at in range(len(given)):
        assert mine.read(given[:at] + bytes([given[at] ^ 1]) + given[at + 1 :]) is None
    assert mine.receipt(None) == b""


async def test_a_receipt_comes_with_the_registration_and_restores_it() -> None:
    async with coordinator(b"r" * 32) as client:
        record = make_record(OLD)
        await register(client, record)
        listed = await register(client, make_record(NEW), replaces="main")
        without_key = await register(client, make_record(OLD, name="mine"), name_key=None)
        assert listed.receipt and not without_key.receipt
    for receipt_key, pin_only in ((b"r" * 32, False), (b"q" * 32, True), (None, True)):
        async with coordinator(receipt_key) as client:
            relay = make_record(NEW, revision="main.2")
            found = await register(
                client, relay, name_key=None, keeps_pin=True, receipt=listed.receipt
            )
            assert found.pin_only is pin_only
            if pin_only:
                continue
            # The next update has the next number, and the owner alone makes it.
            with pytest.raises(BindingError, match="another name key"):
                await register(client, make_record(OLD), name_key=OTHER, replaces="main.2")
            update = await register(client, make_record(OLD), replaces="main.2")
            assert update.model.revision == "main.3"


async def test_a_receipt_of_this_life_wins_against_nothing_that_is_bound() -> None:
    """A stranger who was first after the restart has got one, which is the newest of all."""
    alice: dict[str, Any] = {"source_secret": SECRET, "name_key": KEY}
    bob: dict[str, Any] = {"source_secret": THEFT, "name_key": OTHER}
    honest, other = make_record(OLD), make_record(NEW)
    async with coordinator(b"r" * 32) as client:
        old = await register(client, honest, **alice)
    async with coordinator(b"r" * 32) as client:
        new = await register(client, other, **bob)
        assert new.receipt and not new.pin_only
        back = await register(client, honest, keeps_pin=True, receipt=old.receipt, **alice)
        assert back.receipt and not back.pin_only
        relay = make_record(NEW, role=SourceRole.RELAY)
        for source, who in ((other, bob), (relay, bob | {"name_key": None})):
            again = await register(client, source, keeps_pin=True, receipt=new.receipt, **who)
            assert again.pin_only
        assert (await client.resolve("llama")).ref == honest.ref
    # In the next life its receipts count, and the owner's is the newest.
    for first in (True, False):
        async with coordinator(b"r" * 32) as client:
            for owner in (first, not first):
                source, was, who = (honest, back, alice) if owner else (other, new, bob)
                await register(client, source, keeps_pin=True, receipt=was.receipt, **who)
            assert (await client.resolve("llama")).ref == honest.ref


def test_a_proof_is_good_for_the_endpoint_that_the_source_has() -> None:
    """A coordinator at which the source registers may pass a proof on, with another's nonce."""
    proofs = Proofs(b"h" * 32, lambda: 0.0, str)
    for replaces in ("", "main"):
        asked = registration(make_record(NEW), SECRET, replaces=replaces)
        made, proved = _proved(asked, KEY, nonce := proofs.nonce())
        for endpoint, good in (("10.6.6.6:1", False), (made.record.endpoint, True)):
            sent = replace(made, record=replace(made.record, endpoint=endpoint))
            source = codec.registration_to_wire(sent, proved, nonce)
            if good:
                proofs.check(codec.registration_from_wire(source), source, "a")
                continue
            with pytest.raises(NotAllowedError, match="does not hold the key"):
                proofs.check(codec.registration_from_wire(source), source, "a")
