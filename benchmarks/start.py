"""Measures a replica of vLLM from the start of its process to its first token, in parts.

    .venv-vllm/bin/python -m benchmarks.start [--rounds 3] [--gb 1] [--json] [--svg FILE]

Engines run in the environment of `make setup-vllm`, one after another, each in a process of its
own. The floor is a start that reads no weights: vLLM's default loader with the weights in the page
cache, less the time in which it reads them; or `--load-format dummy`, where that is faster (on a
CPU vLLM fills its weights at random, which takes longer). mx's share of a start is what it takes
more than the floor, the interpreter and the imports of torch and vLLM left out: they come before
mx, and vary by more than it takes. Its bar is 0.3 s and the time that the bytes need on the link:
to be copied in memory, or to be received over the faster of one and two bare sockets, and hashed
with blake3. An engine that generates other tokens than the others is an error.

With caches the floor has compiled before, and its own caches are there; mx's has none but those
from a peer.

The group "slow" needs root: the engine is on another host, at 500 Mbit/s, where vLLM processes
layers while others arrive. What is left of that after the last one may take a fifth of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mx import artifacts
from mx.artifacts.trust import make_key
from mx.errors import LocalError

from . import harness
from .harness import Row
from .hosts import Hosts, unavailable
from .local import filled_memfd
from .processes import Child, Cluster
from .references import memcpy
from .references.sockets import RawSockets
from .svg import BOUND, MX, OTHER, Bar, bars

BAR_S = 0.3
MBIT_PER_S, PROCESSED_BAR = 500.0, 0.2
NEAR, FAR = "near", "far"
TOKENS = 8
NAME = "start"
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
    "seed": 0,
}
#: The parts of a start, as shown. "rest" is what vLLM does between them.
PARTS = (
    "interpreter", "imports", "configuration", "device", "weights", "processing", "kv", "compile",
    "rest", "first token",
)  # fmt: skip
#: The span of an engine from its last layer to the end of processing.
LEFT = "after the last byte"
#: Ways that are the floor if they are faster, less what they read: eager, and compiled.
FLOORS = {False: ("dummy weights", "default, page cache"), True: ("default, own caches",)}
ENGINE = ("-m", "benchmarks.start_engine")


def make(folder: Path, nbytes: int) -> int:
    """Write a Llama with random weights and of about as many bytes, and one without weights beside
    it. Return its bytes."""
    import torch
    from safetensors.torch import save_file

    wide, inner, vocabulary = (
        MODEL[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    keys = MODEL["num_key_value_heads"] * wide // MODEL["num_attention_heads"]
    of_layer = {
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (keys, wide),
        "self_attn.v_proj": (keys, wide),
        "self_attn.o_proj": (wide, wide),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
    }
    shapes = {
        "model.embed_tokens": (vocabulary, wide),
        "model.norm": (wide,),
        "lm_head": (vocabulary, wide),
    }
    layers = 0
    while layers < 1 or _nbytes(shapes) < nbytes:
        shapes |= {f"model.layers.{layers}.{name}": each for name, each in of_layer.items()}
        layers += 1
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in shapes.items():
        made = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        tensors[f"{name}.weight"] = made + 1 if len(shape) == 1 else made
    for each in (folder, bare(folder)):
        each.mkdir()
        (each / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return _nbytes(shapes)


def _nbytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())


def bare(folder: Path) -> Path:
    """Return the folder beside a model's that has its configuration only."""
    return folder.with_name(f"{folder.name}-bare")


@dataclass
class Way:
    """A way to start: with which options, in which environment, after what."""

    options: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None
    folder: Path | None = None
    watch: bool = False
    made: list[dict[str, Any]] = field(default_factory=list)

    def total_s(self) -> float:
        """Return the median of its starts."""
        return statistics.median(sum(parts(each).values()) for each in self.made)

    def own_s(self) -> float:
        """Return the median of its starts after the imports."""
        return statistics.median(after_imports(each) for each in self.made)

    def floor_s(self) -> float:
        """Return the same, less what its own loader reads."""
        reads = [each["spans"].get("reading", 0.0) for each in self.made]
        rest_s: list[float] = [
            after_imports(each) - read_s for each, read_s in zip(self.made, reads, strict=True)
        ]
        return statistics.median(rest_s)


