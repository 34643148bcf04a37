"""mx.core.types <-> protobuf. Incoming messages are checked here, once, and trusted afterwards.

Every `*_from_wire` raises PeerProtocolError for a message that a well-behaved peer would not send;
a server answers it with INVALID_ARGUMENT. Every `*_to_wire` trusts its argument.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from mx.core.layout import MAX_ARENA_BYTES, MAX_TENSORS
from mx.core.ownership import (
    COMMITMENT_BYTES,
    MAX_CERTIFICATE_BYTES,
    MAX_RECEIPT_BYTES,
    SIGNATURE_BYTES,
)
from mx.core.types import (
    MAX_NOTES_BYTES,
    NAME_CHARS,
    AddressTable,
    Intent,
    ManifestRef,
    ModelKey,
    Region,
    Registration,
    SourceRecord,
    SourceRole,
    SourceState,
)
from mx.core.variant import FIELDS, members_of, membership, note_document, why_not_a_variant
from mx.core.versions import MAX_VERSION
from mx.errors import ConfigError, PeerProtocolError
from mx.units import MIB
from mx.wire.address import split_address
from mx.wire.place import place_from_wire, place_to_wire
from mx.wire.v1 import common_pb2 as pb
from mx.wire.v1 import coordinator_pb2 as cpb

SECRET_BYTES = (16, 64)
MAX_DOCUMENT_BYTES = 256 * MIB
#: A source has one region, or one for each allocation of a live engine.
MAX_REGIONS = 64
#: The largest total of a source's regions, and of the bytes that a pull moves.
MAX_TOTAL_BYTES = MAX_ARENA_BYTES
#: No layout has more layers than tensors.
MAX_LAYERS = MAX_TENSORS
#: The largest rate (GB/s) or time (s); a larger one was not measured.
MAX_QUANTITY = 1e9
#: The largest port.
MAX_PORT = 65_535
#: Enough for a source with the most named layers that holds every other one.
MAX_RANGES = 2048
#: More than a vouch has (`mx.core.vouching`), which is verified where it is used.
MAX_VOUCH_BYTES = 1024
MAX_ROWS = 2_000_000
_MAX_TRANSPORTS = 16
_U64 = 1 << 64

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TRANSPORT = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_DEVICE = re.compile(r"cpu|cuda:[A-Za-z0-9:._-]{1,64}")

#: The numbers of enumerations on the wire.
_NUMBERS: Mapping[enum.Enum, Any] = {
    SourceState.SERVING: cpb.SOURCE_STATE_SERVING,
    SourceState.DRAINING: cpb.SOURCE_STATE_DRAINING,
    SourceRole.ORIGIN: cpb.SOURCE_ROLE_ORIGIN,
    SourceRole.RELAY: cpb.SOURCE_ROLE_RELAY,
}
_T = TypeVar("_T")
_E = TypeVar("_E", bound=enum.Enum)

_NOT_IN = {"model name": ":[]", "revision": "[]", "variant": "[]"}


def _refuse(text: str) -> PeerProtocolError:
    return PeerProtocolError(text)


def _why_not_a_name(what: str, text: str) -> str | None:
    if not 1 <= len(text) <= NAME_CHARS:
        return f"a {what} has 1 to {NAME_CHARS} characters, not {len(text)}"
    if "@" in text or not text.isprintable() or text != text.strip():
        return f"{what} {text!a}: '@', control characters and outer spaces are not allowed"
    # `mx.core.reference` reads these characters as the end of the name.
    if set(text) & set(_NOT_IN[what]):
        return f"{what} {text!a}: {' and '.join(map(repr, _NOT_IN[what]))} are not allowed"
    return why_not_a_variant(text) if what == "variant" else None


def check_model_key(key: ModelKey) -> None:
    """Check a key that the user gave.

    Raises:
        ConfigError: No coordinator would accept the name, the revision or the variant.
    """
    for what, text in _key_texts(key):
        why = _why_not_a_name(what, text)
        if why is not None:
            raise ConfigError(why)


def _key_texts(key: ModelKey) -> tuple[tuple[str, str], ...]:
    return (
        ("model name", key.name),
        ("revision", key.revision),
        ("variant", key.variant),
    )


def by_name(kind: Callable[..., _T], value: Any, **given: Any) -> _T:
    """Return a message, or an object, with what another has under the same names: so are the
    messages and objects in it made of each other.

    Args:
        kind: The class to make.
        value: A message where that is not a class of messages, else an object.
        given: Fields that are made otherwise, or have other names there.
    """
    found = {}
    for name, make in _shared(kind, value.__class__, tuple(given)):
        each = getattr(value, name)
        found[name] = each if make is None else make(each)
    return kind(**found, **given)


@functools.cache
def _shared(
    kind: Any, other: Any, given: tuple[str, ...]
) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    """Return the names of the fields that two classes share, and what makes the value of one."""
    shared: list[tuple[str, Callable[[Any], Any] | None]] = []
    second, to_message = _field_names(other), hasattr(kind, "DESCRIPTOR")
    message = kind if to_message else other
    for name in _field_names(kind):
        if name not in second or name in given:
            continue
        nested = message.DESCRIPTOR.fields_by_name[name].message_type
        repeated = hasattr(getattr(message(), name), "extend")
        if nested is not None:
            hint = nested._concrete_class if to_message else get_type_hints(kind)[name]
            shared.append((name, _nested(hint, repeated=repeated, to_message=to_message)))
        else:
            shared.append((name, tuple if repeated and not to_message else None))
    return tuple(shared)


def _field_names(kind: Any) -> Collection[str]:
    """Return the names of the fields that a class of messages or of objects has."""
    if hasattr(kind, "DESCRIPTOR"):
        return cast(Collection[str], kind.DESCRIPTOR.fields_by_name)
    return getattr(kind, "_fields", None) or list(map(attrgetter("name"), fields(kind)))


def _nested(hint: Any, *, repeated: bool, to_message: bool) -> Callable[[Any], Any]:
    """Return what makes a field's messages of objects, or its objects of messages, of this type."""
    part = hint if to_message or not repeated else get_args(hint)[0]
    make = functools.partial(by_name, part)
    several = tuple if get_origin(hint) is tuple else list
    return (lambda found: several(map(make, found))) if repeated else make


