"""Measures when a model of transformers gives its first token: while it arrives, and after.

    python -m benchmarks.progressive [--rounds 3] [--json] [--svg FILE]

Needs root: source and target are in two network namespaces, joined by a link of 500 Mbit/s. The
model has 24 layers and 325 MB; it computes on one thread, with prompts so long that computing takes
a third of loading, and as long as loading.

The bound is the largest over i of (arrival of layer i + computing from layer i on), with the
arrivals and the computing of the sequential run: no order of work can be faster.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from mx import config

from . import harness
from .hosts import Hosts, Link, unavailable
from .processes import Cluster
from .svg import BOUND, MX, Bar, bars

NEAR, FAR = "near", "far"
MBIT_PER_S = 500.0
#: What computing takes of what loading takes, and the bar: first token / sequential.
SHARES = {"a third": (1 / 3, 0.85), "all": (1.0, 0.6)}
BOUND_BAR = 1.1
LOAD_BAR_S = 0.3
META_BAR_S = 0.2

MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8000,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


def make(folder: Path) -> None:
    """Write the model."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(folder)


# -- the target's process -------------------------------------------------------------------------


class Target:
    """Loads and computes, as it is asked."""

    def __init__(self, coordinator: str) -> None:
        import torch

        from mx.engines.transformers import load, loading

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self._torch, self._loading = torch, loading
        settings = config.load({"insecure": True, "wait_s": 60.0})
        self._load: Callable[[], Any] = lambda: load(
            "m", coordinator=coordinator, transport="tcp", settings=settings
        )

    def _prompt(self, tokens: int) -> Any:
        return self._torch.arange(tokens)[None] % MODEL["vocab_size"]

    def sequential(self, tokens: int) -> dict[str, Any]:
        """Wait for all weights, then compute one token."""
        arrivals: dict[int, float] = {}
        starts: list[float] = []
        began_s = time.perf_counter()
        model = self._load()
        loading = self._loading(model)
        loading.on_layer(lambda e: arrivals.update({e.index: time.perf_counter() - began_s}))
        loading.wait()
        loaded_s = time.perf_counter() - began_s
        stages = [*model.model.layers, model.model.norm]
        hooks = [
            stage.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()))
            for stage in stages
        ]
        first_s = time.perf_counter()
        model(self._prompt(tokens), logits_to_keep=1)
        end_s = time.perf_counter()
        for hook in hooks:
            hook.remove()
        left_s = [end_s - start for start in (first_s, *starts)]
        bound_s = max(arrivals[i] + left for i, left in enumerate(left_s))
        return {
            "seconds": end_s - began_s,
            "loaded_s": loaded_s,
            "computed_s": end_s - first_s,
            "bound_s": bound_s,
        }

    def progressive(self, tokens: int) -> dict[str, Any]:
        """Compute one token at once."""
        began_s = time.perf_counter()
        model = self._load()
        load_s = time.perf_counter() - began_s
        model(self._prompt(tokens), logits_to_keep=1)
        seconds = time.perf_counter() - began_s
        self._loading(model).wait()
        return {"seconds": seconds, "load_s": load_s}

    def load_only(self, _: int) -> dict[str, Any]:
        """Load, and close at once."""
        began_s = time.perf_counter()
        model = self._load()
        load_s = time.perf_counter() - began_s
        self._loading(model).close()
        return {"load_s": load_s}

    def stopped(self, source: int) -> dict[str, Any]:
        """Stop the source after layer 1, see layer 0's output, and let it go on."""
        seen: list[bool] = []
        stopped = threading.Event()

        def arrived(event: Any) -> None:
            if event.index == 2:  # 0 is the embedding
                os.kill(source, signal.SIGSTOP)
                stopped.set()

        def is_stopped() -> bool:
            state = Path(f"/proc/{source}/stat").read_text(encoding="ascii").rpartition(")")[2]
            return state.split()[0] == "T"

        def computes(*_: object) -> None:
            stopped.wait(60)
            until_s = time.monotonic() + 10
            while not is_stopped() and time.monotonic() < until_s:
                time.sleep(0.001)

        def computed(*_: object) -> None:
            seen.append(is_stopped() and self._loading(model).report is None)
            os.kill(source, signal.SIGCONT)

        model = self._load()
        self._loading(model).on_layer(arrived)
        layer = model.model.layers[0]
        before = layer.register_forward_pre_hook(computes)
        after = layer.register_forward_hook(computed)
        model(self._prompt(8))
        before.remove()
        after.remove()
        return {"seen": seen == [True]}

    def meta(self, _: int) -> dict[str, Any]:
        """Build a model of 70 billion parameters, of tensors that are not here."""
        import torch
        import transformers

        from mx.core.layout import TensorSpec, plan_layout
        from mx.core.types import Manifest, ManifestRef, Packaging
        from mx.engines.transformers.arrival import _PendingTensors
        from mx.engines.transformers.described import describe
        from mx.engines.transformers.skeleton import build

        large = transformers.LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        with torch.device("meta"):
            names = transformers.LlamaForCausalLM(large).state_dict()
        layout = plan_layout([TensorSpec(n, "BF16", tuple(t.shape)) for n, t in names.items()])
        ref = ManifestRef(bytes(32), bytes(32), b"", (1, 1, 0))
        roots = tuple(tensor.name.encode() for tensor in layout.tensors)
        manifest = Manifest(ref, layout, Packaging(), roots, {})
        files = {"config.json": json.dumps(large.to_dict()).encode()}
        began_s = time.perf_counter()
        description = describe("large", files)
        model, _values = build(
            "large", description, manifest, strict=True, options={"dtype": "auto"}
        )
        places = _PendingTensors(model)
        assert places.missing == len(names)
        return {"seconds": time.perf_counter() - began_s}


