"""Records what a command compiles: its caches, and the environment that they are bound to."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import re
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from mx import config
from mx.artifacts.caches import CacheFile, check_files, scan, variables
from mx.artifacts.document import is_field
from mx.artifacts.environment import CPU_FIELDS
from mx.core.json_bounds import check_json
from mx.errors import ArtifactError, ConfigError, LocalError, OutputError
from mx.private import check_private
from mx.text import listed, shown
from mx.units import MIB

log = logging.getLogger(__name__)

RECORD = "record.json"
_FORMAT = 1
#: Begins the names of files in which engines note fields.
_NOTED = "field."
_MAX_RECORD_BYTES = 16 * MIB
_PROBE_S = 120
_PROBE = """
import json, sys
from mx.artifacts import environment
engine, fields = json.loads(sys.argv[1])
print("\\n" + json.dumps(environment.here(engine, fields)))
"""
_PYTHON = re.compile(r"python[0-9.]*")
#: How pip writes the first lines of a script whose interpreter has a long path.
_EXEC = re.compile(rb"#!/bin/sh\n'''exec' \"?([^\"\n]+?)\"? ")
#: Inductor names a weight so once it counts as a constant, and computes with its values.
_FROZEN = re.compile(rb"_frozen_param[0-9]")
#: What AOTInductor packs together with weights.
_PACKED = re.compile(r".*(\.wrapper\.so|\.pt2|weights\.blob)")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class FolderContent:
    """The content of a folder: the environment, by field, and each file with its blake3, by
    path."""

    environment: Mapping[str, str]
    files: Sequence[tuple[CacheFile, bytes]]


def record(
    folder: Path,
    command: Sequence[str],
    fields: Mapping[str, str] | None = None,
    *,
    python: str = "",
) -> int:
    """Run a command that compiles, and record what it leaves in the caches.

    SIGTERM, SIGINT and SIGHUP are passed on to it if this is the main thread.

    Args:
        folder: The folder to make, for this user alone. It must not exist.
        command: The command and its arguments.
        fields: Further fields of the environment. `engine` names the package of the engine; it is
            "vllm" without being named if vLLM's cache was used.
        python: The interpreter that the command runs in; mx has to be installed there. By default
            it is found in the command.

    Returns:
        The command's exit code, as a shell has it. Unless it is 0, the folder is removed.

    Raises:
        ConfigError: The folder exists, or others could write to it; there is no such command; its
            interpreter can't be seen, or lacks mx; or weights would be folded into the code.
        ArtifactError: What it left can't travel: it has weights, links, or nothing at all. The
            folder is removed.
        OutputError: The folder can't be written.
    """
    fields = dict(fields or {})
    if config.inherited("TORCHINDUCTOR_FREEZING").get("TORCHINDUCTOR_FREEZING") == "1":
        raise ConfigError(
            "TORCHINDUCTOR_FREEZING is set: code would have this model's weights in it",
            hint="unset it: a cache is for every fine-tune of a model",
        )
    interpreter = python or _interpreter(command)
    folder = folder.absolute()
    check_private(folder.parent)
    for name, text in _probe(interpreter, "", fields).items():  # before hours of compiling
        if not is_field(name, text):
            raise ConfigError(
                f"the environment can't have the field {shown(name)}: {shown(text)}",
                hint="names are a-z, 0-9, _ and ., 32 at most; values have 512 characters at most",
            )
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(
            f"{folder} exists", hint="name a folder that does not: only what is recorded travels"
        ) from None
    except OSError as error:
        raise OutputError(f"{folder} could not be made: {error.strerror}") from error
    kept = False
    try:
        code = _run(command, {**variables(folder), config.RECORDING_VARIABLE: str(folder)})
        if code == 0:
            _write(folder, interpreter, {**_noted(folder), **fields})
            kept = True
        return code
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def note(fields: Mapping[str, str]) -> None:
    """Add fields that only the engine knows to the environment, if its caches are being recorded.

    Args:
        fields: Text by name of field; of several processes that note a field the last counts.
    """
    folder = config.recording()
    if folder is None:
        return
    try:
        for name, text in fields.items():
            temporary = folder / f".{name}.{os.getpid()}"
            temporary.write_text(text, encoding="utf-8")
            temporary.rename(folder / f"{_NOTED}{name}")
    except OSError as error:
        log.warning("what is recorded in %s lacks %s: %s", folder, listed(sorted(fields)), error)


def _noted(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.glob(f"{_NOTED}*"):
        found[path.name.removeprefix(_NOTED)] = path.read_text(encoding="utf-8")
        path.unlink()
    return found


def recorded(folder: Path) -> FolderContent:
    """Return the recording in a folder.

    Raises:
        ArtifactError: There is no record, or the folder is not as it was recorded: a file was
            added, changed or removed since. It is named.
        ConfigError: Others may write to the folder.
        LocalError: It can't be read.
    """
    folder = folder.absolute()
    check_private(folder)
    environment, files = _read(folder)
    named = {file.path: file for file, _ in files}
    there = {file.path: file for file in scan(folder)}
    for paths, what in ((there.keys() - named.keys(), "added"),
                        (named.keys() - there.keys(), "removed")):  # fmt: skip
        if paths:
            raise _changed(folder, f"{what}: {listed(sorted(paths), 3)}")
    for file, digest in files:
        if there[file.path] != file or _digest(folder, file) != digest:
            raise _changed(folder, f"changed: {file.path}")
    return FolderContent(environment, files)


def _changed(folder: Path, how: str) -> ArtifactError:
    return ArtifactError(
        f"{folder} is not as it was recorded; {how}",
        hint="record it again: only what a recorded command left is published",
    )


def _interpreter(command: Sequence[str]) -> str:
    """Return the Python that a command runs in. Raises ConfigError."""
    path = shutil.which(command[0]) if command else None
    if path is None:
        raise ConfigError(f"there is no command {shown(command[0] if command else '')}")
    found = _python_of(path)
    if found is None:
        raise ConfigError(
            f"it can't be seen which Python {shown(command[0])} runs in, and so what the caches "
            "are for",
            hint="give the interpreter as the command's first word, or name it as `python`",
        )
    return found


def _python_of(path: str) -> str | None:
    if _PYTHON.fullmatch(os.path.basename(path)):
        return path
    try:
        with open(path, "rb") as opened:
            start = opened.read(1024)
    except OSError:
        return None
    wrapped = _EXEC.match(start)
    if wrapped:
        words = [wrapped[1].decode(errors="replace")]
    elif start.startswith(b"#!"):
        words = start[2:].partition(b"\n")[0].decode(errors="replace").split()
    else:
        return None
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    found = shutil.which(words[0]) if words else None
    return found if found and _PYTHON.fullmatch(os.path.basename(found)) else None


def _probe(python: str, engine: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in another interpreter. Raises ConfigError."""
    try:
        ran = subprocess.run(
            [python, "-c", _PROBE, json.dumps([engine, dict(fields)])],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S, check=True,
        )  # fmt: skip
        found = json.loads(ran.stdout.rstrip().rpartition(b"\n")[2])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or b""
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(
            f"{python} could not tell its environment: {shown(last or str(error))}",
            hint="install mx where the engine is installed, and use that Python",
        ) from error
    return {str(name): str(text) for name, text in found.items()}


