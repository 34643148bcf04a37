"""What a policy lets a principal have of a fleet that it may see in part: documents, watches, and
the findings of `mx doctor`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import Registration
from mx.errors import LocalError, NotAllowedError, UnknownModelError
from mx.wire.channel import dial
from mx.wire.client import CoordinatorClient
from mx.wire.documents import fetch
from mx.wire.listing import WatchKind
from tests.support.commands import free_port
from tests.support.policy_site import (
    MODEL,
    OBSERVE,
    PULL,
    SERVE,
    Site,
    authority,
    listed,
    registrable,
    site,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]

__all__ = ["authority", "site"]  # fixtures

OTHERS = """
[[allow]]
principal = "spiffe://mx.test/ns/b/sa/other"
may = ["serve", "pull"]
models = "other-*"
"""


async def _fetched(channel: grpc.aio.Channel, refs: list[tuple[bytes, int]]) -> bool:
    """True if the process at the other end gives these documents."""
    try:
        return len(await fetch(channel, refs, who="127.0.0.1")) == len(refs)
    except UnknownModelError:
        return False


async def test_documents_are_given_to_those_who_may_pull_a_model_of_them(
    site: Site, checkpoint: Path
) -> None:
    observe = OBSERVE.replace("other-*", "llama-*")  # which shows the stranger their digests
    site.policy.write_text(SERVE + PULL + OTHERS + observe)
    await asyncio.to_thread(site.coordinator, "--policy", str(site.policy))
    _, endpoint = await asyncio.to_thread(site.serve, checkpoint, "--policy", str(site.policy))
    reader, stranger = site.files("reader"), site.files("stranger")
    served = (await listed(site, reader)).ref.documents
    for address in (site.address, endpoint):
        for files, given in ((reader, True), (stranger, False)):
            channel = dial(address, tls=files)
            assert await _fetched(channel, served) is given, (address, files)
            await channel.close(None)

    # What it does not have it can't register as its own model either, and pull then.
    made, record, secret = registrable()
    record = replace(record, model=record.model._replace(name="other-1"))
    client, source = (
        CoordinatorClient(site.address, tls=site.files(name)) for name in ("stranger", "source")
    )
    try:
        key = record.model._replace(name="llama-2")
        first = replace(record, model=key, source_id=str(uuid.uuid4()))
        await source.register(Registration(first, secret), made)
        with pytest.raises(LocalError, match="is missing here"):
            await client.register(Registration(record, secret), {})
        with pytest.raises(UnknownModelError):
            await client.fetch(record.ref.documents)
        await client.register(Registration(record, secret), made)  # it has them
        assert await client.fetch(record.ref.documents) == made
        await source.deregister(first.source_id)
        await client.deregister(record.source_id)
        assert await client.fetch(record.ref.documents) == made  # the name stands for them still
    finally:
        await client.close()
        await source.close()


def _policy(site: Site, text: str) -> None:
    """Replace the policy as a user would."""
    new = site.folder / "new.toml"
    new.write_text(text)
    new.rename(site.policy)


async def test_watches_follow_the_policy(site: Site) -> None:
    observe = OBSERVE.replace('models = "other-*"', "")
    site.policy.write_text(SERVE + PULL + observe)
    # Nothing renews the lease of the source.
    await asyncio.to_thread(site.coordinator, "--policy", str(site.policy), "--lease-s", "300")
    names = ("source", "reader", "stranger")
    source, reader, stranger = (
        CoordinatorClient(site.address, tls=site.files(name)) for name in names
    )
    made, record, secret = registrable()
    pull_id = str(uuid.uuid4())

    async def report() -> None:
        async with reader.reporting() as tell:
            for done in range(1, 10_000):
                running = PullPhase.RUNNING
                await tell(
                    PullStatus(pull_id, record.model, "host", 1, running, 4, 0, 10**6, done, 1)
                )
                await asyncio.sleep(0.3)

    async with AsyncExitStack() as ends, asyncio.timeout(120):
        for client in (source, reader, stranger):
            ends.push_async_callback(client.close)
        everything, one = stranger.watch(), stranger.watch(MODEL)
        pulls, of_one = stranger.watch(pulls=True), stranger.watch(MODEL, pulls=True)
        for each in (everything, one, pulls, of_one):
            ends.push_async_callback(each.aclose)
        await source.register(Registration(record, secret), made)
        reporting = asyncio.create_task(report())
        ends.push_async_callback(lambda: asyncio.gather(reporting, return_exceptions=True))
        ends.callback(reporting.cancel)
        for watch in (everything, one):
            while (await anext(watch)).kind is not WatchKind.UP:
                pass
        for reports in (pulls, of_one):
            while (await anext(reports)).pull is None:
                pass

        _policy(site, SERVE + PULL + OBSERVE)  # of llama-8b it may see nothing any more
        while (seen := await anext(everything)).kind is not WatchKind.GONE:
            pass
        assert seen.record is not None and seen.record.source_id == record.source_id
        assert seen.reason == "the policy hides it"
        while (hidden := await anext(pulls)).kind is not WatchKind.PULL_GONE:
            pass
        assert hidden.pull_id == pull_id and hidden.reason == "the policy hides it"
        refused = f"sa/other may not observe '{MODEL}'"
        ended: AsyncGenerator[object, None]
        for ended in (one, of_one):
            with pytest.raises(NotAllowedError, match=refused):
                while True:
                    await anext(ended)

        _policy(site, SERVE + PULL + observe)
        while (await anext(everything)).kind is not WatchKind.UP:
            pass
        while (await anext(pulls)).pull is None:
            pass
        _policy(site, SERVE + PULL)
        for ended in (everything, pulls):
            with pytest.raises(NotAllowedError, match="sa/other may not observe any model"):
                while True:
                    await anext(ended)


def test_doctor_says_which_right_is_missing(site: Site, checkpoint: Path) -> None:
    site.policy.write_text(SERVE + PULL + OTHERS + OBSERVE.replace("other-*", "llama-*"))
    site.coordinator("--policy", str(site.policy))
    _, endpoint = site.serve(checkpoint, "--policy", str(site.policy))
    only = [word for name in ("coordinators", "models", "sources") for word in ("--only", name)]

    def findings(name: str, code: int) -> dict[str, Any]:
        command = site.mx(name, "doctor", "--json", *only)
        assert command.wait(60) == code, (command.out, command.err)
        found = command.json()["findings"]
        return {each["check"]: each for each in found}

    assert findings("reader", 0)["sources"]["level"] == "ok"
    found = findings("stranger", 1)  # it may pull other models, and see this one
    assert found["coordinators"]["level"] == "ok" and "1 model and 1 source" in str(found["models"])
    said = found["sources"]
    assert said["level"] == "failure" and f"may not pull '{MODEL}'" in said["text"]
    assert "the policy of this source" in said["text"] and endpoint in said["text"]
    assert "may = 'pull' in its --policy" in said["fix"]


def test_the_page_says_a_refusal_once_and_comes_back(site: Site) -> None:
    site.coordinator("--policy", str(site.policy))
    web = site.mx("stranger", "web", "--listen", f"127.0.0.1:{free_port()}", "--json")
    web.until(lambda: "web.coordinator_answers" in web.err, "the coordinator's answer")
    _policy(site, SERVE + PULL)
    refusal = "sa/other may not observe any model"
    web.until(lambda: refusal in web.err, "the refusal")
    assert web.process.poll() is None
    time.sleep(2)  # it asks again, and gets the same
    _policy(site, SERVE + PULL + OBSERVE)
    web.until(lambda: web.err.count("web.coordinator_answers") == 2, "the coordinator again")
    assert web.err.count("web.coordinator_lost") == 1 == web.err.count(refusal)


def test_who_may_not_serve_is_told_before_bytes_move(site: Site, checkpoint: Path) -> None:
    site.coordinator("--policy", str(site.policy))
    source, _ = site.serve(checkpoint)
    os.kill(source.process.pid, signal.SIGSTOP)  # nothing could move
    try:
        said = site.refused("holder", "pull", MODEL, "--hold")
    finally:
        os.kill(source.process.pid, signal.SIGCONT)
    refusal = f"sa/reader may not serve '{MODEL}'"
    assert said.count(refusal) == 1 and "not told of this one" not in said
    # A registration, which comes after all is read, would be refused with "any model".
    assert refusal in site.refused(
        "holder", "pull", MODEL, "--hold", "--from", f"disk={checkpoint}"
    )
    assert refusal in site.refused("holder", "serve", str(checkpoint), "--model", MODEL)
    site.pulls("holder")  # and what does not stay may


@pytest.mark.long
def test_a_pull_that_may_not_serve_any_more_says_that_it_holds_nothing(
    site: Site, checkpoint: Path
) -> None:
    site.policy.write_text(SERVE + PULL + PULL.replace('"pull"', '"serve"'))
    coordinator = site.coordinator("--policy", str(site.policy))
    source, _ = site.serve(checkpoint, "--max-bandwidth", "3MB")
    os.kill(source.process.pid, signal.SIGSTOP)
    try:
        pull = site.mx("holder", "pull", MODEL, "--hold", "--transport", "tcp", "--wait", "120")
        pull.until(lambda: "waiting" in pull.err, "a pull that was let in")
        _policy(site, SERVE + PULL)
        coordinator.until(lambda: coordinator.err.count("policy.read") == 2, "the new policy")
    finally:
        os.kill(source.process.pid, signal.SIGCONT)
    assert pull.wait(120) == 5, pull.err
    assert "other pulls are not told of this one" in pull.err  # while it ran
    assert pull.err.count("sa/reader may not serve") == 2 and "Ctrl-C" not in pull.err