def parts(made: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each part of a start, which add up to it."""
    spans = dict(made["spans"])
    found = {name: spans.get(name, 0.0) for name in PARTS}
    found["weights"] = spans["model"] - found["processing"]
    within = sum(found[name] for name in PARTS[2:8])
    found["rest"] = spans["engine"] - within
    return found


def after_imports(made: Mapping[str, Any]) -> float:
    """Return the seconds of a start in which an engine and mx are at work."""
    taken = parts(made)
    return sum(taken[name] for name in PARTS[2:])


class Starts:
    """Starts engines of one model, with commands that begin with `prefix`."""

    def __init__(
        self, place: Path, cluster: Cluster, folder: Path, prefix: Sequence[str] = ()
    ) -> None:
        self._place, self._cluster, self._folder = place, cluster, folder
        self._prefix = prefix
        self._log = (place / "engines.log").open("wb")
        self.tokens: list[int] = []

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def env(self) -> dict[str, str]:
        """Return the environment of each engine."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_CPU_CI_ENV": "0",
            "VLLM_USE_AOT_COMPILE": "0",
            # What vLLM has found out of the model's class is there, as on a host that has run it.
            "VLLM_CACHE_ROOT": str(self._place / "vllm"),
            "MX_PEER_COORDINATOR": self._cluster.coordinator,
        }

    def begin(self, way: Way, *, stay: bool = False, prefix: Sequence[str] | None = None) -> Child:
        """Start an engine; it prints a line of JSON."""
        way.before()
        asked = {
            "model": str(way.folder or self._folder),
            "options": OPTIONS | way.options,
            "tokens": TOKENS,
            "stay": stay,
            "watch": way.watch,
        }
        env = self.env() | way.env | {"MX_BENCH_EXEC_S": str(time.monotonic())}
        prefix = self._prefix if prefix is None else prefix
        return Child(*ENGINE, json.dumps(asked), env=env, stderr=self._log, prefix=prefix)

    def run(self, way: Way, *, equal: bool = True) -> None:
        """Start an engine, note its parts, and wait for its end.

        Raises:
            LocalError: It generates other tokens than the first one did.
        """
        child = self.begin(way)
        try:
            made = json.loads(child.hear())
        except LocalError:
            text = Path(self._log.name).read_text(errors="replace")
            raise LocalError(f"an engine has failed: {text[-3000:]}") from None
        finally:
            child.close()
        if equal:
            self.tokens = self.tokens or made["tokens"]
            if made["tokens"] != self.tokens:
                raise LocalError(f"{way.options}: {made['tokens']} in place of {self.tokens}")
        way.made.append(made)


def _drop(folder: Path) -> None:
    """Have the page cache forget a folder's weights."""
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _read(folder: Path) -> None:
    """Have a folder's weights in the page cache."""
    for file in folder.glob("*.safetensors"):
        file.read_bytes()


def _peer(model: str = NAME, **extra: Any) -> dict[str, Any]:
    given = {"model": model, "lend": False, **extra}
    return {"load_format": "mx-peer", "model_loader_extra_config": given}


def eager(folder: Path) -> dict[str, Way]:
    """Return the ways to start that compile nothing."""
    plain = {"enforce_eager": True}
    cached: dict[str, Any] = {"before": lambda: _read(folder)}
    empty = bare(folder)
    return {
        "dummy weights": Way(plain | {"load_format": "dummy"}),
        "default, cold": Way(plain | {"load_format": "auto"}, before=lambda: _drop(folder)),
        "default, page cache": Way(plain | {"load_format": "auto"}, **cached),
        "mx, no peer, page cache": Way(plain | _peer("not-served", wait_s=0), **cached),
        "mx, replica, attach": Way(plain | _peer(), folder=empty),
        "mx, replica, tcp": Way(plain | _peer(transport="tcp"), folder=empty),
        "mx, checkpoint, attach": Way(plain | _peer(state="checkpoint"), folder=empty),
        "mx, checkpoint, tcp": Way(
            plain | _peer(state="checkpoint", transport="tcp"), folder=empty
        ),
    }