def key_to_wire(key: ModelKey) -> pb.ModelKey:
    """Return the message of a key."""
    return pb.ModelKey(name=key.name, revision=key.revision, variant=key.variant)


def key_from_wire(message: pb.ModelKey) -> ModelKey:
    """Return a key. "" stands for the default revision and variant, but not for a name."""
    key = ModelKey(message.name, message.revision or "main", message.variant or "checkpoint")
    for what, text in _key_texts(key):
        why = _why_not_a_name(what, text)
        if why is not None:
            raise _refuse(why)
    return key


def bundle_from_wire(message: pb.ModelKey) -> ModelKey:
    """Return the key of a bundle: with `*` in place of each rank. "" stands for no revision."""
    member = membership(message.variant)
    if member.bundle != message.variant:
        raise _refuse(f"variant {message.variant[:80]!a} is not a bundle")
    texts = [("model name", message.name), ("variant", next(members_of(message.variant)))]
    if message.revision:
        texts.append(("revision", message.revision))
    for what, text in texts:
        why = _why_not_a_name(what, text)
        if why is not None:
            raise _refuse(why)
    return ModelKey(message.name, message.revision, message.variant)


def digest_from_wire(data: bytes, what: str) -> bytes:
    """Return a 32-byte blake3 digest; `what` names it in errors."""
    if len(data) != 32:
        raise _refuse(f"{what}: a digest has 32 bytes, not {len(data)}")
    return data


def source_id_from_wire(text: str) -> str:
    """Return a source id, which is a UUID in lower case."""
    if not _UUID.fullmatch(text):
        raise _refuse("source_id must be a UUID in lower case")
    return text


def secret_from_wire(data: bytes) -> bytes:
    """Return a source's secret of valid length."""
    low, high = SECRET_BYTES
    if not low <= len(data) <= high:
        raise _refuse(f"source_secret: {low} to {high} bytes, not {len(data)}")
    return data


