"""A pull from the Hugging Face hub: its cache's real layout, and a hub on loopback."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from mx.errors import EXIT_CONFIG, EXIT_INTEGRITY, EXIT_NO_SOURCE
from tests.support.chains import bytes_from, pulling, steps
from tests.support.commands import Command, Run, environment, free_port, serve
from tests.support.web_stores import COMMIT, Store, hub

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 12 MB in 6 layers, a file, and one that is not a part of the checkpoint."""
    root = tmp_path_factory.mktemp("hub")
    write_checkpoint(root / "model.safetensors", llama_shapes(4, 384, 1024, 1024))
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "pytorch_model.bin").write_bytes(b"\x80\x02never")
    return root


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with hub(folder) as served:
        yield served


@pytest.fixture(scope="module")
def cache(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model "org/model" at one commit, as the library lays it out."""
    home = tmp_path_factory.mktemp("home")
    base = home / "hub" / "models--org--model"
    (base / "blobs").mkdir(parents=True)
    (base / "snapshots" / COMMIT).mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(COMMIT)
    for number, name in enumerate(("model.safetensors", "config.json")):
        (base / "blobs" / f"{number:040x}").write_bytes((folder / name).read_bytes())
        link = base / "snapshots" / COMMIT / name
        link.symlink_to(Path("..", "..", "blobs", f"{number:040x}"))
    return home


def of(home: Path, **more: str) -> dict[str, str]:
    return environment(HF_HOME=str(home), HF_HUB_DISABLE_XET="1", **more)


def pull(run: Run, env: dict[str, str], *more: str, model: str = "m") -> Command:
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--from", "auto", "--json")
    return run("pull", model, *where, *more, env=env)


def test_it_is_downloaded_once(run: Run, store: Store, tmp_path: Path) -> None:
    env = of(tmp_path, HF_ENDPOINT=store.url)
    found = pull(run, env, "--hub-id", "org/model").json()
    assert found["fallback"] == found["defined_by"] == "hub" and steps(found)["hub"] == "used"
    assert not [path for _, path, _ in store.requests if path.endswith(".bin")]
    sent_nbytes = store.sent_nbytes
    again = pull(run, env, model="org/model").json()  # the name is an id, too
    assert again["pin"] == found["pin"]
    assert store.sent_nbytes - sent_nbytes < 1 << 20


def test_offline(run: Run, cache: Path, folder: Path) -> None:
    env = of(cache, HF_HUB_OFFLINE="1")
    disk = run("pull", "m", "--from", f"disk={folder}", "--json").json()
    found = pull(run, env, "--hub-id", f"org/model@{COMMIT}", model=f"m@{disk['identity']}").json()
    assert (found["fallback"], found["pin"]) == ("hub", disk["pin"])
    wrong = pull(run, env, "--hub-id", "org/{name}", model=f"model@{'0' * 64}")
    assert wrong.json()["error"]["exit_code"] == wrong.wait(60) == EXIT_INTEGRITY
    absent = pull(run, env, "--hub-id", "org/other")
    error = absent.json()["error"]
    assert error["exit_code"] == absent.wait(60) == EXIT_NO_SOURCE
    assert "org/other@main is not in the cache" in error["message"]


def test_what_the_cache_has_is_served_by_its_id(
    run: Run, coordinator: str, cache: Path, folder: Path
) -> None:
    env, where = of(cache), ("--coordinator", coordinator, "--json")
    pin = run("pull", "m", "--from", f"disk={folder}", "--json").json()["pin"]
    for number, text in enumerate(("org/model", f"org/model@{COMMIT}")):
        served = run("serve", text, *where, "--revision", f"r{number}", env=env).json()
        assert (served["model"], served["pin"]) == ("org/model", pin)
    named = run("serve", "org/model", "--model", "m", *where, env=env).json()
    assert named["model"] == "m"
    for text in ("org/other", "org/model@v2", "org/model@../main"):
        absent = run("serve", text, *where, env=env)
        error = absent.json()["error"]
        assert error["exit_code"] == absent.wait(60) == EXIT_CONFIG
        assert str(cache / "hub") in error["message"]
        assert f"hf download {text.partition('@')[0]}" in error["hint"]


def test_the_cache_gives_the_rest(run: Run, coordinator: str, cache: Path, folder: Path) -> None:
    source = serve(run, folder, "m", coordinator, "--max-bandwidth", "3MB/s")
    settings: dict[str, object] = {"hub_id": "org/model", "stall_timeout_s": 1.0}
    with pulling(coordinator, of(cache, HF_HUB_OFFLINE="1"), settings) as running:
        running.going()
        source.signal(signal.SIGKILL)
        report = running.ended()["report"]
    came = bytes_from(report)
    assert came["tcp"] > 0 and came["hub"] > 0 and sum(came.values()) == report["bytes"]


def test_a_download_of_another_process_is_waited_for(
    run: Run, store: Store, tmp_path: Path
) -> None:
    """For as long as it gets on, here beyond the time after which a hub is given up; and when it
    dies this process downloads."""
    env = of(tmp_path, HF_ENDPOINT=store.url, MX_PEER_STORE_TIMEOUT_S="1")
    store.slow_nbytes_per_s = 500_000
    first = pull(run, env, "--hub-id", "org/model")
    blobs = tmp_path / "hub" / "models--org--model" / "blobs"
    first.until(lambda: any(each.stat().st_size > 1 << 20 for each in blobs.glob("*")), "bytes")
    second = pull(run, env, "--hub-id", "org/model", "--log-level", "info")
    second.until(lambda: "another process downloads it" in second.err, "a word of waiting")
    began_s = time.monotonic()
    while time.monotonic() < began_s + 12:  # it would be given up after 10
        assert second.process.poll() is None, second.err
        assert first.process.poll() is None, first.err
        time.sleep(0.1)
    first.signal(signal.SIGKILL)
    store.slow_nbytes_per_s = 0
    found = second.json()
    assert steps(found)["hub"] == "used", found


def test_a_hub_that_refuses(run: Run, store: Store, tmp_path: Path) -> None:
    store.status = 404
    refused = pull(run, of(tmp_path, HF_ENDPOINT=store.url), "--hub-id", "org/model")
    error = refused.json()["error"]
    assert error["exit_code"] == refused.wait(60) == EXIT_NO_SOURCE
    assert "hub: " in error["message"] and "org/model" in error["message"]


def test_an_interrupt_ends_the_download(run: Run, store: Store, tmp_path: Path) -> None:
    store.serving = False
    stopped = pull(run, of(tmp_path, HF_ENDPOINT=store.url), "--hub-id", "org/model")
    stopped.until(lambda: bool(store.requests), "a request")
    stopped.signal(signal.SIGINT)
    assert stopped.wait(30) == 128 + signal.SIGINT
    deadline_s = time.monotonic() + 30
    while _downloading(stopped.process.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _downloading(parent: int) -> bool:
    """Return True if a child of that process, or of none any more, still downloads."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            status = (path.parent / "stat").read_text()
        except OSError:
            continue
        of = status.rpartition(")")[2].split()[1]
        if b"hub_child.py" in command and of in ("1", str(parent)):
            return True
    return False
