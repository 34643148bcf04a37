"""`mx artifacts` as people and scripts see it: from a key to the folder that an engine uses."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

import mx
from mx import config
from tests.support.commands import Command, Run, environment

pytestmark = pytest.mark.integration

#: Leaves files as an engine does.
ENGINE = """
import os
folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
os.makedirs(folder + "/ab")
open(folder + "/ab/x.so", "wb").write(b"object")
"""


class Publisher:
    """A folder with a key, what was recorded, and a trust file."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self.folder = folder
        self.key, self.caches = folder / "publisher.key", folder / "caches"
        self.set, self.trust = folder / "m.caches.safetensors", folder / "trust.toml"
        self.home = environment(HOME=str(folder), XDG_CACHE_HOME="")

    def mx(self, *arguments: str, ends: int = 0) -> Command:
        command = self._run(*arguments, env=self.home)
        assert command.wait(60) == ends, command.err
        return command

    def publish(self, *more: str) -> dict[str, object]:
        self.trust.write_text(
            self.mx("artifacts", "keygen", str(self.key))
            .out.replace("NAME", "farm")
            .replace("MODEL", "m")
        )
        self.trust.chmod(0o600)
        engine = (sys.executable, "-c", ENGINE)
        self.mx("artifacts", "record", str(self.caches), *more, "--", *engine)
        return self.mx(
            *("artifacts", "publish", str(self.caches), "--model", "m", "--json"),
            *("--key", str(self.key), "--out", str(self.set)),
        ).json()


@pytest.fixture
def publisher(run: Run, tmp_path: Path) -> Publisher:
    return Publisher(run, tmp_path)


def test_from_a_key_to_an_engines_folder(
    run: Run, coordinator: str, checkpoint: Path, publisher: Publisher
) -> None:
    published = publisher.publish("--field", "configuration=small")
    assert publisher.key.stat().st_mode & 0o777 == 0o600
    set_id, fields = published["set"], ("--field", "configuration=small")
    inspected = publisher.mx("artifacts", "inspect", str(publisher.set), "--files").out
    assert f"compile-cache {set_id} for m, made 20" in inspected
    assert "configuration: small" in inspected and "inductor/ab/x.so" in inspected
    trusted, at = ("--trust", str(publisher.trust)), ("--coordinator", coordinator)
    check = ("artifacts", "check", str(publisher.set), *trusted)
    assert "would be used: it is by farm" in publisher.mx(*check, *fields).err
    refused = publisher.mx(*check, ends=1).err
    assert "configuration is absent here, small there" in refused
    assert "'other'" not in publisher.mx(*check, "--model", "m", *fields).err
    assert "is for the model 'm'" in publisher.mx(*check, "--model", "other", ends=5).err

    source = run(
        *("serve", str(checkpoint), "--model", "m", "--artifacts", str(publisher.set), *at),
        "--json",
    )
    served = source.json()
    assert served["model"] == "m"
    assert served["artifacts"][0]["model"] == f"m/artifacts/{set_id}"
    (listed,) = publisher.mx("artifacts", "list", "m", *at, "--json").json()["sets"]
    assert (listed["set"], listed["sources"]) == (set_id, 1)
    assert str(set_id) in publisher.mx("artifacts", "list", *at).out
    assert "no sets for other" in publisher.mx("artifacts", "list", "other", *at).err
    models = publisher.mx("models", *at).out
    assert "and 1 set of artefacts" in models and str(set_id) not in models

    pull = ("artifacts", "pull", "m", *trusted, *at)
    shell = publisher.mx(*pull, *fields).out
    folder = publisher.folder / ".cache" / "mx" / "artifacts" / str(set_id)
    assert shlex.split(shell)[:2] == ["export", f"TORCHINDUCTOR_CACHE_DIR={folder}/inductor"]
    assert (folder / "inductor/ab/x.so").read_bytes() == b"object"
    refused = publisher.mx(*pull, ends=3).err
    assert "configuration is absent here, small there" in refused
    assert "an engine compiles as always" in refused
    said = publisher.mx(*pull, "--json", ends=3).json()
    assert said["folder"] is None and said["variables"] == {}

    there = publisher.folder / "there"
    both = ("pull", "m", "--artifacts", str(there), *trusted, *at)
    assert "no compile caches for this machine" in publisher.mx(*both).out
    told = publisher.mx(*both, "--json").json()
    assert told["layers"] and told["artifacts"]["folder"] is None
    assert len(told["artifacts"]["reasons"]) == 1

    settings = config.load({"coordinator": coordinator}, environ={"HOME": "/nonexistent"})
    before = dict(os.environ)
    with mx.artifacts.use(
        "m",
        trust=publisher.trust,
        root=there,
        fields={"configuration": "small"},
        settings=settings,
    ) as used:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{there}/{set_id}/inductor"
        (there / str(set_id) / "inductor/ab/new.so").write_bytes(b"new")
        usage = used.report()
        assert usage is not None and usage.state == "unused" and len(usage.new_objects) == 1
    assert dict(os.environ) == before


