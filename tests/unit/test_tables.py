"""What the verbs that list print, for people and with `--json`: byte for byte as in tables.txt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

import mx.api
import mx.artifacts.carry
import mx.cli.outcome
import mx.fleet.bundles
import mx.fleet.caching
import mx.log
from mx.api.planning import PlannedPull
from mx.api.tables import LayerUse, PlacedTensor, RegionUse, SourceMemory, SourceTable
from mx.artifacts.carry import ListedSet
from mx.cli.app import app
from mx.core.answers import BundleStatus, ModelStatus
from mx.core.notes import Notes
from mx.core.planner import Plan, RejectedPath, SourcePath, Spare
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.reasons import Why
from mx.core.topology import Place
from mx.core.types import ModelKey, SourceRole, SourceState
from mx.wire.cache import CachedModel, CacheStatus
from mx.wire.listing import SourceStatus
from tests.support.records import make_documents, make_record, make_ref, scattered_rows

EXPECTED = Path(__file__).with_name("tables.txt")
RANK = ModelKey("org/large", "step-7", "engine=vllm,tp=1/2,dtype=bf16")
PLAIN, BARE = make_ref(make_documents("w")), make_ref(make_documents("x", files=""))
ORIGIN = make_record(make_documents("w"), source_id="one", generation=3)
RELAY = dataclasses.replace(
    make_record(
        make_documents("x", files=""),
        name=RANK.name,
        revision=RANK.revision,
        variant=RANK.variant,
        source_id="two",
        held=((0, 1), (3, 4)),
        rows=scattered_rows(3),
        role=SourceRole.RELAY,
        state=SourceState.DRAINING,
        endpoint="[2001:db8::1]:41001",
    ),
    pin_only=True,
    transports=("tcp",),
)
MODELS = [
    ModelStatus(ORIGIN.model, PLAIN, 3 << 20, 4, 2),
    ModelStatus(RANK, BARE, 0, 0, 0, pin_only=True),
]
SOURCES = (SourceStatus(ORIGIN, 4.56789, 2, 1.23456), SourceStatus(RELAY, 0.00012, 0, 0.0))
PULLS = (
    PullStatus("p1", ORIGIN.model, "h", 12, PullPhase.RUNNING, 5, 0b10011, 3 << 20, 1 << 20,
               12.34567, (ORIGIN.endpoint,), 3, 0.123456, 8000, "10.0.0.1"),
    PullStatus("p2", RANK, "h", 13, PullPhase.FAILED, 2, 0, 1 << 30, 0, 0.0001),
)  # fmt: skip
BUNDLES = [
    BundleStatus("llama", "main", "checkpoint", 1, (), 0, True),
    BundleStatus("org/large", "step-7", "engine=vllm,tp=*/2,dtype=bf16", 2, (RANK.variant,), 1,
                 False),
]  # fmt: skip
CACHE = CacheStatus(
    64 << 30, 4 << 20, 1 << 20, 7,
    (
        CachedModel(ORIGIN.model, PLAIN, ORIGIN.endpoint, 3 << 20, True, False, 0.0001234, 2),
        CachedModel(RANK, BARE, "", 1 << 20, False, True, 4321.98765),
    ),
)  # fmt: skip
SETS = [
    ListedSet("n", "llama", "0123abcd", "caches", "89ef", 5 << 20, 2),
    ListedSet("n", "org/large", "4567abcd", "graphs", "", 0, 1),
]
TABLES = [
    SourceTable(ORIGIN, (PlacedTensor("a.weight", "embed", 0, "cpu", 0x7F0000000000, 1 << 20),)),
    SourceTable(RELAY, error="it does not answer"),
]


def _plan(*, attach: bool, works: bool = True) -> PlannedPull:
    path = SourcePath(ORIGIN, "shm", 12.3456, attach, "pages of its own")
    tcp = SourcePath(RELAY, "tcp", 1.25, False, "")
    rejected = (
        RejectedPath(RELAY, "ucx", Why.UNSERVED()),
        RejectedPath(RELAY, "shm", Why.UNASKED("tcp")),
    )
    plan = Plan((path,), (Spare(tcp, Why.NEARER("shm")),), rejected)
    memories = (
        SourceMemory(
            ORIGIN,
            (RegionUse(0, "cpu", 3 << 20, 0), RegionUse(1, "cuda:GPU-1", 1 << 20, 5)),
            (LayerUse("embed", 1 << 20, (0,)), LayerUse("head", 3 << 20, (0, 1))),
        ),
        SourceMemory(RELAY, error="it does not answer"),
    )
    found = PlannedPull(
        ORIGIN.model, PLAIN, 4 << 20, 4, Place("b", "h", 1, 2), plan, memories=memories
    )
    return found if works else dataclasses.replace(found, plan=Plan((), (), rejected), memories=())


def _observer(**_: object) -> AbstractContextManager[SimpleNamespace]:
    overview = mx.api.Overview(pulls=PULLS, sources=SOURCES)
    return nullcontext(SimpleNamespace(look=lambda model: overview))


def _run(*words: str) -> None:
    typer.main.get_command(app).main(list(words), prog_name="mx", standalone_mode=False)


@contextmanager
def _known(patched: pytest.MonkeyPatch, **answers: Any) -> Iterator[None]:
    """Have what asks a coordinator or a cache answer with what is here."""
    at: dict[str, Any] = {
        "find": mx.artifacts.carry,
        "cached": mx.fleet.caching,
        "list_bundles": mx.fleet.bundles,
    }
    with patched.context() as patch:
        patch.setattr(mx.api, "Observer", _observer)
        for name, answer in answers.items():
            patch.setattr(at.get(name, mx.api), name, lambda *_, found=answer, **__: found)
        yield


def test_what_is_listed_is_shown_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Notes, "lines", lambda self: [])
    # A process of its own would take what is set up with it.
    monkeypatch.setattr(mx.log, "set_up", lambda *_, **__: None)
    answers = {
        "list_models": MODELS, "list_sources": SOURCES, "list_tables": TABLES, "cached": CACHE,
        "list_bundles": BUNDLES, "find": SETS,
    }  # fmt: skip
    shown = []
    for plan, verbs in (
        (_plan(attach=False), ("models", "sources", "models llama --table", "top --once",
                               "cache --cache-socket /run/mx/cache.sock", "artifacts list",
                               "plan llama")),
        (_plan(attach=True), ("plan llama",)),
        (_plan(attach=False, works=False), ("plan llama",)),
    ):  # fmt: skip
        with _known(monkeypatch, plan=plan, **answers):
            for verb in verbs:
                _run(*verb.split(), "--json")
                shown.append(f"$ mx {verb} --json\n{capsys.readouterr().out}")
                for width in (250, 70):
                    monkeypatch.setattr(
                        mx.cli.outcome, "page", lambda width=width: Console(width=width)
                    )
                    _run(*verb.split())
                    shown.append(f"$ mx {verb}  at {width}\n{capsys.readouterr().out}")
    assert "".join(shown) == EXPECTED.read_text(encoding="utf-8")
