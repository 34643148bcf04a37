"""Whose sets are taken: signatures, and the trust file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mx.artifacts import trust
from mx.artifacts.document import encode
from mx.artifacts.trust import Trust, make_key, public_key, read_key, read_signed, shown_key, sign
from mx.errors import ArtifactError, ConfigError, SignerError
from mx.wire.v1 import artifacts_pb2 as pb
from tests.support import artifact_sets

NOW_S = 1_800_000_000.0
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
DOCUMENT = artifact_sets.document({"inductor/x": b"x"}, model="llama-8b")
SIGNED = sign(DOCUMENT, KEY)


def test_a_signed_document_is_read_as_it_was_signed() -> None:
    assert read_signed(SIGNED.data) == SIGNED
    assert SIGNED.signer == shown_key(public_key(KEY))


def test_no_bit_of_it_can_be_changed() -> None:
    for at in range(len(SIGNED.data)):
        for bit in (1, 128):
            changed = bytearray(SIGNED.data)
            changed[at] ^= bit
            with pytest.raises(ArtifactError):
                read_signed(bytes(changed))
    for cut in range(len(SIGNED.data)):
        with pytest.raises(ArtifactError):
            read_signed(SIGNED.data[:cut])
    with pytest.raises(ArtifactError):
        read_signed(SIGNED.data + b"\xf8\x07\x01")


def test_a_signature_of_something_else_does_not_count() -> None:
    data = encode(DOCUMENT)
    for signature in (KEY.sign(data), KEY.sign(b""), OTHER.sign(trust._STATEMENT + data)):
        forged = pb.SignedArtifact(
            document=data, public_key=public_key(KEY), signature=signature
        ).SerializeToString(deterministic=True)
        with pytest.raises(ArtifactError, match="signature is wrong"):
            read_signed(forged)


def _trust(tmp_path: Path, **more: object) -> Trust:
    return Trust.load(artifact_sets.write_trust(tmp_path / "trust.toml", KEY, **more))  # type: ignore[arg-type]


def test_a_trusted_signer(tmp_path: Path) -> None:
    trusted = _trust(tmp_path, models=["qwen", "llama-*"], expires="2030-01-01")
    assert trusted.check(SIGNED, "llama-8b", NOW_S) == "farm"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"models": ["qwen"]}, "`models`"),
        ({"models": ["LLAMA-*"]}, "`models`"),
        ({"expires": "2026-01-01"}, "has expired"),
        ({"expires": "2027-01-15T08:00:00Z"}, "has expired"),  # this very second
        ({"revoked": [SIGNED.set_id]}, "is revoked"),
        ({"revoked": [SIGNED.signer]}, "was signed by a key that is revoked"),
    ],
)
def test_a_signer_who_may_not(tmp_path: Path, more: dict[str, object], says: str) -> None:
    with pytest.raises(SignerError, match=says) as caught:
        _trust(tmp_path, **more).check(SIGNED, "llama-8b", NOW_S)
    assert "\n" not in caught.value.message and caught.value.exit_code == 5


def test_a_set_counts_for_its_own_model_only(tmp_path: Path) -> None:
    trusted = _trust(tmp_path)
    with pytest.raises(SignerError, match="is for the model 'llama-8b', not 'qwen'"):
        trusted.check(SIGNED, "qwen", NOW_S)
    renamed = sign(replace(DOCUMENT, model="qwen"), OTHER)
    with pytest.raises(SignerError, match="which the trust file does not name"):
        trusted.check(renamed, "qwen", NOW_S)


SIGNER = f"[[signer]]\nname='a'\nkey='{SIGNED.signer}'\nmodels=['*']\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("signer = 1", "written as"),
        ("signer = [1]", "written as"),
        ("[signer]\nname='a'", "written as"),
        ("revoke = []", "no setting 'revoke'"),
        ("revoked = 'abc'", "`revoked` is a list"),
        ("revoked = ['abc']", "neither a set's id nor a key"),
        (SIGNER + "model=['x']", "a signer has no 'model'"),
        (SIGNER.replace("name='a'", ""), "needs a `name`"),
        (SIGNER.replace("'*'", ""), "needs `models`"),
        (SIGNER.replace("['*']", "'*'"), "needs `models`"),
        (SIGNER.replace("ed25519:", ""), "`key` of a signer"),
        (SIGNER.replace("ed25519:", "rsa:"), "`key` of a signer"),
        (SIGNER + SIGNER, "is there twice"),
        (SIGNER + "expires='2027-01-01'", "is a date"),
        (SIGNER + "expires=2027", "is a date"),
        ("[", "trust.toml"),
        ("revoked = [" + 5000 * "1" + "]", "trust.toml"),
        ("a=" + 100_000 * "[", "trust.toml"),
        ("\xff", "trust.toml"),
        ("#" + (1 << 20) * "x", "bytes"),
    ],
)
def test_a_wrong_trust_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trust.toml"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="trust.toml") as caught:
        Trust.load(path)
    assert says in caught.value.message


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_trust_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = artifact_sets.write_trust(tmp_path / "trust.toml", KEY)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="other users may write"):
        Trust.load(path)
    path.chmod(0o644)
    Trust.load(path)


def test_a_trust_file_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    path = artifact_sets.write_trust(tmp_path / "trust.toml", KEY)
    os.chown(path, 1000, 1000)
    with pytest.raises(ConfigError, match="other users may write"):
        Trust.load(path)


def test_a_trust_file_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    artifact_sets.write_trust(tmp_path / "theirs", KEY)
    shared = tmp_path / "shared"
    shared.mkdir()
    path = shared / "trust.toml"
    path.symlink_to(tmp_path / "theirs")
    (tmp_path / "link").symlink_to(path)
    for mode, refused in ((0o777, True), (0o775, True), (0o1777, False), (0o755, False)):
        shared.chmod(mode)
        for each in (path, tmp_path / "link"):
            if refused:
                with pytest.raises(ConfigError, match="may write to .*shared"):
                    Trust.load(each)
            else:
                Trust.load(each)


def test_documents_of_others_are_not_read(tmp_path: Path) -> None:
    data = b"no document at all"
    statement = trust._STATEMENT + data
    trusted = _trust(tmp_path)
    for key, says in ((KEY, "is malformed"), (OTHER, "does not name")):
        signed = trust._encoded(data, public_key(key), key.sign(statement))
        with pytest.raises((ArtifactError, SignerError), match=says):
            read_signed(signed, trusted)


def test_no_trust_file_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        Trust.load(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo")  # its writer is not waited for
    with pytest.raises(ConfigError, match="is not a file"):
        Trust.load(tmp_path / "fifo")


def test_a_publishers_key_is_of_one_user_alone(tmp_path: Path) -> None:
    public = make_key(tmp_path / "key")
    assert public == shown_key(public_key(read_key(tmp_path / "key")))
    assert os.stat(tmp_path / "key").st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="already"):
        make_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ConfigError, match="other users may use"):
        read_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="can't be read"):
        read_key(tmp_path / "none")
