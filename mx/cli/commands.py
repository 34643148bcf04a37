"""Typer's commands, with a help text that shows no type for a flag."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A verb."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, the help option included."""
        return _without_flag_types(super().get_params(ctx))


class Group(TyperGroup):
    """A command that has verbs."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, the help option included."""
        return _without_flag_types(super().get_params(ctx))
