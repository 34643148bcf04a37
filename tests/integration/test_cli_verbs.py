"""The verbs as people and scripts see them: what they print, and how they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mx.errors import EXIT_CONFIG, EXIT_INTEGRITY, EXIT_NO_SOURCE
from tests.support.commands import Command, Run, free_port, serve, start_coordinator

pytestmark = pytest.mark.integration

PULL_KEYS = {
    "model",
    "schema",
    "identity",
    "pin",
    "bytes",
    "seconds",
    "gb_per_s",
    "first_layer_s",
    "layers",
    "verified",
    "paths",
    "retries",
    "left",
    "fallback",
}


def finished(run: Run, *arguments: str) -> Command:
    command = run(*arguments)
    command.wait(60)
    return command


def test_what_is_served_is_listed_and_pulled(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    at = ("--coordinator", coordinator)
    source = serve(run, checkpoint, "small", coordinator)
    served = json.loads(source.out)
    assert served["coordinator"] == coordinator
    assert served["embedded"] is False

    listed = finished(run, "models", *at, "--json").json()["models"]
    assert [entry["model"] for entry in listed] == ["small"]
    assert listed[0]["identity"] == served["identity"]
    assert listed[0]["pin"] == served["pin"] != served["identity"]
    assert listed[0]["pin_covers_files"] and not listed[0]["pin_only"]
    assert listed[0]["layers"] == served["layers"]
    assert (listed[0]["sources"], listed[0]["state"]) == (1, "served")
    assert listed[0]["bytes"] == served["bytes"]  # without the padding between layers
    (entry,) = finished(run, "sources", "small", *at, "--json").json()["sources"]
    assert entry["endpoint"] == served["endpoint"]
    assert entry["pid"] == source.process.pid
    assert entry["layers_held"] == served["layers"]
    assert set(entry["transports"]) >= {"shm", "tcp"}
    for verb in ("sources", "models"):
        other = finished(run, verb, "other", *at, "--json")
        assert (other.json()[verb], other.process.returncode) == ([], EXIT_NO_SOURCE)
        unknown = finished(run, verb, "other", *at)
        assert unknown.process.returncode == EXIT_NO_SOURCE
        assert "other\n  mx models lists" in unknown.err

    tables = finished(run, "models", *at).out + finished(run, "sources", *at).out
    assert "small" in tables
    assert served["endpoint"] in tables
    # On a line of its own, to copy.
    pinned = f"small@{served['pin']}"
    assert f"\n{pinned}  (weights and files)\n" in tables
    source.until(lambda: f"pin {pinned} " in source.err, "the pin")
    by_pin = finished(run, "pull", pinned, *at)
    assert f"\n  pin {pinned} (weights and files)\n" in by_pin.out

    trace = tmp_path / "trace.jsonl"
    pull = finished(run, "pull", "small", *at, "--transport", "tcp", "--json",
                    "--trace", str(trace))  # fmt: skip
    assert pull.process.returncode == 0
    report = pull.json()
    assert set(report) >= PULL_KEYS
    assert report["bytes"] == served["bytes"]
    assert (report["pin"], report["pin_covers_files"]) == (served["pin"], True)
    assert {path["transport"] for path in report["paths"]} == {"tcp"}
    assert trace.exists()


def test_a_mistyped_name_gets_the_nearest_that_is_listed(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    serve(run, checkpoint, "small", coordinator)
    for words in (("sources", "smal"), ("top", "smal", "--once")):
        unknown = finished(run, *words, "--coordinator", coordinator)
        assert unknown.process.returncode == EXIT_NO_SOURCE
        assert "sources of smal\n  the nearest name that is listed is small" in unknown.err


def test_a_name_without_a_source_is_listed_as_such(run: Run, checkpoint: Path) -> None:
    coordinator, _ = start_coordinator(run, "--lease-s", "1")
    at, source = ("--coordinator", coordinator), serve(run, checkpoint, "small", coordinator)
    source.signal(signal.SIGKILL)
    source.wait()
    entry: Any = {"state": "served"}
    while entry["state"] == "served":  # until its lease ends
        (entry,) = finished(run, "models", *at, "--json").json()["models"]
    assert (entry["sources"], entry["state"]) == (0, "no source")
    shown = finished(run, "models", *at).out
    assert "none" in shown and "1 row without a source:" in shown


def test_the_summary_for_people_says_what_was_kept(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    at = ("--coordinator", coordinator)
    source = serve(run, checkpoint, "small", coordinator)
    plain = finished(run, "pull", "small", *at)
    assert "nothing was kept" in plain.out
    assert f"on the word of your own process {source.process.pid}\n" in plain.out
    assert "attached, no copy" in plain.out
    assert "B/s" not in plain.out
    out = tmp_path / "out"
    written = finished(run, "pull", "small", *at, "--no-attach", "--out", str(out))
    assert f"written to {out}" in written.out
    assert re.search(r"[GM]B/s\)", written.out)
    assert list(out.glob("*.safetensors"))


def test_quiet_prints_errors_alone(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    at = ("-q", "--coordinator", coordinator)
    serve(run, checkpoint, "small", coordinator, "-q")
    out = tmp_path / "out"
    pull = finished(run, "pull", "small", *at, "--no-attach", "--out", str(out))
    assert (pull.process.returncode, pull.out) == (0, "")
    assert "layer" not in pull.err and "written" not in pull.err
    assert list(out.glob("*.safetensors"))
    assert finished(run, "pull", "small", *at, "--json").json()["model"] == "small"
    unknown = finished(run, "pull", "other", *at)
    assert unknown.process.returncode == EXIT_NO_SOURCE
    assert unknown.err.startswith("error: ")


def _keeps_records(folder: Path) -> bool:
    try:
        os.setxattr(folder, "user.test", b"")
    except OSError:
        return False
    return True


def test_a_folder_is_verified_against_a_pin_or_its_record(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    shutil.copy(checkpoint, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    served = serve(run, folder, "small", coordinator).json()
    out, pinned = tmp_path / "out", f"small@{served['pin']}"
    finished(run, "pull", "small", "--coordinator", coordinator, "--out", str(out))

    def verified(code: int, *arguments: str) -> dict[str, object]:
        command = finished(run, "verify", str(out), *arguments, "--json")
        assert command.process.returncode == code, command.err
        return dict(command.json())

    for pin in (pinned, served["identity"]):
        found = verified(0, pin)
        assert (found["pin"], found["recorded"]) == (served["pin"], False)
        assert found["files_verified"] == (pin == pinned)
    if _keeps_records(tmp_path):
        assert verified(0)["recorded"]
        assert "its weights and files are" in finished(run, "verify", str(out)).out
    verified(EXIT_INTEGRITY, "0" * 64)
    verified(EXIT_CONFIG, "small@")

    (out / "config.json").write_text("{}")
    verified(0, served["identity"])  # which covers no files
    verified(EXIT_INTEGRITY, pinned)
    with open(next(out.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    said: Any = verified(EXIT_INTEGRITY, served["identity"])["error"]
    assert "not" in said["message"]
    if _keeps_records(tmp_path):
        differ = said["differing_tensors"]
        assert differ["count"] == 1 == len(differ["first"])
        shown = finished(run, "verify", str(out)).err
        assert f"differ in 1 tensor: {differ['first'][0]}" in " ".join(shown.split())
    os.rename(out, tmp_path / "moved")
    verified(EXIT_CONFIG, pinned)
    out.mkdir()
    verified(EXIT_CONFIG)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_and_hold_end_when_they_are_asked(
    run: Run, coordinator: str, checkpoint: Path, number: int
) -> None:
    at = ("--coordinator", coordinator)
    source = serve(run, checkpoint, "small", coordinator)
    relay = run("pull", "small", *at, "--hold", "--json")
    relay.until(lambda: "stop with Ctrl-C" in relay.err, "a relay")
    roles = {s["role"] for s in finished(run, "sources", *at, "--json").json()["sources"]}
    assert roles == {"origin", "relay"}
    for command in (relay, source):
        command.signal(number)
        assert command.wait() == 0
        what = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        assert f"stopping: {what} was received" in command.err
        assert "Traceback" not in command.err
        assert "error" not in command.err
    assert finished(run, "sources", *at, "--json").json()["sources"] == []


def test_demo_with_a_checkpoint_of_ones_own(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    command = run("demo", "--checkpoint", str(checkpoint), "--json",
                  env={**os.environ, "TMPDIR": str(tmp_path)})  # fmt: skip
    result = command.json(100)
    assert command.wait() == 0
    assert [row["path"].split()[0] for row in result["pulls"]] == ["attach,", "copy", "tcp"]
    assert [row["same"] for row in result["pulls"]] == [True] * 3
    assert {path["transport"] for path in result["pulls"][2]["pull"]["paths"]} == {"tcp"}
    assert all(row["memcpy_fresh_gb_per_s"] > 0 for row in result["pulls"])
    assert "byte for byte" in command.err
    assert re.search(r"^page .* open http://127\.0\.0\.1:\d+/ in a browser$", command.err, re.M)
    assert list(tmp_path.glob("mx-demo-*")) == []


@pytest.mark.timeout(300)
def test_a_demo_that_holds_lets_its_user_pull(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    command = run("demo", "--checkpoint", str(checkpoint), "--hold",
                  env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"})  # fmt: skip
    command.until(lambda: "Ctrl-C ends the demo." in command.out, "its turn", 200)
    typed = re.search(r"^  mx (pull .*)$", command.out, re.M)
    assert typed is not None
    page = re.search(r"and see it on (http://\S+/)$", command.out, re.M)
    assert page is not None
    pull = run(*typed[1].split())
    with urllib.request.urlopen(f"{page[1]}events", timeout=60) as stream:
        while b'["pull",' not in (line := stream.readline()):
            assert line, "the page's stream ended"
    pull.end()
    command.signal(signal.SIGINT)
    assert command.wait(50) == 0
    assert "Every pulled model is the same" in command.out
    assert list(tmp_path.glob("mx-demo-*")) == []


def test_characters_that_the_output_cannot_have_are_escaped() -> None:
    command = (sys.executable, "-m", "mx", "doctor", "--only", "coordinators")
    where = ("--coordinator", f"127.0.0.1:{free_port()}")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        [*command, *where], env=environment, capture_output=True, text=True, check=False
    )
    assert "\\u2192" in ended.stdout, ended.stderr
    assert ended.stderr == ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_an_interrupted_demo_leaves_nothing(
    run: Run, large_checkpoint: Path, tmp_path: Path, number: int
) -> None:
    command = run("demo", "--checkpoint", str(large_checkpoint),
                  env={**os.environ, "TMPDIR": str(tmp_path)})  # fmt: skip
    command.until(lambda: "target" in command.out, "the first pull", 100)
    command.signal(number)
    assert command.wait(50) == 128 + number
    assert "Traceback" not in command.err
    assert list(tmp_path.glob("mx-demo-*")) == []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        assert str(large_checkpoint).encode() not in said


def test_a_failing_demo_says_why(run: Run, tmp_path: Path) -> None:
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"\x40\0\0\0\0\0\0\0{")
    command = finished(run, "demo", "--checkpoint", str(torn), "--json")
    error = command.json()["error"]
    assert "torn" in error["message"]
    assert error["type"] == "CheckpointError"
    assert command.process.returncode == error["exit_code"] == 4
    assert "Traceback" not in command.err


def test_the_shell_completes_names_of_models(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    def completed(verb: str, where: str, incomplete: str) -> list[str]:
        words = ("mx", verb, "--coordinator", where, incomplete)
        env = {
            **os.environ,
            "_MX_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
            "MX_PEER_CONNECT_TIMEOUT_S": "60",  # a busy machine does not answer at once
        }
        command = run(env=env)
        assert (command.wait(60), command.err) == (0, "")
        return command.out.split()

    for name in ("small-one", "small-two", "small$(id)"):
        serve(run, checkpoint, name, coordinator)
    # A shell may evaluate what it gets.
    assert completed("pull", coordinator, "small") == ["small-one", "small-two"]
    assert completed("pull", f"127.0.0.1:{free_port()}", "small") == []
    assert completed("pull", "nonsense", "small") == []
