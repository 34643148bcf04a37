"""Each alert of docs/metrics.md fires from its first event, in a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import write_checkpoint
from benchmarks.processes import Child
from tests.support.commands import Command, commands, environment, free_port
from tests.support.daemon import ROOT
from tests.support.outcomes import until
from tests.support.redis_server import needs_redis, redis_server

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(300),
    needs_redis,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

#: A process with metrics in which things go wrong, one for each line that it reads.
TROUBLED = """
import os, resource, sys, time
from dataclasses import replace
import torch, mx
from mx import config, runtime
from mx.errors import MxError

def wrong_bytes():
    weights = {f"w{number}": torch.zeros(1 << 20) for number in range(4)}
    settings = replace(config.load({"name_key": sys.argv[2]}), coordinator=sys.argv[3])
    with mx.serve(weights, model="w", settings=settings, copy=False) as source:
        weights["w2"][100] = 1.0  # outside `changing`
        try:
            with mx.pull("w", peer=source.endpoint, attach=False, settings=settings) as pull:
                pull.wait(60)
        except MxError:
            pass

def late_loop():
    runtime.run(held_up)

async def held_up():
    time.sleep(2.5)

def open_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
    opened.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(330))

opened = []
with mx.metrics.exporting(config.load({"metrics": sys.argv[1]})):
    print("ready", flush=True)
    for line in sys.stdin:
        globals()[line.strip()]()
        print("done", flush=True)
"""


def documented() -> list[str]:
    """Return the expressions of the table."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("## What to alert on")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [found for cell in cells for found in re.findall(r"`([^`]+)`", cell)]


class Prometheus:
    """One with an alert for each of the expressions, which it looks at once a second."""

    def __init__(self, folder: Path, expressions: list[str], targets: list[str]) -> None:
        rules = [{"alert": f"a{n}", "expr": each} for n, each in enumerate(expressions)]
        groups = [{"name": "mx", "interval": "1s", "rules": rules}]
        (folder / "rules.json").write_text(json.dumps({"groups": groups}))
        scrape = {"job_name": "mx", "static_configs": [{"targets": targets}]}
        every = {"scrape_interval": "3s", "scrape_timeout": "3s"}
        files = {"rule_files": [str(folder / "rules.json")], "scrape_configs": [scrape]}
        (folder / "prometheus.json").write_text(json.dumps({"global": every} | files))
        self._expressions = expressions
        self._fired: set[str] = set()
        self._at = f"127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder / 'prometheus.json'}",
                f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={self._at}",
                "--log.level=error",
            ],
        )  # fmt: skip
        until(lambda: self._ask("targets"), "prometheus", 60)

    def _ask(self, what: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://{self._at}/api/v1/{what}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def scraped(self) -> bool:
        """Return True once each target has answered."""
        targets = (self._ask("targets") or {"activeTargets": []})["activeTargets"]
        return bool(targets) and all(each["health"] == "up" for each in targets)

    def fired(self) -> set[str]:
        """Return the alerts that have fired so far."""
        for each in (self._ask("alerts") or {"alerts": []})["alerts"]:
            self._fired.add(self._expressions[int(each["labels"]["alertname"][1:])])
        return self._fired

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def test_each_documented_alert_fires_from_its_first_event(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    write_checkpoint(weights, {f"model.layers.{i}.w": (256, 1024) for i in range(2)})
    address, embedded, *metrics = (f"127.0.0.1:{free_port()}" for _ in range(4))
    expressions = documented()
    with ExitStack() as open_, redis_server() as redis, commands() as run:
        daemon = run(
            "--listen", address, "--state", redis.url, "--metrics", metrics[0], daemon=True
        )
        daemon.until(lambda: "listens" in daemon.err, "listening")

        def serve(model: str) -> Command:
            return run("serve", str(weights), "--model", model, "--coordinator", address, "--json")

        lost, stays = serve("lost"), serve("stays")
        for source in (lost, stays):
            source.json()
        arguments = (metrics[1], str(tmp_path / "name.key"), embedded)
        troubled = Child("-c", TROUBLED, *arguments, env=environment())
        open_.callback(troubled.close)
        assert troubled.hear() == "ready"
        prometheus = Prometheus(tmp_path, expressions, metrics)
        open_.callback(prometheus.close)
        until(prometheus.scraped, "scrapes", 60)
        assert prometheus.fired() == set()

        def expect(*parts: str) -> None:
            wanted = {each for each in expressions if any(part in each for part in parts)}
            assert len(wanted) == len(parts)
            until(lambda: wanted <= prometheus.fired(), f"alert of {wanted}", 60)

        lost.signal(signal.SIGKILL)
        expect("lease expired")
        troubled.ask("wrong_bytes")
        expect("digest_failures", "pulls_ended")
        assert redis.ask("CONFIG", "SET", "maxmemory", "1") == "+OK"
        serve("refused")
        expect("CapacityError")
        assert redis.ask("CONFIG", "SET", "maxmemory", "0") == "+OK"
        redis.ask("FLUSHALL")
        expect("doubt", "epoch_changes")
        late = next(each for each in expressions if "event_loop_wait" in each)
        while late not in prometheus.fired():  # when a scrape comes meanwhile
            troubled.ask("late_loop")
        troubled.ask("open_files")
        expect("process_open_fds")
        troubled.close(terminate=True)
        expect("up{")
        assert prometheus.fired() == set(expressions)
