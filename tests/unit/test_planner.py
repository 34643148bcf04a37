from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mx.core.planner import plan
from mx.core.topology import Place
from mx.core.types import AddressTable, ManifestRef, ModelKey, SourceRecord, SourceState

REF = ManifestRef(b"i" * 32, b"l" * 32, b"c" * 32, b"p" * 32, (1, 1, 1, 1))


def source(name: str, transports: tuple[str, ...] = ("shm", "tcp")) -> SourceRecord:
    return SourceRecord(
        source_id=name,
        model=ModelKey("m"),
        ref=REF,
        endpoint=f"{name}:1",
        place=Place(hostname=name),
        generation=1,
        table=AddressTable(REF.layout, ()),
        transports=transports,
    )


def reach(transport: str, there: Place) -> tuple[float, bool, str] | str:
    if transport == "shm":
        if there.hostname != "here":
            return "another host"
        return (10.0, True, "")
    return (1.0, False, "")


def test_attach_comes_first_and_every_refusal_has_its_reason() -> None:
    found = plan([source("far"), source("here")], ["shm", "tcp"], reach)
    assert [(w.source.source_id, w.transport) for w in found.ways] == [
        ("here", "shm"),
        ("far", "tcp"),
        ("here", "tcp"),
    ]
    assert [(r.source.source_id, r.transport, r.reason) for r in found.rejected] == [
        ("far", "shm", "another host")
    ]
    assert any("not by shm: another host" in line for line in found.explain())


def test_forcing_leaves_the_rest_out_and_says_so() -> None:
    found = plan([source("here")], ["shm", "tcp"], reach, forced="tcp", attach=False)
    assert [w.transport for w in found.ways] == ["tcp"]
    assert "tcp was asked for" in found.rejected[0].reason


def test_draining_sources_come_last() -> None:
    draining = replace(source("here"), state=SourceState.DRAINING)
    found = plan([draining, source("far")], ["shm", "tcp"], reach)
    assert [w.source.source_id for w in found.ways] == ["far", "here", "here"]


@given(st.permutations(["a", "b", "here", "c"]))
def test_the_same_input_in_any_order_gives_the_same_plan(names: list[str]) -> None:
    one = plan([source(n) for n in names], ["shm", "tcp"], reach)
    other = plan([source(n) for n in sorted(names)], ["tcp", "shm"], reach)
    assert one.ways == other.ways
