"""The store of another distribution, as docs/stores.md makes it, and stores that do wrong."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mx
from benchmarks.checkpoints import llama_shapes, write_checkpoint
from mx.errors import EXIT_CONFIG, EXIT_INTEGRITY, EXIT_NO_SOURCE
from mx.testing.stores import StoreHarness, StoreSuite
from tests.support.chains import bytes_from, flip, pulling, steps
from tests.support.commands import Command, Run, free_port, serve
from tests.support.daemon import ROOT
from tests.support.distributions import having, installed_commands, put
from tests.support.web_stores import Store, rewrite, web

pytestmark = pytest.mark.integration

MOST_LINES = 40
Start = Callable[..., Command]


def documented() -> tuple[dict[str, str], str]:
    """Return the modules and the entry points of the page."""
    page = (ROOT / "docs" / "stores.md").read_text()
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert [path for path, _ in blocks] == ["mx_web/store.py"]
    (entry,) = re.findall(r'entry-points."mx.stores"\]\n(.*?)\n```', page)
    name, _, target = entry.partition(" = ")
    return dict(blocks), f"[mx.stores]\n{name} = {target.strip(chr(34))}\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the distribution of the page."""
    there = tmp_path_factory.mktemp("site")
    put(there, *documented())
    return there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 12 MB in 6 layers, and a file."""
    root = tmp_path_factory.mktemp("web") / "m"
    root.mkdir()
    write_checkpoint(root / "model.safetensors", llama_shapes(4, 384, 1024, 1024))
    (root / "config.json").write_text('{"model_type": "llama"}')
    return root


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with web(folder.parent) as served:
        yield served


@pytest.fixture
def start() -> Iterator[Start]:
    with installed_commands() as started:
        yield started


def pull(start: Start, there: Path, url: str, *more: str, model: str = "m") -> Command:
    """Pull from the store alone."""
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--from", "auto", "--json")
    given = ("--object-url", url, "--store-timeout-s", "5")
    return start("pull", model, *where, *given, *more, env=having(there))


def failed(command: Command, said: str, code: int) -> None:
    error = command.json()["error"]
    assert said in error["message"], error
    assert error["exit_code"] == command.wait(60) == code
    assert "Traceback" not in command.err


def test_the_page_s_store_is_short() -> None:
    (module,) = documented()[0].values()
    assert len([line for line in module.splitlines() if line.strip()]) <= MOST_LINES


def test_the_store_of_the_page(
    start: Start, run: Run, site: Path, store: Store, folder: Path, tmp_path: Path
) -> None:
    store.login = f"Basic {b64encode(b'user:pass word').decode()}"
    url = f"{store.url.replace('//', '//user:pass%20word@')}/{{name}}"
    pin = run("pull", "m", "--from", f"disk={folder}", "--json").json()["pin"]
    command = pull(start, site, url, "--out", str(tmp_path / "out"), model=f"m@{pin}")
    found = command.json()
    assert command.wait(60) == 0 and "pass" not in command.out + command.err
    assert found["pin"] == pin and steps(found)["objects"] == "used"
    assert [path["source"] for path in found["paths"]] == [f"{store.url}/m"]
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    store.login = "another"
    failed(pull(start, site, url), "401 Unauthorized", EXIT_NO_SOURCE)


def test_it_gives_what_peers_do_not(
    run: Run, site: Path, coordinator: str, store: Store, folder: Path
) -> None:
    source = serve(run, folder, "m", coordinator, "--max-bandwidth", "3MB/s")
    settings: dict[str, object] = {"object_url": f"{store.url}/m", "stall_timeout_s": 3.0}
    with pulling(coordinator, having(site), settings) as running:
        running.going()
        source.signal(signal.SIGKILL)
        report = running.ended()["report"]
    came = bytes_from(report)
    assert came["tcp"] > 0 and came["objects"] > 0 and sum(came.values()) == report["bytes"]


# -- the rules ------------------------------------------------------------------------------------


class TestDocumentedStore(StoreSuite):
    @pytest.fixture
    def store_harness(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[StoreHarness]:
        there = tmp_path / "site"
        put(there, *documented())
        monkeypatch.syspath_prepend(there)
        shutil.copytree(folder, tmp_path / "m")
        files = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
        with web(tmp_path) as store:
            store.login = f"Basic {b64encode(b'user:secret').decode()}"

            @contextmanager
            def stalled() -> Iterator[None]:
                store.serving = False
                yield

            yield StoreHarness(
                f"{store.url.replace('//', '//user:secret@')}/m",
                files,
                change=lambda path, data: rewrite(tmp_path / "m" / path, data),
                stalled=stalled,
                secret="secret",
            )
        for name in ("mx_web", "mx_web.store"):
            sys.modules.pop(name, None)


# -- stores that lie, break and hang --------------------------------------------------------------


@pytest.mark.parametrize("lies_nbytes", [-10, 1000, 10**12])
def test_sizes_that_are_not_true(start: Start, site: Path, store: Store, lies_nbytes: int) -> None:
    store.lies_nbytes = lies_nbytes
    failed(pull(start, site, f"{store.url}/m"), "model.safetensors", EXIT_INTEGRITY)


def test_other_bytes(
    start: Start, run: Run, site: Path, coordinator: str, folder: Path, tmp_path: Path
) -> None:
    pin = run("pull", "m", "--from", f"disk={folder}", "--json").json()["pin"]
    shutil.copytree(folder, tmp_path / "m")
    flip(tmp_path / "m" / "model.safetensors", -5)
    with web(tmp_path) as store:
        url = f"{store.url}/m"
        failed(pull(start, site, url, model=f"m@{pin}"), "as requested", EXIT_INTEGRITY)
        # The coordinator knows the model, and its source has gone in the middle.
        source = serve(run, folder, "m", coordinator, "--max-bandwidth", "3MB/s")
        settings: dict[str, object] = {"object_url": url, "stall_timeout_s": 3.0}
        with pulling(coordinator, having(site), settings) as running:
            running.going()
            source.signal(signal.SIGKILL)
            ended = running.ended()
        assert ended["code"] == EXIT_INTEGRITY and "do not match" in ended["message"], ended


ODD = """
import itertools, os, sys, threading, time
from mx.errors import ClosedError, NotAllowedError
from mx.stores import ListedFile

