"""What an engine's ranks loaded, and from whom, is in the engine's log and in its `/metrics`.

A process that answers `/metrics` stands for vLLM's, another for its rank; what they do with mx and
with prometheus_client is theirs.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

import mx
from mx.config import ENGINE_VARIABLE
from mx.engines.replica.metrics import EngineCollector
from tests.support.commands import environment
from tests.support.daemon import ROOT, daemon

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

#: A rank: pulls a checkpoint as the loaders do, says so, and stays.
_RANK = """
import logging, sys
from pathlib import Path
import torch
from mx import log
from mx.engines.replica.names import meant_by
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.run import RankRun

class Group:
    rank_in_group, world_size = 0, 1

log.set_up("info", "json")
logging.getLogger("vllm").setLevel("INFO")
options = LoaderOptions.read({"coordinator": sys.argv[1], "lend": False})
run = RankRun("vLLM", meant_by("tiny"), options, {}, Ranks(Group(), Group(), (0, 1)), Path("tiny"))
with run.pull(hold=False) as pull:
    pull.wait()
run.agreed(True)
run.loaded(torch.nn.Module())
run.end()
"""
#: What answers `/metrics`: it is asked once the rank has loaded.
_FRONT = """
import subprocess, sys
import prometheus_client
from mx.engines.replica import metrics

metrics.register()
metrics.register()
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
registry = prometheus_client.REGISTRY
if sys.argv[3:]:
    from prometheus_client import CollectorRegistry, multiprocess
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
print(prometheus_client.generate_latest(registry).decode())
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mx.Source]:
    import torch

    settings = mx.config.load({"name_key": str(tmp_path_factory.mktemp("key") / "name.key")})
    tensors = {"w": torch.arange(4096, dtype=torch.float32)}
    with (
        daemon() as (_, address),
        mx.serve(tensors, model="tiny", coordinator=address, settings=settings) as found,
    ):
        yield found


def ran(source: mx.Source, *arguments: str, **env: str) -> tuple[dict[str, float], list[str]]:
    """Return the samples of `mx_replica_…` as "name{labels}", and the lines of the rank's log."""
    command = [sys.executable, "-c", _FRONT, _RANK, source.coordinator_address, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(TMPDIR=folder, **env), check=False,
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not os.listdir(folder), "the folder of the ranks is left"
    samples = {
        f"{sample.name} {json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
        if sample.name.startswith("mx_replica")
    }
    return samples, done.stderr.splitlines()


def check(samples: dict[str, float], source: mx.Source) -> None:
    rank = "tp=0/1,pp=0/1,dp=0/1"
    seconds = samples.pop(f"mx_replica_load_seconds {json.dumps({'rank': rank})}")
    assert 0 < seconds < 100
    ((name, value),) = samples.items()
    found = json.loads(name.removeprefix("mx_replica_info "))
    assert value == 1
    assert found.pop("source").endswith(f" from {source.endpoint}")
    assert found == {
        "model": "tiny", "revision": "main", "rank": rank, "state": "checkpoint",
        "identity": source.identity_hex,
    }  # fmt: skip


def test_a_rank_is_in_the_engines_metrics_and_log(source: mx.Source) -> None:
    samples, lines = ran(source)
    check(samples, source)
    events = [json.loads(line) for line in lines if line.startswith("{")]
    (loaded,) = [each["fields"] for each in events if each["event"] == "engine.loaded"]
    assert loaded["identity"] == source.identity_hex
    assert source.endpoint in loaded["source"]
    assert loaded["seconds"] > 0


def test_a_rank_is_in_metrics_that_several_processes_share(
    source: mx.Source, tmp_path: Path
) -> None:
    samples, _ = ran(source, "shared", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    check(samples, source)


#: Shows what a rank loaded, for each revision that is named.
_SHOW = """
import sys
from mx.engines.replica import metrics
for revision in sys.argv[2:]:
    labels = dict.fromkeys(metrics.LABELS, "x") | {"rank": sys.argv[1], "revision": revision}
    metrics.show(labels, 1.0)
"""


def test_what_a_rank_has_no_more_is_0_in_metrics_that_several_processes_share(
    tmp_path: Path,
) -> None:
    for arguments in (("0", "r1", "r2"), ("1", "r1"), ("0", "r3", "r3")):  # a rank that came back
        subprocess.run(
            [sys.executable, "-c", _SHOW, *arguments], cwd=ROOT, check=True, timeout=100,
            env=environment(PROMETHEUS_MULTIPROC_DIR=str(tmp_path)),
        )  # fmt: skip
    collector: Any = MultiProcessCollector
    families = collector(None, str(tmp_path)).collect()
    (info,) = (each for each in families if each.name == "mx_replica_info")
    found = {(s.labels["rank"], s.labels["revision"]): s.value for s in info.samples}
    assert found == {("0", "r1"): 0, ("0", "r2"): 0, ("0", "r3"): 1, ("1", "r1"): 1}


def test_a_folder_of_others_or_with_rubbish_shows_nothing(tmp_path: Path) -> None:
    assert not [*EngineCollector(tmp_path / "none").collect()]
    folder = tmp_path / "ranks"
    folder.mkdir(0o700)
    good = ["m", "", "tp=0/1", "ordinary", "", "", 1.5]
    rubbish: list[object] = [{}, 7, "x", [], [*good, 1], good[1:], [*good[:-1], "soon"]]
    for number, each in enumerate(rubbish):
        (folder / f"bad{number}.json").write_text(json.dumps(each))
    (folder / "cut.json").write_text(json.dumps(good)[:20])
    assert not [*EngineCollector(folder).collect()]
    (folder / "good.json").write_text(json.dumps(good))
    info, seconds = EngineCollector(folder).collect()
    assert [sample.labels["model"] for sample in info.samples] == ["m"]
    assert [sample.value for sample in seconds.samples] == [1.5]
    folder.chmod(0o755)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert not [*EngineCollector(folder).collect()]


def test_the_variable_is_no_setting() -> None:
    """`MX_PEER_…` are settings, and an unknown one is an error in each process."""
    assert not ENGINE_VARIABLE.startswith("MX_PEER_")
