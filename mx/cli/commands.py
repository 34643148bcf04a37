"""Typer's commands, with a help text that shows no type for a flag, and without pydantic."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from mx.errors import ConfigError

#: What other programs call it, and what does it here.
_MEANT = {
    "mx download": "did you mean mx pull?",
    "mx help": "did you mean mx --help?",
    "mx list": "did you mean mx models?",
    "mx ls": "did you mean mx models?",
    "mx status": "did you mean mx top, mx sources or mx doctor?",
    "mx version": "did you mean mx --version?",
    "mx config get": "did you mean mx config show?",
    "mx config set": "write it into the file that mx config show names, set its variable "
    "(MX_PEER_COORDINATOR=HOST:7600), or give its flag",
}


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
        if isinstance(param, TyperArgument):
            # Typer writes {MODEL} <str>: what is typed has neither braces nor a type.
            argument: Any = param
            argument.display_type_rich = lambda ctx: None
            if param.required:
                argument._usage_display_name = argument._rich_display_name
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return a verb's name, the verb, and its arguments.

        Raises:
            ConfigError: There is no such verb. The hint is the nearest.
        """
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            raise ConfigError(
                f"there is no command {ctx.command_path} {name}", hint=self._hint(ctx, name)
            )
        return super().resolve_command(ctx, args)

    def _hint(self, ctx: Any, name: str) -> str:
        import difflib

        if meant := _MEANT.get(f"{ctx.command_path} {name}"):
            return meant
        close = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
        if close:
            return f"did you mean {ctx.command_path} {close[0]}?"
        return f"{ctx.command_path} --help lists what there is"

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, the help option included."""
        return _adjusted(super().get_params(ctx))