def ref_to_wire(ref: ManifestRef) -> pb.ManifestRef:
    """Return the message of a manifest's digests and sizes."""
    identity, layout, packaging = ref.sizes
    message = pb.ManifestRef(
        identity=pb.DocumentRef(digest=ref.identity, nbytes=identity),
        layout=pb.DocumentRef(digest=ref.layout, nbytes=layout),
        layout_version=ref.layout_version,
    )
    if ref.packaging:
        message.packaging.digest, message.packaging.nbytes = ref.packaging, packaging
    return message


def ref_from_wire(message: pb.ManifestRef) -> ManifestRef:
    """Return a manifest's digests and sizes."""
    parts = {"identity": message.identity, "layout": message.layout}
    if message.HasField("packaging"):
        parts["packaging"] = message.packaging
    for name, part in parts.items():
        digest_from_wire(part.digest, name)
        if not 0 < part.nbytes <= MAX_DOCUMENT_BYTES:
            raise _refuse(f"{name}: a document has 1 to {MAX_DOCUMENT_BYTES} bytes")
    if not 0 < message.layout_version <= MAX_VERSION:
        raise _refuse(f"layout_version: {message.layout_version}")
    return ManifestRef(
        message.identity.digest,
        message.layout.digest,
        message.packaging.digest,
        (message.identity.nbytes, message.layout.nbytes, message.packaging.nbytes),
        message.layout_version,
    )


def ranges_to_wire(ranges: Iterable[tuple[int, int]]) -> list[pb.Range]:
    """Return the messages of half-open ranges."""
    return [pb.Range(begin=begin, end=end) for begin, end in ranges]


