"""One order for all who listen to a pull from several hosts, however slow a callback is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.lan import LAYERS, ORIGIN, TARGETS, Lan, lan
from tests.support.commands import HostCommand, environment

__all__ = ["lan"]  # a fixture

pytestmark = [pytest.mark.integration, pytest.mark.long]

#: Pulls with a slow callback, one that closes the pull, and two readers of `layers()`. It prints
#: what each of them has seen, and what was reported while a callback ran that came after it.
SCRIPT = """
import json, sys, threading, time
import mx
from mx import api, config
from mx.errors import ConfigError

begun, ended, early, refused = [], [], [], []
settings = config.load({"coordinator": sys.argv[1], "insecure": True, "listen": sys.argv[2]})
with api.pull("m", transport="tcp", settings=settings) as pull:
    def slow(event):
        begun.append(event.index)
        time.sleep(0.03)  # others are verified meanwhile
        if len(begun) == 3:
            try:
                pull.close()
            except ConfigError as error:
                refused.append(str(error))
        ended.append(event.index)

    def read():
        for event in pull.layers():
            called, over = list(begun), set(ended)  # in this order
            if event.index not in called and not over.issuperset(called):
                early.append(event.index)

    pull.on_layer(slow)
    second = []
    pull.on_layer(lambda event: second.append(event.index))
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    report = pull.wait(float("inf"))
    for reader in readers:
        reader.join()
print(json.dumps({"begun": begun, "second": second, "early": early, "refused": refused,
                  "sources": len({path.source for path in report.paths})}))
"""


def test_nothing_is_reported_before_the_callbacks_of_what_came_before(lan: Lan) -> None:
    near, target = TARGETS[:2]
    control = [each for each in lan.options if each not in ("--transport", "tcp")]
    serving = ("serve", str(lan.weights), "--model", "m", *lan.listen(near))
    source = HostCommand(lan.hosts, near, *serving, *control)
    try:
        source.json()
        at = (f"{lan.links[ORIGIN].address(ORIGIN)}:7600", f"{lan.links[target].address(target)}:0")
        command = [*lan.hosts.prefix(target), sys.executable, "-c", SCRIPT, *at]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=120, env=environment()
        )
    finally:
        source.end()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sources"] == 2
    assert sorted(found["begun"]) == list(range(LAYERS)) and found["second"] == found["begun"]
    assert found["early"] == []
    (refused,) = found["refused"]
    assert "a blocking call of mx was made in a callback of mx" in refused
