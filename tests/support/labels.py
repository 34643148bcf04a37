"""What a source's process says that it holds, against tickets that another process relays.

`LabelRules` are the rules; a subclass says, by its fixture `bench`, for which transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mx.errors import PeerProtocolError, SourceError, StaleGenerationError
from mx.testing.bench import Bench
from mx.testing.child import GRANT_ID, ChildSource
from mx.testing.harness import PEER
from mx.testing.holdings import HeldResources
from mx.testing.memory import pattern
from mx.transport import Session
from mx.units import MIB

OURS, OTHERS = b"our weights", b"other weights"


def refusal(bench: Bench, ticket: bytes, content: bytes, generation: int = 1) -> SourceError:
    """Return the error of opening a ticket for `content`; it names the peer."""
    with pytest.raises(SourceError) as caught:
        bench.open_ticket(GRANT_ID, ticket, [MIB], generation=generation, tls=None, content=content)
    assert caught.value.peer == PEER
    return caught.value.with_traceback(None)


def copied(bench: Bench, session: Session) -> bytes:
    view = bench.destination(MIB)
    bench.succeed(bench.read(session, 0, 0, view))
    return bench.peek(view)


@contextmanager
def process(bench: Bench, content: bytes) -> Iterator[ChildSource]:
    """A source in another process, of one MiB of seed 5."""
    harness = bench.harness
    child = ChildSource(
        harness.target,
        [MIB],
        seed=5,
        kind=harness.kind,
        device=harness.there.device,
        content=content,
    )
    try:
        yield child
    finally:
        child.close()


class LabelRules:
    """Subclass it with a fixture `bench` of memory in one place."""

    def test_a_ticket_of_the_same_process_for_another_model_is_refused(self, bench: Bench) -> None:
        ours = bench.source(MIB, content=OURS)
        others = bench.source(MIB, content=OTHERS)
        error = refusal(bench, others.grant()[1], OURS)
        assert isinstance(error, PeerProtocolError)
        assert "serves other weights" in str(error)
        session = bench.open(ours, content=OURS)
        assert copied(bench, session) == ours.memories[0].expected

    def test_a_ticket_of_another_process_for_another_model_is_refused(self, bench: Bench) -> None:
        with process(bench, OTHERS) as child:
            said = str(refusal(bench, child.ticket, OURS))
            assert "serves other weights" in said, said
            session = bench.open_ticket(GRANT_ID, child.ticket, [MIB], tls=None, content=OTHERS)
            assert copied(bench, session) == pattern(MIB, 5)

    def test_a_source_that_says_nothing_is_for_readers_that_want_anything(
        self, bench: Bench
    ) -> None:
        silent = bench.source(MIB)
        assert "does not say which weights" in str(refusal(bench, silent.grant()[1], OURS))
        assert copied(bench, bench.open(silent)) == silent.memories[0].expected
        named = bench.source(MIB, content=OURS)
        assert copied(bench, bench.open(named)) == named.memories[0].expected

    def test_a_label_is_of_one_generation(self, bench: Bench) -> None:
        """Else a reader that is told of the next generation ahead of it would take the present
        label for the bytes that come then."""
        source = bench.source(MIB, content=OURS)
        early = refusal(bench, source.grant()[1], OURS, generation=2)
        assert isinstance(early, StaleGenerationError)
        source.exposure.set_generation(2)
        late = refusal(bench, source.grant()[1], OURS, generation=2)
        assert "does not say which weights" in str(late)
        assert isinstance(refusal(bench, source.grant()[1], OURS), StaleGenerationError)

    def test_nothing_is_mapped_of_a_source_that_is_refused_and_nothing_is_left(
        self, bench: Bench
    ) -> None:
        with process(bench, OTHERS) as child:
            before = HeldResources.now()
            for _ in range(20):
                refusal(bench, child.ticket, OURS)
            bench.eventually(
                lambda: not HeldResources.now().beyond(before),
                lambda: "left behind: " + "; ".join(HeldResources.now().beyond(before)),
            )
