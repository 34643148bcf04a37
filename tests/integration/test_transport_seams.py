"""A transport of another distribution with a fact and settings, as docs/transports.md makes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.checkpoints import write_checkpoint
from tests.support.commands import Command, Run, start_coordinator
from tests.support.daemon import ROOT
from tests.support.distributions import install, installed_commands
from tests.support.documented import documented_package

pytestmark = pytest.mark.integration

NAME = "fabric-piece"


@pytest.fixture
def run_with() -> Iterator[Callable[..., Command]]:
    """Start commands in an environment, each in an interpreter of its own."""
    with installed_commands() as run:
        yield lambda env, *arguments: run(*arguments, env=env)


@pytest.fixture
def checkpoint_of_two(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_checkpoint(path, {"layers.0.w": (64, 64), "layers.1.w": (64, 64)})
    return path


def topo(run_with: Callable[..., Command], env: dict[str, str], *more: str) -> dict[str, Any]:
    command = run_with(env, "topo", "--json", *more)
    assert command.wait() == 0, command.err
    found: dict[str, Any] = json.loads(command.out)
    return found


def test_two_that_name_one_fabric_reach_each_other(
    run: Run, run_with: Callable[..., Command], tmp_path: Path, checkpoint_of_two: Path
) -> None:
    env = install(tmp_path / "site", *documented_package())
    coordinator, _ = start_coordinator(run)  # which has no such transport
    at = ("--coordinator", coordinator)
    served = run_with(
        *(env, "serve", str(checkpoint_of_two), "--model", "m", "--json", *at),
        *("--piece-fabric", "east"),
    )
    served.json()
    pull = ("pull", "m", *at, "--json", "--transport", NAME)
    same = run_with(env | {"MX_PEER_PIECE_FABRIC": "east"}, *pull, "--piece-streams", "3")
    assert same.wait() == 0, same.err
    (path,) = json.loads(same.out)["paths"]
    assert path["transport"] == NAME
    for fabric in ("west", ""):
        other = run_with(env, *pull, "--piece-fabric", fabric)
        assert other.wait() == 3, other.err
        assert "does not reach from here to there" in other.err
    # Without a choice of transports it is another one's turn.
    assert run_with(env, "pull", "m", *at, "--piece-fabric", "west").wait() == 0
    found = topo(run_with, env, "--sources", *at, "--piece-fabric", "east")
    assert found["place"]["facts"] == [{"transport": NAME, "data": b"east".hex()}]
    assert NAME in {path["transport"] for path in found["sources"][0]["paths"]}
    found = topo(run_with, env, "--sources", *at, "--piece-fabric", "west")
    assert NAME not in {path["transport"] for path in found["sources"][0]["paths"]}


def test_settings_of_a_transport_are_settings_as_all(
    run_with: Callable[..., Command], tmp_path: Path
) -> None:
    env = install(tmp_path / "site", *documented_package())
    (tmp_path / "config.toml").write_text('piece_fabric = "east"\npiece_streams = 4\n')
    env["MX_PEER_CONFIG"] = str(tmp_path / "config.toml")
    shown = run_with(env | {"MX_PEER_PIECE_STREAMS": "5"}, "config", "show", "--json")
    assert shown.wait() == 0, shown.err
    found = json.loads(shown.out)
    origin = f"{tmp_path / 'config.toml'}, line 1"
    assert found["piece_fabric"] == {"value": "east", "origin": origin}
    assert found["piece_streams"] == {"value": 5, "origin": "environment MX_PEER_PIECE_STREAMS"}
    wrong = run_with(env, "pull", "m", "--piece-streams", "17")
    assert wrong.wait() == 2
    assert "it must be a whole number from 1 to 16" in wrong.err


BAD = {
    "raises": "raise RuntimeError('no adapter')",
    "not bytes": "return 'east'",
    "None": "return None",
    "too long": "return bytes(257)",
    "asks for what is not there": "return setting('there_is_no_such_setting')",
}


@pytest.mark.parametrize("why", BAD)
def test_one_that_can_not_say_its_facts_is_left_out_with_the_reason(
    run: Run, run_with: Callable[..., Command], tmp_path: Path, checkpoint_of_two: Path, why: str
) -> None:
    modules, entries = documented_package()
    good = 'return setting("piece_fabric").encode()'
    assert good in modules["my_package/pack.py"]
    modules["my_package/pack.py"] = modules["my_package/pack.py"].replace(good, BAD[why])
    env = install(tmp_path / "site", modules, entries)
    found = topo(run_with, env)
    assert found["place"]["facts"] == []
    left_out = found["transports"][NAME]
    assert left_out["works"] is False and left_out["reason"].startswith("its facts: ")
    if why != "raises":
        return
    assert left_out["reason"] == "its facts: RuntimeError: no adapter"
    coordinator, _ = start_coordinator(run)
    at = ("--coordinator", coordinator)
    served = run_with(env, "serve", str(checkpoint_of_two), "--model", "m", "--json", *at)
    served.json()
    assert run_with(env, "pull", "m", *at, "--transport", "tcp").wait() == 0
    refused = run_with(env, "pull", "m", *at, "--transport", NAME)
    assert refused.wait() == 3
    plan = run_with(env, "plan", "m", *at, "--json")
    assert plan.wait() == 0, plan.err
    assert NAME not in json.dumps(
        [p for p in json.loads(plan.out)["paths"] if p["use"] == "chosen"]
    )


TAKES_A_NAME = """
from mx import config_values as values
from mx.config_values import SettingDescription
from mx.packs import Pack
PACK = Pack(
    settings={
        "streams": SettingDescription("mine", values.text, "Another's."),
        "metrics": SettingDescription("mine", values.text, "Another's."),
        "greedy_one": SettingDescription("mine", values.text, "Its own."),
    },
)
"""


def test_a_setting_that_mx_has_is_refused(tmp_path: Path) -> None:
    env = install(tmp_path, {"greedy.py": TAKES_A_NAME}, "[mx.packs]\ngreedy = greedy:PACK\n")
    code = """
