"""What an engine hears of compile caches that it asked for and can't have: one line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mx import config
from mx.engines.compiling import CompileCaches, compile_counts

log = logging.getLogger("engine")


@pytest.mark.parametrize(
    ("trust", "why"),
    [
        ("", "no trust file is named"),
        ("missing.toml", "missing.toml"),
        ("other.toml", "no coordinator answers"),
    ],
)
def test_whatever_is_wrong_is_one_line_and_the_engine_goes_on(
    trust: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "other.toml").write_text("")
    (tmp_path / "other.toml").chmod(0o600)
    settings = config.load(
        {"trust": str(tmp_path / trust) if trust else "", "coordinator": "127.0.0.1:9"}
    )
    before = compile_counts()
    caches = CompileCaches("vLLM", log, "llama", settings, {"configuration": "a=1"})
    caches.compiled()
    caches.compiled()
    assert caches.state == "none"
    assert caches.options is None
    lines = [each.getMessage() for each in caplog.records if each.name == "engine"]
    assert len(lines) == 1
    assert why in lines[0]
    assert "vLLM compiles as always" in lines[0]
    assert compile_counts() == {**before, "none": before["none"] + 1}
    caches.close()
    caches.close()
