"""An older and a newer mx beside this one, as real processes: each refuses the other by name.

The older one is this mx, changed before it starts to send and check no versions, as version 1 did;
the newer one is this mx with a higher number.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mx import api, config
from mx.api.serving import join_or_embed
from mx.core.layout_rules import newest
from mx.core.versions import HINT, WIRE_VERSION, VersionRange, own
from mx.errors import (
    EXIT_NO_SOURCE,
    EXIT_OK,
    CoordinatorVersionError,
    NoSourceError,
)
from mx.wire.client import CoordinatorClient
from tests.integration.other_versions import NEWER, RunOther, other_coordinator, run_other
from tests.integration.scripts import script
from tests.support.commands import Command, Run, free_port, serve, start_coordinator
from tests.support.outcomes import error_of
from tests.support.records import by_digest, make_documents, make_record, register_at

__all__ = ["run_other"]  # a fixture

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

OLDER = """
import mx.core.versions, mx.core.versions
mx.core.versions.headers = lambda: ()
mx.core.versions.read = lambda sent: mx.core.versions.own()
"""
NEWER_LAYOUT = """
from mx.core.layout_rules import RULES, oldest
from tests.support.next_release import next_layout
next_layout()
del RULES[oldest()]
"""
SPEAKS = {
    OLDER: "wire 1 (an older mx, which sends no versions)",
    NEWER: str(own()._replace(wire=VersionRange(WIRE_VERSION + 2, WIRE_VERSION + 2))),
    NEWER_LAYOUT: str(own()._replace(layout=VersionRange(newest() + 1, newest() + 1))),
}
other = pytest.mark.parametrize("change", [OLDER, NEWER], ids=["older", "newer"])


def other_source(run_other: RunOther, change: str, checkpoint: Path, coordinator: str = "") -> str:
    """Start a source that is its own coordinator, or is registered; return its endpoint."""
    address = coordinator or other_coordinator(run_other, change)
    endpoint = f"127.0.0.1:{free_port()}"
    command = run_other(
        change, "serve", str(checkpoint), "--model", "m", "--coordinator", address,
        "--listen", endpoint, "--json",
    )  # fmt: skip
    command.json()
    return endpoint


def refused_by(kind: str, address: str, change: str) -> str:
    """What this mx says of a process of another version."""
    return f"the {kind} at {address} speaks {SPEAKS[change]}; this mx speaks {own()}"


def finished(command: Command) -> tuple[int, dict[str, Any]]:
    """Wait for a command with --json that fails. Return its exit code and its error."""
    code = command.wait(60)
    error = json.loads(command.out)["error"]
    assert isinstance(error, dict) and error["exit_code"] == code, command.out
    return code, error


# -- this mx, and another one that it calls -------------------------------------------------------


@other
def test_a_coordinator_of_another_version_is_an_error_at_once(
    run: Run, run_other: RunOther, change: str, checkpoint: Path, settings: config.Settings
) -> None:
    address = other_coordinator(run_other, change)
    said = refused_by("coordinator", address, change)
    # An older coordinator does not refuse: what it answers without versions is shown.
    answered = "; it answered: no model 'm' here (nothing is registered here yet)"
    shown = run("pull", "m", "--coordinator", address, "--wait", "1h")
    assert shown.wait(60) == EXIT_NO_SOURCE
    more = answered if change is OLDER else ""
    assert (shown.out, shown.err) == ("", f"error: {said}{more}\n  {HINT}\n")
    with api.pull("m", coordinator=address, settings=settings, wait_s=3600.0) as pull:
        pulled = error_of(pull)
    with pytest.raises(CoordinatorVersionError) as served:
        api.serve(checkpoint, model="m", coordinator=address, settings=settings, wait_s=3600.0)
    with pytest.raises(CoordinatorVersionError) as listed:
        api.list_models(coordinator=address)
    for error in (pulled, served.value, listed.value):
        assert isinstance(error, CoordinatorVersionError)
        assert error.message.startswith(said) and error.hint.startswith(HINT)
        assert error.exit_code == EXIT_NO_SOURCE


@other
def test_no_coordinator_is_embedded_where_one_of_another_version_answers(
    run_other: RunOther, change: str, settings: config.Settings
) -> None:
    address = other_coordinator(run_other, change)
    joining = join_or_embed(
        address,
        CoordinatorClient.list_models,
        named_by="",
        embed=True,
        wait_s=0.0,
        settings=settings,
        cancelled=lambda: False,
    )
    with pytest.raises(CoordinatorVersionError):
        asyncio.run(joining)


@other
def test_a_source_of_another_version_that_was_named_is_an_error(
    run: Run, run_other: RunOther, change: str, checkpoint: Path
) -> None:
    endpoint = other_source(run_other, change, checkpoint)
    code, error = finished(run("pull", "m", "--from", f"peer={endpoint}", "--json"))
    assert (code, error["type"]) == (EXIT_NO_SOURCE, "PeerVersionError")
    assert (error["message"], error["hint"]) == (refused_by("source", endpoint, change), HINT)


# -- another one, which calls this mx -------------------------------------------------------------


@pytest.mark.parametrize("change", [OLDER, NEWER_LAYOUT], ids=["older", "newer layout"])
def test_what_another_version_is_told(
    run: Run, run_other: RunOther, change: str, coordinator: str, checkpoint: Path
) -> None:
    source = serve(run, checkpoint, "m", coordinator).json()["endpoint"]
    spoken = (
        f"speaks {own()}; you speak {SPEAKS[change]}"
        if change is OLDER
        else f"speaks {own()}; this mx speaks {SPEAKS[change]}"
    )
    for arguments in (
        ("pull", "m", "--coordinator", coordinator),
        ("serve", str(checkpoint), "--model", "n", "--coordinator", coordinator),
        ("models", "--coordinator", coordinator),
    ):
        code, error = finished(run_other(change, *arguments, "--json"))
        assert (code, error["type"]) == (EXIT_NO_SOURCE, "CoordinatorVersionError"), arguments
        assert spoken in error["message"] and error["hint"].startswith(HINT)
    code, error = finished(run_other(change, "pull", "m", "--from", f"peer={source}", "--json"))
    assert (code, error["type"]) == (EXIT_NO_SOURCE, "PeerVersionError")
    assert spoken in error["message"]
    assert [str(each.model) for each in api.list_models(coordinator=coordinator)] == ["m"]


# -- among others of this version -----------------------------------------------------------------

#: A source that answers in another version, and that the coordinator lists all the same, since it
#: calls in this one: CHECKPOINT is served. Its id is the least, so that of equal sources it is the
#: first that pulls read from.
TWO_FACED = """
import uuid
import mx.core.versions, mx.wire.rpc
uuid.uuid4 = lambda: uuid.UUID("00000000-0000-4000-8000-000000000000")
called_with = mx.wire.rpc.headers()
mx.wire.rpc.headers = lambda: called_with
mx.wire.rpc.check_versions = lambda *answer: None
mx.core.versions.WIRE_VERSION += 2
mx.core.versions.WIRE_MIN_VERSION += 2
source = api.serve(sys.argv[2], model="m", coordinator=coordinator)
print(source.endpoint, flush=True)
sys.stdin.read()
"""


def test_a_pull_leaves_a_source_of_another_version_and_reads_from_a_good_one(
    run: Run, coordinator: str, checkpoint: Path, settings: config.Settings
) -> None:
    with script(TWO_FACED, coordinator, str(checkpoint)) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        said = refused_by("source", endpoint, NEWER)
        with api.pull("m", coordinator=coordinator, settings=settings) as pull:
            alone = error_of(pull)
        assert isinstance(alone, NoSourceError) and said in alone.message
        code, error = finished(run("pull", "m", "--coordinator", coordinator, "--json"))
        assert (code, error["type"]) == (EXIT_NO_SOURCE, "NoSourceError")
        assert said in error["message"]

        good = serve(run, checkpoint, "m", coordinator)
        for transport in ("shm", "tcp"):
            pulled = run("pull", "m", "--coordinator", coordinator, "--transport", transport,
                         "--json")  # fmt: skip
            assert pulled.wait(60) == EXIT_OK, pulled.err
            report = json.loads(pulled.out)
            sources = {path["source"] for path in report["paths"]}
            assert sources == {good.json()["endpoint"]}, report
            if transport == "tcp":  # the report of a pull that attaches has no place for it
                left = {"source": endpoint, "why": "failed", "reason": said}
                assert report["left"] == [left]


def test_a_source_outlives_a_coordinator_of_another_version(run: Run, run_other: RunOther) -> None:
    """Its coordinator is replaced by another version, which it says, and later comes back."""
    documents = make_documents("A")
    record = make_record(documents)
    address, process = start_coordinator(run)
    port = int(address.rpartition(":")[2])
    states: list[tuple[bool, str]] = []

    async def until(registered: bool, why: str) -> None:
        async with asyncio.timeout(60):
            while not any(state == registered and why in text for state, text in states):
                await asyncio.sleep(0.05)
        states.clear()

    async def main() -> None:
        client = CoordinatorClient(address)
        work = client.keep_alive(
            lambda: record,
            lambda: register_at(client, record, by_digest(documents), source_secret=b"s" * 32),
            on_state=lambda *state: states.append(state),
        )
        keeping = asyncio.create_task(work)
        try:
            await until(True, address)
            process.end()
            await until(False, "not registered")
            replacing = run_other(NEWER, "--listen", address, daemon=True)
            await until(False, refused_by("coordinator", address, NEWER))
            replacing.end()
            await until(False, "not registered")
            await asyncio.to_thread(start_coordinator, run, port=port)
            await until(True, address)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await client.close()

    asyncio.run(main())


@other
def test_a_pull_falls_back_to_disk(
    run_other: RunOther, change: str, checkpoint: Path, settings: config.Settings
) -> None:
    address = other_coordinator(run_other, change)
    with api.pull("m", coordinator=address, fallback=checkpoint, settings=settings) as pull:
        fallback = pull.wait(60).fallback
    assert fallback == "disk"
