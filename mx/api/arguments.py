"""The arguments of `pull`, `plan` and `load`, named and typed once."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

if TYPE_CHECKING:
    from mx.api.reuse import Holder
    from mx.config import Settings
    from mx.core.local_ranks import LocalRanks
    from mx.core.selection import Slice
    from mx.core.variant import ProcessingKey

_Function = TypeVar("_Function", bound=Callable[..., Any])


class PlanArguments(TypedDict, total=False):
    """Those of `plan`, which says what they mean."""

    peer: str | None
    revision: str
    variant: str | ProcessingKey
    coordinator: str | None
    transport: str | None
    attach: bool
    device: str
    only: str | Collection[str] | None
    slices: Mapping[str, Slice] | None
    owner: str | None
    settings: Settings | None


class PullArguments(PlanArguments, total=False):
    """Those of `pull` and `load`; `pull` says what they mean."""

    source: str
    path: str | Path | None
    fallback: str | Path | None
    out: str | Path | None
    hold: bool
    verify: str
    into: Any
    reuse: Holder | Sequence[Holder]
    follow: bool
    allow_older: bool
    local_ranks: LocalRanks | None
    wait_s: float | None
    streams: int | str | None
    resume: bool
    files_only: bool | Collection[str]
    companion: str
    companions: bool


#: What an argument is that is not given; the others are None.
_DEFAULTS: Mapping[str, object] = {
    "revision": "",
    "variant": "",
    "attach": True,
    "device": "cpu",
    "source": "peers",
    "hold": False,
    "verify": "chunks",
    "reuse": (),
    "follow": False,
    "allow_older": False,
    "resume": True,
    "files_only": False,
    "companion": "",
    "companions": True,
}


def takes(arguments: type) -> Callable[[_Function], _Function]:
    """Return a decorator of a function of `model` and these arguments: it shows them in `help` and
    completion, and refuses others, which Python itself does only for parameters."""

    def decorate(function: _Function) -> _Function:
        first = inspect.signature(function).parameters["model"]
        named = {
            name: inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_DEFAULTS.get(name),
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in arguments.__annotations__.items()
        }

        @functools.wraps(function)
        def call(*model: Any, **given: Any) -> Any:
            for name in given.keys() - {"model", *named}:
                close = difflib.get_close_matches(name, named, n=1)
                hint = f". Did you mean {close[0]!r}?" if close else ""
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}"
                )
            return function(*model, **given)

        call.__signature__ = inspect.Signature([first, *named.values()])  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate
