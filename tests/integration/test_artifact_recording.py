"""What a command leaves in its caches is recorded with its environment, and kept only as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mx.artifacts.recording import RECORD, record, recorded
from mx.errors import ArtifactError, ConfigError

pytestmark = pytest.mark.integration

#: Leaves files as an engine does.
ENGINE = """
import os, sys
folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
for path, data in (("ab/x.so", b"object"), ("ab/x.cpp", b"code"), ("locks/x.lock", b"")):
    os.makedirs(os.path.dirname(f"{folder}/{path}"), exist_ok=True)
    open(f"{folder}/{path}", "wb").write(data)
os.chmod(f"{folder}/ab/x.so", 0o755)
"""
COMMAND = [sys.executable, "-c", ENGINE]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "caches"


def test_a_record_is_read_back(folder: Path) -> None:
    assert record(folder, COMMAND, {"configuration": "c0ffee"}) == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    found = recorded(folder)
    assert [(f.path, f.nbytes, f.executable) for f, _ in found.files] == [
        ("inductor/ab/x.cpp", 4, False), ("inductor/ab/x.so", 6, True),
    ]  # fmt: skip
    assert found.environment["configuration"] == "c0ffee"
    assert found.environment["python"] and found.environment["isa"]


def test_vllm_is_the_engine_of_its_own_cache(folder: Path) -> None:
    code = (
        "import os; f = os.environ['VLLM_CACHE_ROOT'] + '/torch_compile_cache/0/rank_0_0/backbone';"
        "os.makedirs(f); open(f + '/computation_graph.py', 'w').write('x')"
    )
    assert record(folder, [sys.executable, "-c", code]) == 0
    assert recorded(folder).environment["engine"] == "vllm"


def change(folder: Path, how: str) -> str:
    object_, added = folder / "inductor/ab/x.so", folder / "triton/k/added.cubin"
    if how == "added":
        added.parent.mkdir(parents=True)
        added.write_bytes(b"code")
        return "added: triton/k/added.cubin"
    if how == "removed":
        object_.unlink()
        return "removed: inductor/ab/x.so"
    if how == "changed":
        object_.write_bytes(b"poison")
    elif how == "mode":
        object_.chmod(0o600)
    return "changed: inductor/ab/x.so"


@pytest.mark.parametrize("how", ["added", "removed", "changed", "mode"])
def test_what_changed_since_is_refused_by_name(folder: Path, how: str) -> None:
    record(folder, COMMAND)
    named = change(folder, how)
    with pytest.raises(ArtifactError, match=named):
        recorded(folder)


def test_locks_and_bytecode_may_come_and_go(folder: Path) -> None:
    record(folder, COMMAND)
    (folder / "inductor/locks/x.lock").unlink()
    (folder / "inductor/ab/__pycache__").mkdir()
    (folder / "inductor/ab/__pycache__/x.pyc").write_bytes(b"x")
    assert len(recorded(folder).files) == 2


def test_a_folder_that_others_write_to_is_no_record(folder: Path) -> None:
    record(folder, COMMAND)
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="other users"):
        recorded(folder)


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "[" * 100_000, '{"format": 2, "environment": {}, "files": []}',
    '{"format": 1, "environment": {"a": 1}, "files": []}',
    '{"format": 1, "environment": [], "files": []}',
    '{"format": 1, "environment": {}, "files": [["../x", 1, false, "00"]]}',
    '{"format": 1, "environment": {}, "files": [["inductor/x", "y", false, "00"]]}',
    '{"format": 1, "environment": {}, "files": [["inductor/x", 1, false, "zz"]]}',
    '{"format": 1, "environment": {}, "files": [[]]}',
])  # fmt: skip
def test_a_malformed_record_is_refused(folder: Path, text: str) -> None:
    record(folder, COMMAND)
    (folder / RECORD).write_text(text)
    with pytest.raises(ArtifactError):
        recorded(folder)


def test_a_record_that_is_no_file_is_refused(folder: Path, tmp_path: Path) -> None:
    record(folder, COMMAND)
    (folder / RECORD).rename(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=f"has no {RECORD}"):
        recorded(folder)
    os.mkfifo(folder / RECORD)
    with pytest.raises(ArtifactError, match="not a file"):
        recorded(folder)


def test_a_folder_that_exists_is_refused_and_left(folder: Path) -> None:
    folder.mkdir()
    (folder / "poison").touch()
    with pytest.raises(ConfigError, match="exists"):
        record(folder, COMMAND)
    assert os.listdir(folder) == ["poison"]


def test_a_folder_where_others_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="other users"):
        record(tmp_path / "open" / "caches", COMMAND)
    assert os.listdir(tmp_path / "open") == []


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_nothing_is_kept_of_a_command_that_fails(folder: Path, code: str, exit_code: int) -> None:
    assert record(folder, [sys.executable, "-c", f"{ENGINE}\n{code}"]) == exit_code
    assert not folder.exists()


def test_a_command_that_compiles_nothing_is_said(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="left nothing"):
        record(folder, [sys.executable, "-c", "pass"])
    assert not folder.exists()


def test_links_that_a_command_leaves_are_refused(folder: Path) -> None:
    code = f"{ENGINE}\nos.symlink('/etc/passwd', folder + '/ab/link')"
    with pytest.raises(ArtifactError, match="link"):
        record(folder, [sys.executable, "-c", code])
    assert not folder.exists()


def test_an_unknown_interpreter_is_refused_before_the_command_runs(
    folder: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    with pytest.raises(ConfigError, match="which Python"):
        record(folder, ["sh", "-c", f"touch {ran}"])
    script = tmp_path / "python3"  # another Python, in which mx is not
    script.write_text(f"#!/bin/sh\ntouch {ran}.probed\necho 'no module mx' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(ConfigError, match="no module mx"):
        record(folder, [str(script), "-c", "pass"])
    with pytest.raises(ConfigError, match="no command"):
        record(folder, ["no-such-command"])
    assert not ran.exists() and not folder.exists()
    assert record(folder, ["sh", "-c", f"exec {sys.executable} -c '{ENGINE}'"],
                  python=sys.executable) == 0  # fmt: skip


def test_the_environment_is_of_the_commands_interpreter(tmp_path: Path) -> None:
    """Seen in scripts too, as pip writes them."""
    other = tmp_path / "python3.99"
    other.write_text(f'#!/bin/sh\nOMP_NUM_THREADS=77 exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    script = tmp_path / "engine"
    for number, start in enumerate((
        f"#!{other}\n", f"#!/usr/bin/env -S {other} -E\n",
        f"#!/bin/sh\n'''exec' \"{other}\" \"$0\" \"$@\"\n' '''\n",
    )):  # fmt: skip
        script.write_text(start + ENGINE)
        script.chmod(0o755)
        assert record(tmp_path / f"c{number}", [str(script)]) == 0
        assert recorded(tmp_path / f"c{number}").environment["threads"] == "77"


@pytest.mark.parametrize("name", ["x.wrapper.so", "model.pt2", "x_weights.blob"])
def test_a_package_with_weights_is_refused(folder: Path, name: str) -> None:
    code = f"{ENGINE}\nopen(folder + '/ab/{name}', 'wb').write(b'x')"
    with pytest.raises(ArtifactError, match="constants of the model's weights"):
        record(folder, [sys.executable, "-c", code])
    assert not folder.exists()


def test_a_graph_with_frozen_weights_is_refused(folder: Path) -> None:
    pickled = "b'\\x80\\x05\\x8c\\x0e_frozen_param1\\x94.'"
    code = f"{ENGINE}\nopen(folder + '/ab/entry', 'wb').write(bytes(1000) + {pickled})"
    with pytest.raises(ArtifactError, match="constants of the model's weights"):
        record(folder, [sys.executable, "-c", code])


def test_freezing_is_refused_before_it_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    with pytest.raises(ConfigError, match="FREEZING"):
        record(folder, COMMAND)


WAITS = """
import signal, sys, time
def stop(number, frame):
    print(f"got {number}", flush=True)
    sys.exit(number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(folder: Path, number: signal.Signals) -> None:
    code = (
        "import sys; from pathlib import Path; from mx.artifacts.recording import record;"
        f"sys.exit(record(Path(sys.argv[1]), [sys.executable, '-c', {WAITS!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        assert child.stdout.readline() == f"got {number:d}\n"
        assert child.wait(60) == number
    assert not folder.exists()


def test_a_record_is_json_that_any_tool_reads(folder: Path) -> None:
    record(folder, COMMAND)
    assert set(json.loads((folder / RECORD).read_text())) == {"format", "environment", "files"}
    assert time.time() - (folder / RECORD).stat().st_mtime < 60


@pytest.mark.parametrize("fields", [{"A b": "x"}, {"a": 513 * "x"}, {"a": "x\x1b[A"}])
def test_fields_that_no_set_may_have_are_refused_before_it_compiles(
    folder: Path, fields: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="can't have the field"):
        record(folder, COMMAND, fields)
    assert not folder.exists()
