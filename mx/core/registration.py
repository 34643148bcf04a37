"""What a source asks for when it registers."""

from __future__ import annotations

from dataclasses import dataclass, field

from mx.core.types import SourceRecord


@dataclass(frozen=True, slots=True)
class Intent:
    """What a source registers for, beside being listed.

    `replaces` is the revision that it updates, which has to be the newest; "" for none. With
    `keeps_pin` it was listed before: if its name does not stand for its weights by now, readers
    find it by its pin. `receipt` is what the coordinator gave for the source's model, or for
    `replaces`, in an earlier life; b"" for none. With `publishes` it is to be what its name means
    now, whatever that has meant before. `published_s` is what a coordinator has said of when the
    owner has published it (`mx.core.registry.RegisteredSource`); 0.0 if none has.
    """

    replaces: str = ""
    keeps_pin: bool = False
    receipt: bytes = b""
    publishes: bool = False
    published_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Registration:
    """A source that asks to be listed.

    `secret`, 16 to 64 bytes, authenticates later calls about the source.
    """

    record: SourceRecord
    secret: bytes = field(repr=False)
    intent: Intent = field(default_factory=Intent)