def test_nothing_runs_or_is_kept_without_trust(
    run: Run, coordinator: str, checkpoint: Path, publisher: Publisher
) -> None:
    publisher.publish()
    at = ("--coordinator", coordinator)
    run("serve", "--artifacts", str(publisher.set), *at, "--json").json()
    pull = ("artifacts", "pull", "m", *at)
    assert "no trust file says whose may run here" in publisher.mx(*pull, ends=2).err
    assert "name one with --trust" in publisher.mx(*pull, ends=2).err
    publisher.trust.write_text(publisher.trust.read_text().replace('"m"', '"n*"'))
    refused = publisher.mx(*pull, "--trust", str(publisher.trust), ends=3).err
    assert "signed by farm" in refused and "'m'" in refused
    publisher.trust.chmod(0o666)
    assert "other users may write" in publisher.mx(
        *pull, "--trust", str(publisher.trust), ends=2
    ).err  # fmt: skip
    root = publisher.folder / ".cache" / "mx" / "artifacts"
    assert all(name.startswith(".lock-") for name in os.listdir(root))


def test_a_publisher_signs_only_what_was_recorded(publisher: Publisher) -> None:
    publisher.publish()
    (publisher.caches / "inductor" / "ab" / "evil.so").write_bytes(b"evil")
    again = (
        *("artifacts", "publish", str(publisher.caches), "--model", "m"),
        *("--key", str(publisher.key), "--out", str(publisher.folder / "again.safetensors")),
    )
    assert "added: inductor/ab/evil.so" in publisher.mx(*again, ends=4).err
    (publisher.caches / "inductor" / "ab" / "evil.so").unlink()
    publisher.key.chmod(0o644)
    assert "other users may use the key file" in publisher.mx(*again, ends=2).err
    publisher.key.chmod(0o600)
    wrong = [each if each != "m" else "m@" + 64 * "0" for each in again]
    assert "is more than that" in publisher.mx(*wrong, ends=2).err
    publisher.mx(*again)
    assert "already" in publisher.mx(*again, ends=2).err


def test_a_command_that_fails_is_not_recorded(publisher: Publisher) -> None:
    record = ("artifacts", "record", str(publisher.caches), "--", sys.executable, "-c")
    publisher.mx(*record, "raise SystemExit(7)", ends=7)
    assert not publisher.caches.exists()
    publisher.mx(*record, ENGINE)
    assert "exists" in publisher.mx(*record, ENGINE, ends=2).err
    assert json.loads((publisher.caches / "record.json").read_text())["format"] == 1


def test_several_sets_do_not_share_a_port(run: Run, coordinator: str, publisher: Publisher) -> None:
    publisher.publish()
    sets = ("--artifacts", str(publisher.set), "--artifacts", str(publisher.set))
    fixed = run("serve", *sets, "--listen", "127.0.0.1:7999", "--coordinator", coordinator)
    assert fixed.wait() == 2 and "a port of its own" in fixed.err


@pytest.mark.parametrize(
    "more",
    [("--cache",), ("--model", "x"), ("--update",), ("--device", "cpu"), ("--variant", "x")],
)
def test_no_flag_beside_sets_is_ignored(run: Run, tmp_path: Path, more: tuple[str, ...]) -> None:
    refused = run("serve", "--artifacts", str(tmp_path / "x.safetensors"), *more)
    assert refused.wait() == 2 and ("leave out --" in refused.err), refused.err


def test_what_is_not_there_is_said(run: Run, tmp_path: Path, publisher: Publisher) -> None:
    for verb in (("artifacts", "inspect"), ("serve", "--artifacts")):
        assert "there is no file" in publisher.mx(*verb, str(tmp_path / "none"), ends=2).err
    publisher.trust.touch(0o600)
    none = publisher.mx("artifacts", "pull", "", "--trust", str(publisher.trust), ends=2)
    assert "no model is named" in none.err


def test_only_sets_are_listed(run: Run, coordinator: str, publisher: Publisher) -> None:
    publisher.publish()
    at = ("--coordinator", coordinator)
    run("serve", "--artifacts", str(publisher.set), *at, "--json").json()
    assert "and 1 set of artefacts" in publisher.mx("models", *at).out
    listed = publisher.mx("models", *at, "--json").json()
    assert listed["models"] == listed["bundles"] == []