def ranges_from_wire(message: Sequence[pb.Range]) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges of held layers: not empty, ascending, disjoint, and within the bounds
    of a layout."""
    if len(message) > MAX_RANGES:
        raise _refuse(f"held: more than {MAX_RANGES} ranges")
    ranges = tuple((item.begin, item.end) for item in message)
    last_end = 0
    for begin, end in ranges:
        if not last_end <= begin < end:
            raise _refuse(f"held: [{begin}, {end}) is empty, out of order or overlaps")
        last_end = end
    if last_end > MAX_LAYERS:
        raise _refuse(f"held: layer {last_end - 1} is beyond the limit of {MAX_LAYERS} layers")
    return ranges


def rate_from_wire(value: float, what: str) -> float:
    """Return a rate or time: finite, not negative, and small enough to add up."""
    if not 0 <= value <= MAX_QUANTITY:  # refuses NaN too
        raise _refuse(f"{what}: {value:g} is not a valid rate or time")
    return value


def table_to_wire(table: AddressTable) -> pb.AddressTable:
    """Return the message of a table without its rows, which are a document."""
    regions = []
    for region in table.regions:
        message = by_name(pb.Region, region, layers=None)
        if region.layers is not None:
            message.layers.begin, message.layers.end = region.layers
        regions.append(message)
    return by_name(
        pb.AddressTable,
        table,
        regions=regions,
        held=ranges_to_wire(table.held),
        rows=table.row_count,
        layers=table.layer_count,
        payload_bytes=table.payload_nbytes,
    )


def _region_from_wire(index: int, message: pb.Region) -> Region:
    where = f"region {index}"
    if message.index != index:
        raise _refuse(f"{where} is numbered {message.index}")
    if not _DEVICE.fullmatch(message.device):
        raise _refuse(f"{where}: device {message.device[:80]!a}")
    if message.base + message.nbytes > _U64:
        raise _refuse(f"{where} leaves the address space")
    layers = None
    if message.HasField("layers"):
        layers = (message.layers.begin, message.layers.end)
        if not layers[0] < layers[1] <= MAX_LAYERS:
            raise _refuse(f"{where}: layers [{layers[0]}, {layers[1]}) are not a valid range")
    return Region(index, message.device, message.base, message.nbytes, layers)


def table_from_wire(message: pb.AddressTable) -> AddressTable:
    """Return a table without its rows, which `mx.wire.rows.check_rows` checks against it."""
    if len(message.regions) > MAX_REGIONS:
        raise _refuse(f"more than {MAX_REGIONS} regions")
    if message.rows > MAX_ROWS:
        raise _refuse(f"more than {MAX_ROWS} rows")
    if message.rows or message.rows_digest:
        digest_from_wire(message.rows_digest, "rows_digest")
    if message.rows_digest and not message.rows:
        raise _refuse("rows_digest: there are no rows")
    regions = tuple(_region_from_wire(i, item) for i, item in enumerate(message.regions))
    total = max(message.payload_bytes, sum(region.nbytes for region in regions))
    if total > MAX_TOTAL_BYTES:
        raise _refuse(f"regions: {total} bytes are more than any memory has")
    last_end = 0
    for begin, end in sorted(region.layers for region in regions if region.layers):
        if begin < last_end:
            raise _refuse(f"layer {begin} is in two regions")
        last_end = end
    table = AddressTable(
        digest_from_wire(message.layout_digest, "layout_digest"),
        regions,
        held=ranges_from_wire(message.held),
        layer_count=message.layers,
        payload_nbytes=message.payload_bytes,
        row_count=message.rows,
        rows_digest=message.rows_digest,
        frozen=message.frozen,
    )
    if message.layers > MAX_LAYERS:
        raise _refuse(f"{message.layers} layers are more than any model has")
    if message.rows and all(region.layers for region in regions):
        raise _refuse("rows are announced, but every region has layers of its own")
    check_held(table, table.held)
    return table


def check_held(table: AddressTable, held: Sequence[tuple[int, int]]) -> None:
    """Check that held layers lie in regions.

    Args:
        table: The table. One with rows is not checked here, since its rows say where layers are;
            nor is one whose rows are left out, as where peers tell each other of sources.
        held: The half-open ranges of layers, ascending.

    Raises:
        PeerProtocolError: A held layer is in no region.
    """
    if table.scattered or table.row_count:
        return
    spans = iter(sorted(region.layers for region in table.regions if region.layers))
    low = high = 0
    for begin, end in held:
        # Both are ascending, so each span is read once. Adjacent spans count as one.
        while end > high and (span := next(spans, None)) is not None:
            low = low if span[0] == high else span[0]
            high = span[1]
        if not low <= begin < end <= high:
            raise _refuse(f"held: layers [{begin}, {end}) are in no region")


def source_to_wire(record: SourceRecord) -> cpb.Source:
    """Return the message of a record without its table's rows."""
    return by_name(
        cpb.Source,
        record,
        model=key_to_wire(record.model),
        manifest=ref_to_wire(record.ref),
        place=place_to_wire(record.place),
        role=_NUMBERS[record.role],
        state=_NUMBERS[record.state],
        table=table_to_wire(record.table),
    )


def registration_to_wire(
    registration: Registration, proof: bytes = b"", nonce: bytes = b""
) -> cpb.Source:
    """Return the message of a source that registers, without its table's rows.

    Args:
        registration: What it asks for.
        proof: That it holds the name key, with the coordinator's nonce (`mx.core.ownership`).
        nonce: See there.
    """
    message, intent = source_to_wire(registration.record), registration.intent
    message.source_secret, message.proof, message.nonce = registration.secret, proof, nonce
    message.replaces, message.keeps_pin = intent.replaces, intent.keeps_pin
    message.publishes, message.published_s = intent.publishes, intent.published_s
    message.receipt = intent.receipt
    return message


def registration_from_wire(message: cpb.Source) -> Registration:
    """Return what a source asks for; its table has no rows yet."""
    record = source_from_wire(message)
    secret = secret_from_wire(message.source_secret)
    replaces, receipt = _replaces_from_wire(message.replaces), receipt_from_wire(message.receipt)
    published_s = published_from_wire(message.published_s)
    intent = Intent(replaces, message.keeps_pin, receipt, message.publishes, published_s)
    return Registration(record, secret, intent)