def compiled(place: Path, folder: Path, trust: Path) -> dict[str, Way]:
    """Return the ways to start that compile, or have what was compiled."""
    plain = {"enforce_eager": False}
    cold = place / "cold"

    def caches(where: Path) -> dict[str, str]:
        return {"TORCHINDUCTOR_CACHE_DIR": str(where), "XDG_CACHE_HOME": str(where / "xdg")}

    def forget() -> None:
        shutil.rmtree(cold, ignore_errors=True)

    def anew() -> None:
        forget()
        _read(folder)

    return {
        "default, own caches": Way(
            plain | {"load_format": "auto"}, caches(place / "warm"), lambda: _read(folder)
        ),
        "default, nothing compiled": Way(plain | {"load_format": "auto"}, caches(cold), anew),
        "mx, replica, caches": Way(
            plain | _peer(artifacts=True, trust=str(trust)), caches(cold), forget, bare(folder)
        ),
    }


@contextlib.contextmanager
def shipped(place: Path, starts: Starts, cluster: Cluster) -> Iterator[Path]:
    """Record, publish and serve the caches of an engine; yield the trust file that names them."""
    way = Way({"enforce_eager": False} | _peer(), folder=None)
    asked = {"model": str(place / "model-bare"), "options": OPTIONS | way.options, "tokens": TOKENS}
    env = {**os.environ, **starts.env(), "MX_BENCH_EXEC_S": "0"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    caches, package = place / "caches", place / "caches.safetensors"
    command = [sys.executable, *ENGINE, json.dumps(asked)]
    recording = [sys.executable, "-m", "mx", "artifacts", "record", str(caches), "--", *command]
    subprocess.run(recording, env=env, check=True, stdout=subprocess.DEVNULL)
    public = make_key(place / "publisher.key")
    artifacts.publish(caches, model=NAME, key=place / "publisher.key", out=package)
    trust = place / "trust.toml"
    trust.write_text(f'[[signer]]\nname = "us"\nkey = "{public}"\nmodels = ["*"]\n')
    trust.chmod(0o600)
    with artifacts.serve(package, coordinator=cluster.coordinator):
        yield trust


def links(nbytes: int, rounds: int) -> dict[str, float]:
    """Return the seconds that so many bytes need on each link, by the end of a way's name."""
    with filled_memfd(nbytes) as fd, closing(RawSockets(fd, nbytes)) as sockets:
        ways: dict[str, Callable[[], float]] = {
            "attach": lambda: memcpy.fresh(fd, nbytes, populate=True),
            "tcp": lambda: min(sockets.receive(1), sockets.receive(2)),
        }
        samples = harness.interleave(ways, rounds, fresh_nbytes=nbytes)
    found = {name: harness.median(samples, name) for name in ways}
    return found | {"caches": found["attach"]}  # beside which the caches are small


def rows(ways: Mapping[str, Way], links: Mapping[str, float], nbytes: int) -> list[Row]:
    """Return a row for each way: its total, or mx's share with its bar."""
    floors = {
        late: min((each.floor_s() for name, each in ways.items() if name in names), default=0.0)
        for late, names in FLOORS.items()
    }
    found = []
    for name, way in ways.items():
        taken = {part: statistics.median(parts(m)[part] for m in way.made) for part in PARTS}
        detail = ", ".join(f"{part} {seconds:.2f}" for part, seconds in taken.items())
        totals = [sum(parts(each).values()) for each in way.made]
        found.append(harness.shown(name, way.total_s(), "s", detail, {name: totals}))
        link = name.rpartition(" ")[2]
        if name.startswith("mx") and link in links:
            floor_s = floors[link == "caches"]
            allowed_s = BAR_S + links[link]
            detail = f"{way.own_s():.2f} s after imports, floor {floor_s:.2f} s"
            detail += f", the link alone {links[link]:.2f} s for {nbytes / 1e9:.2f} GB"
            share_s = way.own_s() - floor_s
            found.append(
                harness.at_most(f"  its share: {name}", share_s, "s", allowed_s, detail, digits=2)
            )
    return found


def slow(place: Path, folder: Path, rounds: int) -> list[Row]:
    """Return the row of what vLLM processes after the last byte of a model that arrives slowly."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts())
        link = hosts.link(NEAR, FAR, mbit_per_s=MBIT_PER_S)
        near = hosts.prefix(NEAR)
        cluster = stack.enter_context(closing(Cluster(link.address(NEAR), near)))
        starts = Starts(place, cluster, folder, hosts.prefix(FAR))
        stack.callback(starts.close)
        cluster.serve(folder, NAME)
        insecure = {"MX_PEER_INSECURE": "1"}
        listen = insecure | {"MX_PEER_LISTEN": f"{link.address(NEAR)}:0"}
        plain = {"enforce_eager": True}
        replica = starts.begin(
            Way(plain | _peer(lend=True), listen, folder=bare(folder)), stay=True, prefix=near
        )
        stack.callback(replica.close)
        starts.tokens = json.loads(replica.hear())["tokens"]
        ways = {
            "alone": Way(plain | {"load_format": "auto"}, before=lambda: _read(folder)),
            "while it arrives": Way(plain | _peer(), insecure, folder=bare(folder), watch=True),
        }
        for _ in range(rounds + 1):
            for way in ways.values():
                starts.run(way)
        samples = {
            name: [each["spans"][span] for each in ways[name].made[1:]]
            for name, span in {"alone": "processing", "while it arrives": LEFT}.items()
        }
    left_s, alone_s = (harness.median(samples, name) for name in ("while it arrives", "alone"))
    detail = f"{left_s * 1e3:.0f} ms after the last byte; alone processing takes {alone_s:.2f} s"
    what = f"  processing left over {MBIT_PER_S:g} Mbit/s"
    return [harness.at_most(what, left_s / alone_s, "x", PROCESSED_BAR, detail, samples, digits=2)]


def picture(ways: Mapping[str, Way], nbytes: int) -> str:
    """Return a picture of the totals."""
    colors = {"dummy": BOUND, "mx": MX}

    def group(names: list[str]) -> list[Bar]:
        return [
            Bar(name, ways[name].total_s(), colors.get(name.split(",")[0].split()[0], OTHER))
            for name in names
        ]

    compiling = [name for name in ways if "caches" in name or "compiled" in name]
    split = [[n for n in ways if (n in compiling) is late] for late in (False, True)]
    title = f"vLLM from the start of its process to its first token, {nbytes / 1e9:.1f} GB"
    named = [("eager", group(split[0])), ("compiled", group(split[1]))]
    return bars(title, [each for each in named if each[1]])


def main() -> None:
    """Run the benchmark."""
    options = harness.parser(__doc__, rounds=3)
    options.add_argument("--gb", type=float, default=1.0, help="the model's size")
    options.add_argument(
        "--only", default="eager,compiled,slow", help="which groups of ways to start"
    )
    options.add_argument("--svg", metavar="FILE", help="write a picture of the totals")
    asked = options.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        os.environ["XDG_STATE_HOME"] = str(place / "state")
        folder = place / "model"
        nbytes = make(folder, int(asked.gb * 1e9))
        harness.say(f"a Llama of {nbytes / 1e9:.2f} GB; each engine takes 5 to 60 s")
        links_s = links(nbytes, asked.rounds)
        cluster = stack.enter_context(closing(Cluster()))
        starts = stack.enter_context(closing(Starts(place, cluster, folder)))
        cluster.serve(folder, NAME)
        first = Way(_peer(lend=True) | {"enforce_eager": True}, folder=bare(folder))
        replica = starts.begin(first, stay=True)
        stack.callback(replica.close)
        starts.tokens = json.loads(replica.hear())["tokens"]
        groups = asked.only.split(",")
        ways = eager(folder) if "eager" in groups else {}
        if "compiled" in groups:
            trust = stack.enter_context(shipped(place, starts, cluster))
            ways |= compiled(place, folder, trust)
        for number in range(asked.rounds + 1):
            for name, way in ways.items():
                # What was compiled may round otherwise, and dummy weights are others.
                starts.run(way, equal="dummy" not in name and "compiled" not in name)
                took_s = sum(parts(way.made[-1]).values())
                harness.say(f"round {number}: {name}: {took_s:.2f} s")
        for way in ways.values():
            del way.made[0]  # the first start of each loads caches
        found = rows(ways, links_s, nbytes)
        if "slow" in groups and (why := unavailable()) is not None:
            harness.say(f"not measured over a slow link: {why}")
        elif "slow" in groups:
            found += slow(place, folder, asked.rounds)
        harness.show(found, as_json=asked.json)
        if asked.svg:
            Path(asked.svg).write_text(picture(ways, nbytes))


if __name__ == "__main__":
    main()
