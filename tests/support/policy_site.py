"""A coordinator and commands with certificates of one authority, and a policy for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mx.core.types import SourceRecord
from mx.transport import TlsFiles
from mx.wire.client import CoordinatorClient
from tests.support.certificates import Authority
from tests.support.commands import Command, Run, free_port
from tests.support.records import by_digest, make_documents, make_record

HERE = "subjectAltName=IP:127.0.0.1,DNS:localhost"
MEMBERS = {
    "coordinator": f"{HERE},URI:spiffe://mx.test/coordinator",
    "source": f"{HERE},URI:spiffe://mx.test/ns/a/sa/source",
    "engine": f"{HERE},URI:spiffe://mx.test/ns/a/sa/engine",
    "reader": "subjectAltName=URI:spiffe://mx.test/ns/a/sa/reader",
    "second": "subjectAltName=URI:spiffe://mx.test/ns/b/sa/reader",
    "holder": f"{HERE},URI:spiffe://mx.test/ns/c/sa/reader",
    "stranger": f"{HERE},URI:spiffe://mx.test/ns/b/sa/other",
    "several": f"{HERE},URI:spiffe://mx.test/ns/a/sa/source,URI:spiffe://mx.test/x",
}
SERVE = """
[[allow]]
principal = ["spiffe://mx.test/ns/a/sa/source", "spiffe://mx.test/ns/a/sa/engine"]
may = "serve"
models = "llama-*"
"""
PULL = """
[[allow]]
principal = "spiffe://mx.test/ns/*/sa/reader"
may = "pull"
models = "llama-*"
"""
OBSERVE = """
[[allow]]
principal = "spiffe://mx.test/ns/b/sa/other"
may = "observe"
models = "other-*"
"""
MODEL = "llama-8b"


def flags(files: TlsFiles) -> tuple[str, ...]:
    return (
        *("--tls-cert", files.certificate),
        *("--tls-key", files.key),
        *("--tls-ca", files.authority),
    )


class Site:
    """Certificates, a policy, and commands that use them."""

    def __init__(self, folder: Path, run: Run, authority: Authority) -> None:
        self.folder, self.run, self.authority = folder, run, authority
        self.address = f"127.0.0.1:{free_port()}"
        self.policy = folder / "policy.toml"
        self.policy.write_text(SERVE + PULL + OBSERVE)

    def files(self, name: str) -> TlsFiles:
        return self.authority.certificate(name, MEMBERS[name])

    def coordinator(self, *more: str) -> Command:
        shown = flags(self.files("coordinator"))
        found = self.run("--listen", self.address, *shown, *more, daemon=True)
        found.until(lambda: "listens on" in found.err, "a coordinator")
        return found

    def mx(self, name: str, *arguments: str) -> Command:
        shown = flags(self.files(name))
        return self.run(*arguments, "--coordinator", self.address, *shown)

    def serve(self, checkpoint: Path, *more: str, name: str = "source") -> tuple[Command, str]:
        about = ("--model", MODEL, "--json", "--log-format", "text", *more)
        found = self.mx(name, "serve", str(checkpoint), *about)
        return found, str(found.json()["endpoint"])

    def refused(self, name: str, *arguments: str, code: int = 5) -> str:
        """What a command says that ends with this code."""
        command = self.mx(name, *arguments)
        assert command.wait(60) == code, command.err
        assert "Traceback" not in command.err
        return command.err

    def pulls(self, name: str, *arguments: str) -> None:
        command = self.mx(name, "pull", MODEL, *arguments)
        assert command.wait(60) == 0, command.err


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ca")


@pytest.fixture
def site(tmp_path: Path, run: Run, authority: Authority) -> Site:
    return Site(tmp_path, run, authority)


async def listed(site: Site, files: TlsFiles) -> SourceRecord:
    """Return the model's first source, as a caller with these files sees it."""
    client = CoordinatorClient(site.address, tls=files)
    try:
        return (await client.resolve(MODEL)).sources[0]
    finally:
        await client.close()


def registrable() -> tuple[dict[bytes, bytes], SourceRecord, bytes]:
    """Documents, a source of them at 127.0.0.1, and its secret."""
    documents = make_documents("weights")
    record = replace(make_record(documents, name=MODEL), endpoint="127.0.0.1:7601")
    place = replace(record.place, addresses=("127.0.0.1",))
    return by_digest(documents), replace(record, place=place), bytes(range(32))
