"""Objects that a `with` block closes at its end, and what is undone where a block fails."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self


class OwnContext:
    """An object that its own `with` block closes."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close it."""


class OwnAsyncContext:
    """An object that its own `async with` block closes."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Close it."""


class Undo:
    """A context that undoes something where its block raises, also where it is interrupted."""

    __slots__ = ("_arguments", "_undo")

    def __init__(self, undo: Callable[..., object], *arguments: Any) -> None:
        """
        Args:
            undo: What is called then.
            arguments: Its arguments.
        """
        self._undo, self._arguments = undo, arguments

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._undo(*self._arguments)