def state_to_wire(state: SourceState) -> cpb.SourceState:
    """Return the message's value for a state."""
    number: cpb.SourceState = _NUMBERS[state]
    return number


def state_from_wire(value: int) -> SourceState:
    """Return the state that a value stands for."""
    return _member(SourceState, value, "state")


def _member(kind: type[_E], value: int, what: str) -> _E:
    for each in kind:
        if _NUMBERS[each] == value:
            return each
    raise _refuse(f"source {what} {value}")


def _endpoint_from_wire(text: str) -> str:
    try:
        _, port = split_address(text)
    except ConfigError as error:
        raise _refuse(f"endpoint: {error.message[:300]}") from error
    if port == 0:
        raise _refuse("endpoint: port 0")
    return text


def port_from_wire(port: int) -> int:
    """Return the port of requests, 0 for none."""
    if port > MAX_PORT:
        raise _refuse(f"requests_port: {port}")
    return port


def transports_from_wire(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of transports, each once."""
    if len(names) > _MAX_TRANSPORTS or len(set(names)) != len(names):
        raise _refuse(f"transports: at most {_MAX_TRANSPORTS}, each once")
    for name in names:
        if not _TRANSPORT.fullmatch(name):
            raise _refuse(f"transports: {name[:40]!a} is not a valid name")
    return tuple(names)


def source_from_wire(message: cpb.Source) -> SourceRecord:
    """Return a record whose table has no rows yet. The secret is not read."""
    ref = ref_from_wire(message.manifest)
    table = table_from_wire(message.table)
    if table.layout_digest != ref.layout:
        raise _refuse("the table is of another layout than the manifest")
    return by_name(
        SourceRecord,
        message,
        source_id=source_id_from_wire(message.source_id),
        model=key_from_wire(message.model),
        ref=ref,
        endpoint=_endpoint_from_wire(message.endpoint),
        place=place_from_wire(message.place),
        table=table,
        transports=transports_from_wire(message.transports),
        role=_member(SourceRole, message.role, "role"),
        state=state_from_wire(message.state),
        requests_port=port_from_wire(message.requests_port),
        commitment=_bytes_or_none(message.commitment, COMMITMENT_BYTES, "commitment"),
        statement=_bytes_or_none(message.statement, SIGNATURE_BYTES, "statement"),
        variant_fields=_variant_fields_from_wire(message),
        certificate=message.certificate[:MAX_CERTIFICATE_BYTES],
        vouch=message.vouch[:MAX_VOUCH_BYTES],
        notes=message.notes if len(message.notes) <= MAX_NOTES_BYTES else b"",
    )


def _variant_fields_from_wire(message: cpb.Source) -> str:
    """Return the document of the shortened processing key that a source is registered as."""
    document = message.variant_fields
    if not document:
        return ""
    try:
        digest = note_document(document)
    except ConfigError as error:
        raise _refuse(f"variant_fields: {error.message}") from None
    if f"{FIELDS}={digest}" not in message.model.variant.split(","):
        raise _refuse("variant_fields: of another processing key")
    return document


def _bytes_or_none(data: bytes, nbytes: int, what: str) -> bytes:
    if len(data) not in (0, nbytes):
        raise _refuse(f"{what}: none or {nbytes} bytes, not {len(data)}")
    return data


def _replaces_from_wire(text: str) -> str:
    """Return the revision that an update replaces; "" for none."""
    why = _why_not_a_name("revision", text) if text else None
    if why is not None:
        raise _refuse(why)
    return text


def commitment_from_wire(data: bytes) -> bytes:
    """Return the commitment that a name belongs to, b"" for none."""
    return _bytes_or_none(data, COMMITMENT_BYTES, "commitment")


def published_from_wire(published_s: float) -> float:
    """Return when weights were published, in seconds since 1970; 0.0 if that is not known."""
    return published_s if 0 < published_s < math.inf else 0.0


def receipt_from_wire(data: bytes) -> bytes:
    """Return a receipt, which only the coordinator that gave it reads."""
    if len(data) > MAX_RECEIPT_BYTES:
        raise _refuse(f"receipt: {len(data)} bytes")
    return data