from mx import config
settings = config.load({"greedy_one": "own"}, environ={})
print(settings.streams, settings.value("streams"), settings.value("greedy_one"))
print(config.descriptions()["metrics"].help != "Another's.")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "auto auto own\nTrue\n"
    for name in ("streams", "metrics"):
        said = f"the setting {name} of the pack greedy is left out: there is one of this name"
        assert said in done.stderr
    assert "greedy_one" not in done.stderr


def test_a_transport_is_not_imported_for_its_facts(tmp_path: Path) -> None:
    env = install(tmp_path, *documented_package())
    code = """
import sys
from mx import config, plugins
context = plugins.transport_context(config.load({"piece_fabric": "east"}, environ={}))
assert [(each.transport, each.data) for each in context.facts] == [("fabric-piece", b"east".hex())]
assert not context.broken and context.setting("piece_streams") == 1
print([name for name in sys.modules if name.startswith("my_package.")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['my_package.pack']\n"


PACKED_PULL = """
import json, sys
import mx
from mx import counters

at = sys.argv[2]
with mx.serve(sys.argv[1], model="m", coordinator=at):
    with mx.pull("m", coordinator=at, transport="packed", attach=False) as pull:
        (path,) = pull.wait().paths
        digests = [bytes(t.view) for layer in pull.layers() for t in layer.views().values()]
right = open(sys.argv[1], "rb").read()
print(json.dumps({
    "transport": path.transport, "bytes": path.bytes,
    "given": counters.totals(counters.GIVEN_BYTES)["packed"],
    "right": all(each in right for each in digests),
}))
"""


def test_a_pull_over_a_transport_that_compresses_says_what_it_got(
    coordinator: str, tmp_path: Path
) -> None:
    path, nbytes = tmp_path / "model.safetensors", 16 << 20
    save_file({f"layers.{i}.w": np.zeros(nbytes // 16, np.float32) for i in range(4)}, path)
    entries = "[mx.transports]\npacked = tests.support.compressing:PackedTransport\n"
    env = install(tmp_path / "site", {}, entries)
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", PACKED_PULL, str(path), coordinator],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["transport"], found["bytes"], found["right"]) == ("packed", nbytes, True)
    assert found["given"] == nbytes