class OddStore:
    place, threads = "odd://\\x1b[31mplace", 3

    def __init__(self, url, opening):
        self.kind, _, self.folder = url.removeprefix("odd://").partition("/")
        self.folder = "/" + self.folder
        if self.kind == "init":
            raise SystemExit("no store")

    def list(self):
        match self.kind:
            case "none":
                return None
            case "strings":
                return ["model.safetensors"]
            case "twice":
                return [ListedFile("a.safetensors", 9), ListedFile("a.safetensors", 9)]
            case "negative":
                return [ListedFile("a.safetensors", -9)]
            case "outside":
                return [ListedFile("../../a.safetensors", 9), ListedFile("config.json", 9)]
            case "endless":
                return (ListedFile(f"{n}.txt", 1) for n in itertools.count())
            case "hanging":
                time.sleep(3600)
        return [
            ListedFile(name, os.stat(f"{self.folder}/{name}").st_size)
            for name in os.listdir(self.folder)
        ]

    def read(self, file, offset, view):
        with open(f"{self.folder}/{file.path}", "rb") as opened:
            opened.seek(offset)
            if offset:
                match self.kind:
                    case "exit":
                        sys.exit(7)
                    case "interrupt":
                        raise KeyboardInterrupt
                    case "closed":
                        raise ClosedError("it says that the pull was closed")
                    case "recursion":
                        return self.read(file, offset, view)
                    case "unprintable":
                        raise RuntimeError("\\x1b[2J two\\nlines")
                    case "more":
                        return len(view) + 1
                    case "nothing":
                        return None
                    case "late":
                        kept = memoryview(bytearray(view))
                        threading.Thread(target=self.write, args=(view,), daemon=True).start()
                    case "hangs":
                        print("hangs", file=sys.stderr, flush=True)
                        time.sleep(3600)
            return opened.readinto(view)

    def write(self, view):
        time.sleep(0.3)
        view[:] = bytes(len(view))

    def close(self):
        raise RuntimeError("it does not close")
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has a distribution with a store that does wrong."""
    there = tmp_path_factory.mktemp("odd")
    put(there, {"odd_store.py": ODD}, "[mx.stores]\nodd = odd_store:OddStore\n")
    return there


@pytest.mark.parametrize(
    ("kind", "said", "code"),
    [
        ("init", "no store", EXIT_NO_SOURCE),
        ("none", "TypeError", EXIT_NO_SOURCE),
        ("strings", "not an mx.stores.ListedFile", EXIT_NO_SOURCE),
        ("twice", "twice", EXIT_NO_SOURCE),
        ("negative", "not an mx.stores.ListedFile", EXIT_NO_SOURCE),
        ("outside", "holds no .safetensors file", EXIT_NO_SOURCE),
        ("endless", "holds no .safetensors file", EXIT_NO_SOURCE),
        ("exit", "SystemExit", EXIT_NO_SOURCE),
        ("interrupt", "KeyboardInterrupt", EXIT_NO_SOURCE),
        ("closed", "ClosedError", EXIT_NO_SOURCE),
        ("recursion", "RecursionError", EXIT_NO_SOURCE),
        ("unprintable", "RuntimeError", EXIT_NO_SOURCE),
        ("more", "came", EXIT_INTEGRITY),
        ("nothing", "None came", EXIT_INTEGRITY),
    ],
)
def test_a_store_that_does_wrong(
    start: Start, odd: Path, folder: Path, kind: str, said: str, code: int
) -> None:
    command = pull(start, odd, f"odd://{kind}{folder}")
    failed(command, said, code)
    assert "\x1b" not in command.out + command.err


def test_what_a_store_writes_late_reaches_no_weights(
    start: Start, run: Run, odd: Path, folder: Path, tmp_path: Path
) -> None:
    pin = run("pull", "m", "--from", f"disk={folder}", "--json").json()["pin"]
    out = tmp_path / "out"
    found = pull(start, odd, f"odd://late{folder}", "--out", str(out), model=f"m@{pin}").json()
    assert found["pin"] == pin
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("kind", ["hanging", "hangs"])
def test_a_store_that_hangs(start: Start, odd: Path, folder: Path, kind: str) -> None:
    hung = pull(start, odd, f"odd://{kind}{folder}", "--store-timeout-s", "1")
    failed(hung, "no answer within 1 s", EXIT_NO_SOURCE)


def test_an_interrupt_ends_a_pull_from_a_store_that_hangs(
    start: Start, odd: Path, folder: Path
) -> None:
    hung = pull(start, odd, f"odd://hangs{folder}", "--store-timeout-s", "1h")
    hung.until(lambda: "hangs" in hung.err, "a read that hangs")
    hung.signal(signal.SIGINT)
    assert hung.wait(30) == 128 + signal.SIGINT


# -- which stores there are -----------------------------------------------------------------------


def test_a_scheme_that_no_store_has(start: Start, site: Path, tmp_path: Path) -> None:
    failed(pull(start, tmp_path, "zip://m"), "stores for s3, ", EXIT_CONFIG)
    command = pull(start, site, "zip://m")
    error = command.json()["error"]
    assert command.wait(60) == EXIT_CONFIG and "file, http" in error["message"]
    assert "mx.stores" in error["hint"] and "--object-url" in error["message"]


def test_two_distributions_with_one_scheme(start: Start, tmp_path: Path) -> None:
    put(tmp_path, {"one.py": "raise SystemExit(9)"}, "[mx.stores]\nzip = one:Store\n", "one")
    put(tmp_path, {"two.py": "raise SystemExit(9)"}, "[mx.stores]\nzip = two:Store\n", "two")
    failed(pull(start, tmp_path, "zip://m"), "zip://: one, two", EXIT_CONFIG)


def test_mx_s_own_schemes_stay(start: Start, tmp_path: Path, folder: Path) -> None:
    put(tmp_path, {"taker.py": "raise SystemExit(9)"}, "[mx.stores]\nfile = taker:Store\n")
    found = pull(start, tmp_path, f"file://{folder}").json()
    assert bytes_from(found).keys() == {"objects"}


@pytest.mark.parametrize(
    "module", ["import no_such_library", "raise RuntimeError('x')", "Store = 1"]
)
def test_a_store_that_can_t_be_imported(start: Start, tmp_path: Path, module: str) -> None:
    put(tmp_path, {"broken.py": module}, "[mx.stores]\nzip = broken:Store\n")
    failed(pull(start, tmp_path, "zip://m"), "the store for zip:// can't be used", EXIT_NO_SOURCE)


def test_python_has_the_contract() -> None:
    assert mx.stores.schemes()[0] == "s3"
