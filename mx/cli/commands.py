"""Typer's commands, with a help text that shows no type for a flag, and without pydantic."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


class _AsTyped:
    """Takes text and what is not given as they are: typer imports pydantic for them. All else is
    typer's."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value of a parameter for the verb. Raises typer's BadParameter."""
        kind = param.type_descriptor.annotation
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if kind is str and isinstance(value, str):
            return value
        if kind == list[str] and all(isinstance(each, str) for each in value):
            return list(value)
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _adjusted(params: list[Any]) -> list[Any]:
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
        if getattr(param, "_runtime_param", param) is None:
            param._runtime_param = _AsTyped()
    return params


class Command(TyperCommand):
    """A verb."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, the help option included."""
        return _adjusted(super().get_params(ctx))


class VerbGroup(TyperGroup):
    """A command that has verbs."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, the help option included."""
        return _adjusted(super().get_params(ctx))