def _run(command: Sequence[str], values: Mapping[str, str]) -> int:
    """Run a command to its end; return its exit code as a shell has it."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        if process is None:
            early.append(number)
        # What is typed at a terminal reaches the command without us.
        elif number != signal.SIGINT or not _at_terminal():
            process.send_signal(number)

    with _handled(pass_on):
        try:
            with config.environment(values):
                process = subprocess.Popen(list(command))
        except OSError as error:
            raise ConfigError(f"{shown(command[0])} does not start: {error.strerror}") from error
        for number in early:
            pass_on(number, None)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _handled(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored, as after nohup, the command ignores too.
    before = {n: signal.getsignal(n) for n in _SIGNALS}
    for number, previous in before.items():
        if previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _at_terminal() -> bool:
    """Return True if this process is in the foreground of its terminal."""
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)


def _write(folder: Path, python: str, fields: Mapping[str, str]) -> None:
    files = scan(folder)
    if not files:
        raise ArtifactError(
            "the command left nothing in the caches of torch.compile, Triton and vLLM",
            hint="let it compile as a replica does, without settings that turn caches off",
        )
    of_vllm = any(file.path.startswith("vllm/") for file in files)
    engine = fields.get("engine", "vllm" if of_vllm else "")
    environment = _probe(python, engine, fields)
    # C++ is compiled for this very CPU; where there is none, another CPU will do.
    on_cpu = not environment.get("gpu") or any(file.path.endswith(".cpp") for file in files)
    unneeded = set() if on_cpu else set(CPU_FIELDS)
    if of_vllm:  # the paths of modules are in its keys
        unneeded.discard("torch_path")
    else:
        unneeded.add("engine_path")
    for name in unneeded - fields.keys():
        environment.pop(name, None)
    text = json.dumps({
        "format": _FORMAT,
        "environment": environment,
        "files": [
            [file.path, file.nbytes, file.executable, _digest(folder, file).hex()]
            for file in files
        ],
    })  # fmt: skip
    try:
        fd = os.open(folder / RECORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as opened:
            opened.write(text)
    except OSError as error:
        raise OutputError(f"{folder / RECORD} could not be written: {error.strerror}") from error


def _read(folder: Path) -> tuple[dict[str, str], list[tuple[CacheFile, bytes]]]:
    path = folder / RECORD
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as opened:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ArtifactError(f"{path} is not a file")
            data = opened.read(_MAX_RECORD_BYTES + 1)
    except FileNotFoundError:
        raise ArtifactError(
            f"{folder} has no {RECORD}", hint="record a command's caches in a new folder first"
        ) from None
    except OSError as error:
        raise LocalError(f"{path} could not be read: {error.strerror}") from error
    try:
        if len(data) > _MAX_RECORD_BYTES:
            raise ValueError("it is too large")
        check_json(data)
        read = json.loads(data)
        if read["format"] != _FORMAT:
            raise ValueError(f"its format is {shown(str(read['format']))}, and not {_FORMAT}")
        environment = {_text(name): _text(text) for name, text in read["environment"].items()}
        files = [
            (CacheFile(_text(path), int(nbytes), executable is True), bytes.fromhex(digest))
            for path, nbytes, executable, digest in read["files"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{path} is not a record: {error}") from error
    check_files([file for file, _ in files])
    return environment, files


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is not text")
    return value


def _digest(folder: Path, file: CacheFile) -> bytes:
    """Return a file's blake3. Raises ArtifactError if weights are in it: without unpickling."""
    path = folder / file.path
    hasher = blake3()
    folded = _PACKED.fullmatch(file.path) is not None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb"):
            if os.fstat(fd).st_size:
                with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
                    hasher.update(data)
                    folded = folded or _FROZEN.search(data) is not None
    except (OSError, ValueError) as error:
        raise LocalError(f"{path} could not be read: {error}") from error
    if folded:
        raise ArtifactError(
            f"{shown(file.path)} has constants of the model's weights, so that fine-tunes would "
            "compute with those of another",
            hint="record without Inductor's `freezing` and without AOTInductor's packages",
        )
    return hasher.digest()
