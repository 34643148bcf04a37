"""Which set a target takes of those that are listed: the newest that is right in every respect."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

import mx
from mx import config
from mx.artifacts import carry, choosing, environment, package
from mx.artifacts.trust import SignedDocument, public_key, shown_key
from mx.artifacts.using import Obtained, obtain, staging
from mx.core.artifact_names import listed_name
from mx.errors import ConfigError
from tests.support import artifact_sets

pytestmark = pytest.mark.integration

FARM, LAPTOP, STRANGER, LAPSED, REVOKED = (
    Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(1, 6)
)
HERE = environment.here(names=["python", "platform"])
CONTENTS = {"inductor/a/x.py": b"code", "triton/y.so": b"more code"}


@pytest.fixture
def asked(settings: config.Settings, coordinator: str) -> config.Settings:
    return config.given(settings, coordinator=coordinator)


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    """A trust file with two good signers, one that has expired, and one that is revoked."""
    path = tmp_path / "trust.toml"
    names = [("farm", FARM), ("laptop", LAPTOP), ("lapsed", LAPSED), ("revoked", REVOKED)]
    text = f"revoked = ['{shown_key(public_key(REVOKED))}']\n"
    for name, key in names:
        text += f"[[signer]]\nname = '{name}'\nkey = '{shown_key(public_key(key))}'\n"
        text += "models = ['m*']\n" + ("expires = 2020-01-01\n" if name == "lapsed" else "")
    path.write_text(text)
    path.chmod(0o600)
    return path


@dataclass
class Offer:
    """A set that is offered, and what is wrong with it, "" if nothing is."""

    wrong: str
    says: str
    signed: SignedDocument


#: What can be wrong with a set that is listed for the model, and what is said then.
WRONGS = {
    "stranger": "which the trust file does not name",
    "lapsed": "has expired",
    "revoked": "is revoked",
    "model": "is not that set",
    "environment": "python is",
    "absent field": "gpu_of_theirs is absent here",
    "document": "is not that set",
    "bytes": "is not what its document says",
    "more": "is not that set",
}


def _offer(
    wrong: str, created_s: int, folder: Path, settings: config.Settings, stack: ExitStack
) -> Offer:
    """Serve a set that is wrong in one respect, or in none, as a process of its own would."""
    key = {"stranger": STRANGER, "lapsed": LAPSED, "revoked": REVOKED}.get(wrong, FARM)
    there = dict(HERE)
    if wrong == "environment":
        there["python"] = "CPython 2.7"
    if wrong == "absent field":
        there["gpu_of_theirs"] = "NVIDIA H100"
    contents = {**CONTENTS, "inductor/made": str(created_s).encode()}
    path = folder / f"{created_s}.safetensors"
    signed = artifact_sets.write(
        path,
        contents,
        key,
        environment=there,
        created_s=created_s,
        model="other" if wrong == "model" else "m",
    )
    name = listed_name("m", signed.set_id)
    if wrong == "document":
        name = listed_name("m", f"{created_s:032x}")
    if wrong in ("bytes", "more"):
        path = folder / f"{created_s}.{wrong}.safetensors"
        nbytes = signed.document.nbytes + (wrong == "more")
        tensors = {
            package.DOCUMENT: np.frombuffer(signed.data, np.uint8),
            "set.1.blobs": np.zeros(nbytes, np.uint8),
        }
        save_file(tensors, path)
    if not wrong:
        stack.enter_context(carry.serve(path, settings=settings))
    else:
        variant = mx.ProcessingKey(kind="compile-cache", signer=public_key(FARM).hex()[:16])
        stack.enter_context(mx.serve(path, model=name, variant=variant, settings=settings))
    return Offer(wrong, WRONGS.get(wrong, ""), signed)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _obtain(tmp_path: Path, trust: Path, settings: config.Settings) -> Obtained:
    found = obtain("m", trust=trust, root=tmp_path / "root", settings=settings)
    laid_out = [n for n in os.listdir(tmp_path / "root") if not n.startswith(".lock-")]
    # What is not used leaves nothing.
    assert laid_out == ([found.set_id] if found.set_id else [])
    assert all("\n" not in reason for reason in found.reasons)
    return found


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_set_with_one_fault_is_not_used(
    wrong: str, tmp_path: Path, trust: Path, asked: config.Settings
) -> None:
    with ExitStack() as stack:
        offer = _offer(wrong, 1_700_000_000, tmp_path, asked, stack)
        found = _obtain(tmp_path, trust, asked)
    assert found.folder is None and not found.variables
    (reason,) = found.reasons
    assert offer.says in reason


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
def test_the_newest_right_set_is_used_whatever_else_is_listed(
    seed: int, tmp_path: Path, trust: Path, asked: config.Settings
) -> None:
    draw = random.Random(seed)
    wrongs = draw.choices([*WRONGS, "", ""], k=draw.randint(2, 6))
    times = draw.sample(range(1_700_000_000, 1_700_000_100), k=len(wrongs))
    with ExitStack() as stack:
        offers = [
            _offer(wrong, made_s, tmp_path, asked, stack)
            for wrong, made_s in zip(wrongs, times, strict=True)
        ]
        found = _obtain(tmp_path, trust, asked)
        right = [offer.signed for offer in offers if not offer.wrong]
        best = max(right, key=lambda each: each.document.created_s, default=None)
        assert found.set_id == ("" if best is None else best.set_id), wrongs
        for offer in offers:  # those that were looked at before a right one was found
            if offer.wrong and (best is None or offer.wrong != "bytes"):
                assert any(offer.says in reason for reason in found.reasons), (wrongs, found)
        if best is not None:
            assert found.folder is not None and found.signer == "farm"
            made = str(best.document.created_s).encode()
            assert _contents(found.folder) == {**CONTENTS, "inductor/made": made}
            # Another time it is there already; a file that was changed is put right.
            (found.folder / "triton/y.so").write_bytes(b"MORE code")
            again = _obtain(tmp_path, trust, asked)
            assert again.folder == found.folder
            assert _contents(found.folder) == {**CONTENTS, "inductor/made": made}


def test_what_an_engine_adds_stays(tmp_path: Path, trust: Path, asked: config.Settings) -> None:
    with ExitStack() as stack:
        _offer("", 1_700_000_000, tmp_path, asked, stack)
        found = _obtain(tmp_path, trust, asked)
        assert found.folder is not None
        (found.folder / "inductor/new.so").write_bytes(b"new")
        again = _obtain(tmp_path, trust, asked)
    assert again.folder == found.folder and (found.folder / "inductor/new.so").exists()


def test_strangers_can_not_crowd_a_set_out(
    tmp_path: Path, trust: Path, asked: config.Settings
) -> None:
    with ExitStack() as stack:
        right = _offer("", 1_700_000_000, tmp_path, asked, stack)
        path = tmp_path / "junk.safetensors"
        artifact_sets.write(path, CONTENTS, STRANGER)
        variant = mx.ProcessingKey(kind="compile-cache", signer=16 * "0")
        for n in range(20):
            name = listed_name("m", f"{n:032x}")
            stack.enter_context(mx.serve(path, model=name, variant=variant, settings=asked))
        assert _obtain(tmp_path, trust, asked).set_id == right.signed.set_id


def test_no_coordinator_and_no_set(
    tmp_path: Path, trust: Path, settings: config.Settings, asked: config.Settings
) -> None:
    nowhere = config.given(settings, coordinator="127.0.0.1:1")
    found = _obtain(tmp_path, trust, nowhere)
    assert found.folder is None and "no coordinator answers" in found.reasons[0]
    found = _obtain(tmp_path, trust, asked)
    assert found.folder is None and "no set of the kind compile-cache is listed" in found.reasons[0]


def test_what_the_caller_got_wrong_is_an_error(
    tmp_path: Path, trust: Path, asked: config.Settings
) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        obtain("m", trust=tmp_path / "none", root=tmp_path / "root", settings=asked)
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    for root in (loose, loose / "below"):
        with pytest.raises(ConfigError, match="other users may write"):
            obtain("m", trust=trust, root=root, settings=asked)
    assert os.listdir(loose) == []


@pytest.mark.parametrize("change", ["other bytes", "other variant", "other file name"])
def test_who_registers_first_does_not_hide_a_set(
    change: str, tmp_path: Path, trust: Path, asked: config.Settings
) -> None:
    with ExitStack() as stack:
        path = tmp_path / "right.safetensors"
        right = artifact_sets.write(path, CONTENTS, FARM, environment=HERE)
        first = tmp_path / "first.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= change == "other bytes"
        first.write_bytes(data)
        signer = "0" if change == "other variant" else right.public_key.hex()
        variant = mx.ProcessingKey(kind="compile-cache", signer=signer[:16])
        name = listed_name("m", right.set_id)
        stranger = config.given(asked, name_key=str(tmp_path / "strangers.key"))
        stack.enter_context(mx.serve(first, model=name, variant=variant, settings=stranger))
        stack.enter_context(carry.serve(path, settings=asked))
        found = _obtain(tmp_path, trust, asked)
        listed = carry.find("m", settings=asked)
    assert found.set_id == right.set_id
    # The same bytes under the same key are one thing, whatever their files are called.
    assert len(listed) == (1 if change == "other file name" else 2)


def test_a_run_that_was_killed_as_a_set_had_arrived_is_no_hindrance(
    tmp_path: Path, trust: Path, asked: config.Settings
) -> None:
    (tmp_path / "root").mkdir(mode=0o700)
    with ExitStack() as stack:
        offer = _offer("", 1_700_000_000, tmp_path, asked, stack)
        with staging(tmp_path / "root", offer.signed.set_id) as arriving:
            arriving.mkdir()
            (arriving / "set.safetensors").write_bytes(b"whole, and then never taken away")
        assert _obtain(tmp_path, trust, asked).set_id == offer.signed.set_id


def test_what_runs_that_came_second_left_is_used_up(tmp_path: Path) -> None:
    def run() -> list[str]:
        with staging(tmp_path, "x") as first, staging(tmp_path, "x") as second:
            assert first != second and not first.exists() and not second.exists()
            for each in (first, second):
                each.mkdir()  # and is killed
            return sorted(os.listdir(tmp_path))

    assert run() == run() == run()


def test_a_folder_that_can_not_be_written_is_a_reason(
    tmp_path: Path, trust: Path, asked: config.Settings
) -> None:
    with ExitStack() as stack:
        offer = _offer("", 1_700_000_000, tmp_path, asked, stack)
        root = tmp_path / "root"
        (root / f".lock-{offer.signed.set_id}-0").mkdir(mode=0o700, parents=True)
        root.chmod(0o700)
        found = obtain("m", trust=trust, root=root, settings=asked)
    assert found.folder is None and "could not be written" in found.reasons[0]


@pytest.mark.parametrize(
    ("module", "bound", "says"),
    [(carry, "_DOCUMENT_S", "did not arrive"), (choosing, "_SEARCH_S", "took too long")],
)
def test_slow_sources_keep_no_engine_waiting(
    module: ModuleType,
    bound: str,
    says: str,
    tmp_path: Path,
    trust: Path,
    asked: config.Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, bound, 0.0)
    with ExitStack() as stack:
        _offer("", 1_700_000_000, tmp_path, asked, stack)
        (reason,) = _obtain(tmp_path, trust, asked).reasons
    assert says in reason


def test_files_beside_a_set_are_not_taken(
    tmp_path: Path, trust: Path, asked: config.Settings
) -> None:
    """Nothing signed bounds them."""
    folder = tmp_path / "served"
    folder.mkdir()
    signed = artifact_sets.write(folder / "m.safetensors", CONTENTS, FARM, environment=HERE)
    (folder / "config.json").write_text('{"a": 1}')
    variant = mx.ProcessingKey(kind="compile-cache", signer=signed.public_key.hex()[:16])
    name = listed_name("m", signed.set_id)
    with mx.serve(folder, model=name, variant=variant, settings=asked):
        (reason,) = _obtain(tmp_path, trust, asked).reasons
    assert "is not that set" in reason
