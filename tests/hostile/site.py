"""What the attacks begin with, and how their outcome is judged: by hashes of the safetensors files
that have nothing to do with those of mx."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_checkpoint
from mx.errors import EXIT_OK, EXIT_OTHER, MxError
from tests.support.checkpoints import manifest_of
from tests.support.commands import Command

#: No attack may hold a pull up for longer, on however slow a machine.
END_S = 100.0
SIDE_FILE = "config.json"
CONFIG = b'{"model_type": "llama", "hidden_size": 1024}\n'
#: 17 MB in 8 layers, the middle ones of three blocks each.
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (300, 1024),
    **{f"model.layers.{number}.mlp.up_proj.weight": (1280, 1024) for number in range(6)},
    **{f"model.layers.{number}.input_layernorm.weight": (1024,) for number in range(6)},
    "model.norm.weight": (1024,),
}


def hashes(file: Path) -> dict[str, str]:
    """Return the sha256 of each tensor of a safetensors file."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(
            data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]
        ).hexdigest()
        for name, entry in header.items()
    }


@dataclass(frozen=True)
class Weights:
    """A checkpoint's folder, and what it holds: `hashes` by tensor; `identity` and `pin` in
    hexadecimal digits, the latter with files."""

    folder: Path
    hashes: dict[str, str]
    identity: str
    pin: str

    @classmethod
    def write(cls, folder: Path, *, seed: int = 0, side_file: bytes = CONFIG) -> Weights:
        folder.mkdir(parents=True)
        file = folder / "model.safetensors"
        write_checkpoint(file, SHAPES, seed=seed)
        (folder / SIDE_FILE).write_bytes(side_file)
        ref = manifest_of(folder)[0].ref
        return cls(folder, hashes(file), ref.identity.hex(), ref.pin.hex())

    def are_in(self, folder: Path) -> bool:
        return hashes(folder / "model.safetensors") == self.hashes


class Module(Command):
    """A module of these tests in a process of its own, with one argument, a JSON object."""

    def __init__(self, module: str, env: dict[str, str] | None = None, **argument: Any) -> None:
        self._module = f"tests.hostile.{module}"
        super().__init__(json.dumps(argument, default=str), env=env)

    def command(self, entry: str) -> list[str]:
        return [sys.executable, "-m", self._module]


@dataclass
class Site:
    """A coordinator, and an honest source of "m" at `honest`."""

    weights: Weights
    coordinator: str
    honest: str

    @property
    def pinned(self) -> str:
        return f"m@{self.weights.identity}"


class Started:
    """Modules in processes of their own, which end with the test. Liars leave their coordinator."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._started: list[Module] = []

    def module(self, name: str, env: dict[str, str] | None = None, **argument: Any) -> Module:
        self._started.append(Module(name, env, **argument))
        return self._started[-1]

    def liar(self, coordinator: str | None = None, **lies: Any) -> str:
        """Start a source that lies (see `liar`). Returns its endpoint."""
        endpoint = self._liar(coordinator, lies).json()["endpoint"]
        assert isinstance(endpoint, str)
        return endpoint

    def refused(self, error: type[MxError], coordinator: str, **lies: Any) -> None:
        """Start a source that lies, and see that the coordinator refuses it with this error."""
        liar = self._liar(coordinator, lies)
        assert liar.wait() != 0
        assert error.__name__ in liar.err, liar.err

    def _liar(self, coordinator: str | None, lies: dict[str, Any]) -> Module:
        claimed: dict[str, Any] = {
            "checkpoint": self._weights.folder,
            "model": "m",
            "coordinator": coordinator,
        }
        return self.module("liar", **(claimed | lies))

    def end(self) -> None:
        for each in self._started:
            if each.process.poll() is None:
                each.process.terminate()
        for each in self._started:
            each.wait()
            each.end()


def succeeded(pull: Command, weights: Weights, out: Path | None = None) -> dict[str, Any]:
    """The pull delivered these weights, to `out` if that is given. Returns its report."""
    report = pull.json(END_S)
    assert pull.wait(END_S) == EXIT_OK, pull.err + pull.out
    assert report["identity"] == weights.identity
    assert out is None or weights.are_in(out)
    assert report.get("delivered", weights.hashes) == weights.hashes
    return report


def failed(pull: Command, *words: str, code: int | None = None, out: Path | None = None) -> None:
    """The pull ended with a typed error that has these words, and gave no wrong weights away."""
    found = pull.json(END_S)
    assert "error" in found, found
    assert pull.wait(END_S) == found["error"]["exit_code"] > EXIT_OTHER, pull.err + pull.out
    assert code is None or found["error"]["exit_code"] == code, pull.out
    for word in words:
        assert word in found["error"]["message"], found
    assert "Traceback" not in pull.err
    assert out is None or not [*out.glob("*.safetensors"), *out.glob(SIDE_FILE)]


def left(report: dict[str, Any]) -> dict[str, str]:
    """Why sources were left, by endpoint."""
    return {each["source"]: each["reason"] for each in report["left"]}
