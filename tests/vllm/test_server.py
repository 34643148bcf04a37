"""vLLM's API server says in its log and in its `/metrics` what its engine loaded, and from whom,
and two of them give the same answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
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


@contextlib.contextmanager
def _server(
    folder: Path, coordinator: str, log: Path
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Run a server; yield its address, and what `_replica` returns."""
    port, extra = free_port(), json.dumps({"model": "m", "coordinator": coordinator})
    command = [sys.executable, *_SERVER, "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--load-format", "mx-peer", "--enforce-eager"]
    command += ["--model-loader-extra-config", extra, "--skip-tokenizer-init"]
    command += ["--max-model-len", "64", "--served-model-name", "m"]
    # On some processors with AMX vLLM's worker processes end by SIGILL as they compute in bfloat16.
    command += ["--dtype", "float32"]
    environment = {**os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        tempfile.TemporaryDirectory() as temporary,
        log.open("w") as said,
        subprocess.Popen(
            command, cwd=ROOT, env=environment | {"TMPDIR": temporary}, stdout=said, stderr=said
        ) as server,
    ):
        try:
            metrics, address = "", f"http://127.0.0.1:{port}"
            while "mx_replica_info{" not in metrics:
                assert server.poll() is None, log.read_text()[-3000:]
                try:
                    with urllib.request.urlopen(f"{address}/metrics") as answer:
                        metrics = answer.read().decode()
                except urllib.error.URLError:
                    time.sleep(0.5)
            assert "vllm:" in metrics  # beside its own
            assert list(Path(temporary).glob("mx-engine-*"))
            yield address, *_replica(metrics)
        finally:
            server.terminate()
            server.wait()
        assert not list(Path(temporary).glob("mx-engine-*"))


def _completed(address: str) -> list[int]:
    """Return the tokens of a completion."""
    asked = {"model": "m", "prompt": [5, 9, 3, 7], "max_tokens": 32, "temperature": 0}
    asked |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(asked).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return found


@pytest.mark.timeout(900)
def test_two_replicas_over_http(checkpoint: Path, coordinator: str, place: Path) -> None:
    """The second starts from the first, as its metrics say, and answers alike."""
    first_log, second_log = place / "first.log", place / "second.log"
    with contextlib.ExitStack() as stack:
        with mx.serve(checkpoint, model="m", coordinator=coordinator) as source:
            first, labels, seconds = stack.enter_context(
                _server(bare(checkpoint), coordinator, first_log)
            )
            assert labels["model"] == "m" and labels["state"] == "checkpoint"
            assert labels["identity"] == source.identity_hex
            assert source.endpoint in labels["source"]
            assert seconds > 0
            assert f" pin={source.pinned.rpartition('@')[2]} " in first_log.read_text()
        second, labels, _ = stack.enter_context(_server(bare(checkpoint), coordinator, second_log))
        assert labels["state"] == "loaded"
        assert len(_completed(first)) == 32
        assert _completed(first) == _completed(second)
