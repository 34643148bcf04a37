"""What packs add to the kernel's verbs: flags, and what is done where they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mx import packs
from mx.packs import load

if TYPE_CHECKING:
    from mx.api import Source
    from mx.config import Settings

_Kind = TypeVar("_Kind", bound="VerbAddition")


class VerbAddition:
    """What a pack adds to a verb; a pack derives from one of the classes below, and overrides what
    it needs. In all methods `context` is the verb's, with what was given in `params`."""

    #: The type of each flag, as typer takes it: `Annotated[str | None, typer.Option(...)]`. What is
    #: not given is None, or False where the type is bool.
    flags: ClassVar[Mapping[str, Any]] = {}
    #: What the help of the verb says of them, with its examples.
    help = ""

    def is_given(self, context: Any) -> bool:
        """Return True if any of the flags was given."""
        return any(context.params.get(name) for name in self.flags)


class ServeAddition(VerbAddition):
    """What a pack adds to `mx serve`."""

    def run(self, context: Any, checkpoint: str, *, as_json: bool) -> bool:
        """Do something else than to serve. Returns True if that was done."""
        return False

    def serve(
        self, context: Any, checkpoint: Source | None, settings: Settings, serving: ExitStack
    ) -> Sequence[Source]:
        """Serve something beside the checkpoint, or alone, if it is given.

        Args:
            context: The verb's.
            checkpoint: What is served already, if anything.
            settings: The verb's settings.
            serving: Enter here what is to be closed at the end.

        Returns:
            The sources.
        """
        return ()


class FoundBeside:
    """What a pack has found beside what a verb is for.

    Args:
        key: Its name in the object of `--json`.
        object: Its value there.
        show: Writes it for people.
    """

    def __init__(self, key: str, object: Any, show: Callable[[], None]) -> None:
        self.key, self.object, self.show = key, object, show


class PullAddition(VerbAddition):
    """What a pack adds to `mx pull`."""

    def check(self, context: Any, settings: Settings) -> None:
        """Refuse what can't be done, before anything moves. Raises ConfigError."""

    def get(self, context: Any, model: str, settings: Settings) -> FoundBeside | None:
        """Get something beside the model, while that is pulled; None: it was not asked for."""
        return None


class VerifyAddition(VerbAddition):
    """What a pack adds to `mx verify`."""

    def run(self, context: Any, folder: str, pin: str, *, as_json: bool) -> bool:
        """Do what the flags ask for, in place of the verb. Returns True if that was done."""
        return False


class ModelsAddition(VerbAddition):
    """What a pack adds to `mx models`."""

    def find(self, name: str, settings: Settings, *, lists_all: bool) -> FoundBeside:
        """Return what is to be listed with the models.

        Args:
            name: The model's name; "" for all.
            settings: The verb's settings.
            lists_all: False where the user has named a model.
        """
        raise NotImplementedError


def of(verb: str, kind: type[_Kind]) -> list[_Kind]:
    """Return what packs add to a verb."""
    found = [
        load(pack.additions[verb]) for pack in packs.packs().values() if verb in pack.additions
    ]
    return [each for each in found if isinstance(each, kind)]
