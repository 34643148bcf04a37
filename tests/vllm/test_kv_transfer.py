"""A replica whose KV caches move by NIXL, too: a pull leaves UCX's modules to vLLM's connector."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from mx_transports.ucx import nixl
from tests.support.daemon import ROOT

_NAMES = ("UCX_MODULES", "UCX_MEM_MMAP_HOOK_MODE")
#: For each case prepares for vLLM's own configuration, with a connector or none and what the user
#: has set, and shows what UCX finds where a pull loads it.
_PREPARES = """
import json, os, sys
from vllm.config import KVTransferConfig, VllmConfig
from mx import config
from mx.engines.vllm.loader import prepare_for_connector
from mx_transports.ucx.nixl import LIBRARY_SETTINGS
names, cases = json.loads(sys.argv[1])
for connector, users in cases:
    for name in names:
        os.environ.pop(name, None)
    os.environ |= users
    wanted = KVTransferConfig(kv_connector=connector, kv_role="kv_both") if connector else None
    prepare_for_connector(VllmConfig(kv_transfer_config=wanted))
    with config.library_environment(LIBRARY_SETTINGS):
        print("ANSWER " + json.dumps([os.environ.get(name) for name in names]))
"""
_FOUND: tuple[tuple[tuple[str | None, dict[str, str]], list[str]], ...] = (
    (("NixlConnector", {}), ["*", "bistro"]),
    (("NixlConnector", {"UCX_MODULES": "cuda"}), ["cuda", "bistro"]),
    ((None, {}), [nixl.LIBRARY_SETTINGS[name] for name in _NAMES]),
)


def test_ucx_is_as_a_connector_needs_it() -> None:
    cases, found = zip(*_FOUND, strict=True)
    path = os.pathsep.join((str(ROOT), str(ROOT / "transports")))
    ended = subprocess.run(
        [sys.executable, "-c", _PREPARES, json.dumps([_NAMES, cases])],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    answers = [line for line in ended.stdout.splitlines() if line.startswith("ANSWER ")]
    assert [json.loads(line.removeprefix("ANSWER ")) for line in answers] == [*found]
