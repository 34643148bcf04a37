"""`make kv-requests`: random requests at three vLLM replicas that take KV blocks from each other,
while they are killed, forget, evict and change their weights. See docs/kv.md.

Each request has to generate what an engine without a connector generates, with the weights that its
replica has at that time; blocks of one name have the same bytes everywhere; and no slot is lost.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.daemon import daemon
from tests.vllm.checkpoints import bare, write_checkpoint
from tests.vllm.hosts import EngineError, Host, host, lending, start

REPLICAS, KILLS = 3, 4
BLOCK, TOKENS = 32, 6
WRITES = "tests.vllm.extension.Writes"
#: What one of so many actions is, besides a request.
FORGETS, UPDATES, SPLITS = 0.06, 0.015, 0.01
#: After how many requests one whose weights were changed is started again: its blocks have no names
#: until then.
CHANGED = 15

Prompt = tuple[int, ...]


def prompts(dice: random.Random) -> list[Prompt]:
    """Return prompts of up to seven blocks, many of which begin alike."""
    found: list[Prompt] = []
    for _ in range(8):
        base = [dice.randrange(250) for _ in range(4 * BLOCK)]
        for _ in range(4):
            rest = [dice.randrange(250) for _ in range(dice.randrange(3 * BLOCK))]
            found.append((*base[: dice.randrange(2, 5) * BLOCK], *rest, dice.randrange(250)))
    return found


def options(number: int, folder: Path) -> dict[str, Any]:
    """Return those of a replica's engine: its pool has room for a fifth of all blocks, and two of
    them keep blocks in the same folder, which has room for some, too."""
    extra: dict[str, Any] = {"pool": "1MiB", "wait_s": 5.0}
    if number:
        extra |= {"files": str(folder / "files"), "files_bytes": "1MiB"}
    return {
        "block_size": BLOCK,
        "max_model_len": 256,
        "max_num_seqs": 1,
        "enable_prefix_caching": True,
        "worker_extension_cls": WRITES,
        "kv_transfer_config": {
            "kv_connector": "MxConnector",
            "kv_connector_module_path": "mx.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    }


class Broken(Exception):
    """A rule that was broken."""


class Replica:
    """An engine that is started again when it was killed. `version` says which weights it has."""

    def __init__(self, number: int, site: Site) -> None:
        self.number, self._site = number, site
        self.version = 0
        self.changed = 0  # at which request
        self.host: Host
        self.counts: Counter[str] = Counter()  # of those that were killed, too
        self._last: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        site = self._site
        self.host = Host(site.coordinator, site.folder / f"{self.number}.log")
        given = options(self.number, site.folder)
        try:
            start(self.host, bare(site.checkpoints[0]), "m", **given)
        except EngineError:  # no other one lends its weights
            start(self.host, site.checkpoints[0], "m", **given)
        lending(self.host)
        made = self.host.do("complete", list(site.prompts[0]), TOKENS)
        self.version = site.version_of(site.prompts[0], made)

    def count(self) -> dict[str, Any]:
        """Return what its connector has counted, and note it."""
        found: dict[str, Any] = self.host.do("kv")
        now = Counter({name: found.get(name, 0) for name in ("loaded", "failed", "stored")})
        self.counts += now - self._last
        self._last = now
        return found

    def kill(self) -> None:
        self.host.kill()
        self._last.clear()
        assert self.host.process.stdin is not None and self.host.process.stdout is not None
        self.host.process.stdin.close()
        self.host.process.stdout.close()

    def close(self) -> None:
        self.host.close()

    def update(self) -> None:
        """Give it the other weights."""
        self._write("call", "write_weights")

    def update_between(self, prompt: Prompt) -> None:
        """Give it the other weights in the middle of a request: what that generates is of both."""
        self._write("complete_changing", list(prompt), "write_weights")

    def _write(self, do: str, *arguments: Any) -> None:
        version = 1 - self.version
        given: list[Any] = [str(self._site.checkpoints[version] / "model.safetensors"), True]
        try:
            self.host.do(do, *arguments, *(given if do == "call" else [given]))
        except EngineError as error:
            if "Attempted to load weight" not in str(error):
                raise
            # On processors for which vLLM packs them no weights can be written.
            self.count()
            self.kill()
            self.start()
            self.counts["starts in place of an update"] += 1
            return
        self.version = version
        self.host.do("forget")


def _generated(plain: Host, prompt: Prompt) -> list[list[int]]:
    """Return what an engine without a connector generates, by how many blocks it has cached."""
    found = []
    for blocks in range((len(prompt) - 1) // BLOCK + 1):
        plain.do("forget")
        if blocks:
            plain.do("complete", list(prompt[: blocks * BLOCK]), 1)
        made = plain.do("complete", list(prompt), TOKENS)
        assert made["cached"] == blocks * BLOCK, made
        found.append(made["tokens"])
    return found


class Site:
    """What all replicas share."""

    def __init__(self, coordinator: str, folder: Path, dice: random.Random) -> None:
        self.coordinator, self.folder = coordinator, folder
        self.prompts = prompts(dice)
        self.checkpoints = [write_checkpoint(folder / f"v{seed}", seed=seed) for seed in (1, 2)]
        #: By version: what is generated with each number of blocks in the engine's own cache. (On
        #: some processors vLLM rounds otherwise then.)
        self._wanted: list[dict[Prompt, list[list[int]]]] = []
        for checkpoint in self.checkpoints:
            with host(coordinator, folder / "plain.log") as plain:
                plain.do("start", str(checkpoint), load_format="auto", **_plain())
                self._wanted.append({each: _generated(plain, each) for each in self.prompts})

    def check(self, replica: Replica, prompt: Prompt, made: dict[str, Any]) -> None:
        wanted = self._wanted[replica.version][prompt]
        if made["tokens"] not in wanted:
            raise Broken(
                f"replica {replica.number} of version {replica.version}: {made}, and not {wanted}"
            )

    def version_of(self, prompt: Prompt, made: dict[str, Any]) -> int:
        """Return which weights have generated this."""
        for version, wanted in enumerate(self._wanted):
            if made["tokens"] in wanted[prompt]:
                return version
        raise Broken(f"neither weights generate {made}")


def _plain() -> dict[str, Any]:
    return {"block_size": BLOCK, "max_model_len": 256, "max_num_seqs": 1}


@contextmanager
def replicas(site: Site) -> Iterator[list[Replica]]:
    with ExitStack() as stack:
        found: list[Replica] = []
        for number in range(REPLICAS):
            found.append(Replica(number, site))
            stack.callback(found[-1].close)
        yield found


def check_blocks(found: list[Replica]) -> int:
    """Compare the blocks of all pools by their names, and look for lost slots; return how many
    names more than one pool has."""
    seen: dict[str, str] = {}
    shared = 0
    for each in found:
        counts = each.count()
        until_s = time.monotonic() + 20
        while counts["leaving"] and time.monotonic() < until_s:
            time.sleep(0.2)
            counts = each.count()
        if counts["listed"] + counts["free"] != counts["slots"]:
            raise Broken(f"replica {each.number} has lost slots: {counts}")
        for name, digests in each.host.do("blocks").items():
            shared += name in seen
            if seen.setdefault(name, digests) != digests:
                raise Broken(f"two pools have other bytes for the block {name}")
    return shared


def play(requests: int, seed: int, folder: Path) -> str:
    """Send the requests; return what happened. Raises Broken."""
    dice = random.Random(seed)
    kills = set(dice.sample(range(10, requests), min(KILLS, max(0, requests - 10))))
    done: Counter[str] = Counter()
    with daemon(lease_s=2.0) as (_, coordinator):
        site = Site(coordinator, folder, dice)
        with replicas(site) as found:
            for number in range(requests):
                one, other = dice.sample(found, 2)
                prompt, luck = dice.choice(site.prompts), dice.random()
                if luck < FORGETS:
                    one.host.do("forget")
                    done["forgets"] += 1
                elif luck < FORGETS + UPDATES:
                    one.update()
                    one.changed = number
                    done["updates"] += 1
                elif luck < FORGETS + UPDATES + SPLITS:
                    one.update_between(prompt)
                    one.changed = number
                    done["updates in mid-request"] += 1
                transfer: dict[str, Any] = {}
                if dice.random() < 0.2 and one.version == other.version:
                    first = other.host.do("complete", list(prompt), 1, do_remote_decode=True)
                    transfer = first["transfer"]
                    done["prefilled elsewhere"] += 1
                one.host.begin("complete", list(prompt), TOKENS, **transfer)
                if number in kills:
                    time.sleep(dice.random() * 0.03)
                    other.kill()
                    done["kills"] += 1
                elif dice.random() < 0.1:
                    other.host.do("forget")
                    done["forgets meanwhile"] += 1
                site.check(one, prompt, one.host.end())
                if number in kills:
                    other.start()
                if one.version and number - one.changed > CHANGED:
                    one.kill()
                    one.start()
                    done["started again"] += 1
                if dice.random() < 0.3:  # else its own cache would have all of it soon
                    one.host.do("forget")
                if number % 10 == 9:
                    done["blocks of several pools"] += check_blocks(found)
            check_blocks(found)
            for each in found:
                done += each.counts
    return ", ".join(f"{count} {what}" for what, count in sorted(done.items()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kv_requests", description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mx-kv-requests-", dir="/var/tmp") as folder:
        try:
            said = play(asked.requests, asked.seed, Path(folder))
        except (Broken, EngineError) as error:
            print(f"a rule was broken: {error}\nmake kv-requests SEED={asked.seed}")
            return 1
    seconds = time.monotonic() - began_s
    print(f"{asked.requests} requests from seed {asked.seed} in {seconds:.0f} s: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