def target(coordinator: str) -> None:
    """Do what standard input says, a line each."""
    answers = Target(coordinator)
    for line in sys.stdin:
        what, argument = line.split()
        print(json.dumps(getattr(answers, what)(int(argument))), flush=True)


# -- the benchmark --------------------------------------------------------------------------------


class Rig:
    """A source on one host, and a target's process on another. Close it."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.link: Link = hosts.link(NEAR, FAR, mbit_per_s=MBIT_PER_S)
        code = f"import sys; from {__package__}.progressive import target; target(*sys.argv[1:])"
        with ExitStack() as stack:
            made = Cluster(self.link.address(NEAR), hosts.prefix(NEAR))
            cluster = stack.enter_context(closing(made))
            self.source, _ = cluster.serve(folder, "m")
            far = hosts.prefix(FAR)
            self._target = cluster.start("-c", code, cluster.coordinator, prefix=far)
            self._processes = stack.pop_all()

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    def ask(self, what: str, argument: int = 0) -> dict[str, Any]:
        """Have the target do something, and return what it measured."""
        found: dict[str, Any] = json.loads(self._target.ask(f"{what} {argument}"))
        return found


def measured(rig: Rig, hosts: Hosts, rounds: int) -> dict[str, Any]:
    """Return all figures: medians of ratios of runs that took turns."""
    found: dict[str, Any] = {}
    rig.ask("meta")  # imports
    found["meta_s"] = [rig.ask("meta")["seconds"] for _ in range(rounds)]
    warm = rig.ask("sequential", 256)
    found["loaded_s"], per_token_s = warm["loaded_s"], warm["computed_s"] / 256
    for name, (share, _) in SHARES.items():
        tokens = max(8, round(share * warm["loaded_s"] / per_token_s))
        for _ in range(4):  # attention makes long prompts dearer
            probe = rig.ask("sequential", tokens)
            is_share = probe["computed_s"] / probe["loaded_s"]
            if abs(is_share / share - 1) < 0.15:
                break
            tokens = max(8, round(tokens * (share / is_share) ** 0.9))
        runs = [
            (rig.ask("sequential", tokens), rig.ask("progressive", tokens)) for _ in range(rounds)
        ]
        found[name] = {
            "tokens": tokens,
            "compute_by_loading": _median(s["computed_s"] / s["loaded_s"] for s, _ in runs),
            "sequential_s": _median(s["seconds"] for s, _ in runs),
            "progressive_s": _median(p["seconds"] for _, p in runs),
            "bound_s": _median(s["bound_s"] for s, _ in runs),
            "by_bound": [p["seconds"] / s["bound_s"] for s, p in runs],
            "by_sequential": [p["seconds"] / s["seconds"] for s, p in runs],
        }
    found["seen"] = [rig.ask("stopped", rig.source.pid)["seen"] for _ in range(rounds)]
    for sender in (NEAR, FAR):
        hosts.throttle(rig.link, 1.0, sender)
    found["load_s"] = [rig.ask("load_only")["load_s"] for _ in range(rounds)]
    return found


def _median(values: Any) -> float:
    return float(statistics.median(values))


def rows(found: dict[str, Any]) -> list[harness.Row]:
    """Return the rows."""
    made = []
    for name, (_, bar) in SHARES.items():
        part = found[name]
        detail = (
            f"ratio {part['compute_by_loading']:.2f}: {part['sequential_s']:.2f} s sequential, "
            f"{part['progressive_s']:.2f} progressive; loading {found['loaded_s']:.2f}"
        )
        what = f"first token, computing {name} of loading"
        made += [
            _row(f"{what} / the bound", part["by_bound"], "x", BOUND_BAR, detail),
            _row(f"{what} / sequential", part["by_sequential"], "x", bar),
        ]
    seen = all(found["seen"])
    work = "layer 0's output while the source is stopped after layer 1"
    return [
        *made,
        _row("load, over a link of 1 Mbit/s", found["load_s"], "s", LOAD_BAR_S),
        harness.Row(work, sum(found["seen"]), "times", f"{len(found['seen'])} times", seen),
        _row("70B: meta and plan", found["meta_s"], "s", META_BAR_S),
    ]


def _row(what: str, values: list[float], unit: str, bar: float, detail: str = "") -> harness.Row:
    value = statistics.median(values)
    return harness.at_most(what, value, unit, bar, detail, {"mx": values}, digits=3)


def drawn(found: dict[str, Any]) -> str:
    """Return a picture of the first tokens' times."""
    title = f"First token of a 24-layer model over a link of {MBIT_PER_S:g} Mbit/s"
    return bars(
        title,
        [
            (
                f"computing takes {'as long as' if share == 1 else f'{name} of'} loading",
                [
                    Bar("load, then compute", found[name]["sequential_s"]),
                    Bar("compute while it arrives", found[name]["progressive_s"], MX),
                    Bar("the bound: no order is faster", found[name]["bound_s"], BOUND),
                ],
            )
            for name, (share, _) in SHARES.items()
        ],
    )


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the first tokens")
    given = parser.parse_args()
    if (reason := unavailable()) is not None:
        raise SystemExit(f"error: {reason}")
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        make(Path(folder))
        with closing(Rig(hosts, Path(folder))) as rig:
            found = measured(rig, hosts, given.rounds)
    harness.show(rows(found), as_json=given.json)
    if given.svg is not None:
        given.svg.write_text(drawn(found))


if __name__ == "__main__":
    main()
