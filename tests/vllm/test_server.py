"""vLLM's API server says in its log and in its `/metrics` what its engine loaded, and from whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import mx
from tests.support.commands import free_port
from tests.support.daemon import ROOT
from tests.vllm.checkpoints import bare

#: `vllm serve` asks for the metadata of a package that vLLM for CPUs does not have.
_SERVER = ("-m", "vllm.entrypoints.openai.api_server")


def _replica(metrics: str) -> tuple[dict[str, str], float]:
    """Return the labels of `mx_replica_info`, and how long its rank took."""
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.startswith("mx_replica_")
    }
    assert samples["mx_replica_info"].value == 1
    return samples["mx_replica_info"].labels, samples["mx_replica_load_seconds"].value


@pytest.mark.timeout(600)
def test_what_was_loaded_is_in_the_metrics_of_the_server(
    checkpoint: Path, coordinator: str, place: Path
) -> None:
    port, log = free_port(), place / "server.log"
    extra = json.dumps({"model": "m", "coordinator": coordinator})
    command = [sys.executable, *_SERVER, "--model", str(bare(checkpoint)), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--load-format", "mx-peer", "--enforce-eager"]
    command += ["--model-loader-extra-config", extra, "--skip-tokenizer-init"]
    command += ["--max-model-len", "64"]
    environment = {**os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        mx.serve(checkpoint, model="m", coordinator=coordinator) as source,
        log.open("w") as said,
        subprocess.Popen(
            command, cwd=ROOT, env=environment | {"TMPDIR": folder}, stdout=said, stderr=said
        ) as server,
    ):
        try:
            metrics = ""
            while "mx_replica_info{" not in metrics:
                assert server.poll() is None, log.read_text()[-3000:]
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                        metrics = answer.read().decode()
                except urllib.error.URLError:
                    time.sleep(0.5)
            labels, seconds = _replica(metrics)
            assert labels["model"] == "m" and labels["state"] == "checkpoint"
            assert labels["identity"] == source.identity_hex
            assert source.endpoint in labels["source"]
            assert seconds > 0
            assert "vllm:" in metrics  # beside its own
            assert f" pin={source.pinned.rpartition('@')[2]} " in log.read_text()
            assert list(Path(folder).glob("mx-engine-*"))
        finally:
            server.terminate()
            server.wait()
        assert not list(Path(folder).glob("mx-engine-*"))
