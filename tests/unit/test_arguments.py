"""Arguments of the Python API that are of a wrong type: a ConfigError that names each."""

from __future__ import annotations

import enum
import inspect
import pydoc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import mx
from mx import api, config
from mx.api.arguments import PlanArguments, PullArguments
from mx.api.options import pull_options
from mx.errors import ConfigError, CoordinatorError

SETTINGS = config.load({"coordinator": "127.0.0.1:1", "wait_s": 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait_s", "abc"),
        ("wait_s", -1),
        ("wait_s", float("nan")),
        ("peer", 5),
        ("path", 5),
        ("fallback", b"here"),
        ("out", 5),
        ("revision", 1),
        ("revision", None),
        ("variant", 1),
        ("coordinator", 7600),
        ("transport", ["tcp"]),
        ("device", 0),
        ("attach", "no"),
        ("hold", 1),
        ("resume", "yes"),
        ("files_only", "yes"),
        ("files_only", [1]),
        ("files_only", 1),
    ],
)
def test_a_wrong_argument_of_pull_is_named(name: str, value: object) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name):
        api.pull("m", settings=SETTINGS, **wrong)


def test_every_public_name_shows_its_real_signature() -> None:
    for module, names in ((mx, dir(mx)), (api, api.__all__)):
        for name in names:
            called = getattr(module, name)
            if name.startswith("_") or inspect.ismodule(called) or not callable(called):
                continue
            if isinstance(called, enum.EnumType):  # whose signature is Python's
                continue
            for of in (called, *_methods_of(called)):
                shown = inspect.signature(of).parameters.values()
                for each in shown:
                    assert each.default is not ..., (name, of, each)
                    assert not str(each.default).startswith("<object"), (name, of, each)
                kinds = [each.kind for each in shown if each.kind in _ANY]
                # Only a processing key takes fields of any name.
                assert not kinds or (called, kinds) == (mx.ProcessingKey, [_ANY[1]]), (name, of)
            assert "Ellipsis" not in pydoc.render_doc(called), name


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _methods_of(called: object) -> Iterator[Callable[..., object]]:
    for name, each in vars(called).items() if isinstance(called, type) else ():
        if inspect.isfunction(each) and not name.startswith("_"):
            yield each


def test_what_a_signature_shows_is_what_is_taken() -> None:
    for call, taken in ((api.pull, PullArguments), (api.plan, PlanArguments)):
        parameters = inspect.signature(call).parameters
        shown: Any = {name: parameters[name].default for name in taken.__annotations__}
        settings = config.load({}, environ={})
        none, all_of_them = (pull_options("m", settings, each) for each in (PullArguments(), shown))
        assert replace(none, host=None) == replace(all_of_them, host=None)


def test_an_argument_that_does_not_exist_is_refused_with_the_closest_that_does() -> None:
    for call in (api.pull, api.plan, api.load):
        shown = inspect.signature(call).parameters
        assert "peer" in shown
        assert ("out" in shown) == (call is not api.plan)
        wrong: dict[str, Any] = {"pear": "127.0.0.1:1"}
        with pytest.raises(TypeError, match=f"{call.__name__}.*'pear'.*'peer'"):
            call("m", **wrong)
    of_pull_only: dict[str, Any] = {"out": "folder"}
    with pytest.raises(TypeError, match="'out'"):
        api.plan("m", **of_pull_only)


@pytest.mark.parametrize("model", [5, None, b"m"])
def test_a_model_is_text(model: Any) -> None:
    for call in (api.pull, api.plan, api.load):
        with pytest.raises(ConfigError, match="model"):
            call(model)


def test_a_time_may_be_written_as_in_the_settings() -> None:
    wait: dict[str, Any] = {"wait_s": "10ms"}
    with (
        api.pull("m", settings=SETTINGS, **wait) as pull,
        pytest.raises(CoordinatorError, match="answers"),
    ):
        pull.wait(20)


@pytest.mark.parametrize(
    ("name", "value"),
    [("hold", True), ("into", memoryview(bytearray(8)))],
)
def test_files_only_goes_with_nothing_for_weights(name: str, value: object) -> None:
    weights: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name) as caught:
        api.pull("m", files_only=True, settings=SETTINGS, **weights)
    assert "files_only" in str(caught.value)


def test_files_alone_prove_no_pin_and_hold_no_tensors() -> None:
    with pytest.raises(ConfigError, match="pin"):
        api.pull("m@0123456789", path="/models/m", files_only=True, settings=SETTINGS)
    with pytest.raises(ConfigError, match="tensors"):
        api.load("m", files_only=True, settings=SETTINGS)
