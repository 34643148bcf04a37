from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx import config, config_values
from mx.errors import ConfigError
from mx.units import parse_rate
from tests.support import settings_page


def load(
    flags: dict[str, object] | None = None,
    *,
    env: dict[str, str] | None = None,
    file: Path | None = None,
) -> config.Settings:
    """Call `config.load` without the environment of the tests."""
    return config.load(flags, file=str(file) if file else None, environ=env or {"HOME": "/none"})


def toml(folder: Path, text: str) -> Path:
    path = folder / "mx.toml"
    path.write_text(text)
    return path


def test_defaults_are_valid_and_their_origin_is_default() -> None:
    settings = load()
    assert settings == config.Settings()
    for name in config.descriptions():
        assert settings.origin(name) == "default"
        assert not settings.is_set(name)
        assert config.descriptions()[name].text


def test_each_default_passes_its_own_check() -> None:
    defaults = config.Settings()
    flags: dict[str, object] = {n: defaults.value(n) for n in config.descriptions()}
    loaded = load(flags)
    assert {name: loaded.value(name) for name in flags} == flags


def test_several_coordinators(tmp_path: Path) -> None:
    several = "a:1,[::1]:2"
    assert load({"coordinator": " a:1, [::1]:2,a:1"}).coordinator == several
    assert load(env={"MX_PEER_COORDINATOR": several}).coordinator == several
    path = toml(tmp_path, 'coordinator = ["a:1", "[::1]:2"]')
    assert load(file=path).coordinator == several
    for wrong in ("a:1,", "a:1,nowhere", ",", 7600, [], ["a:1", 2]):
        with pytest.raises(ConfigError, match="must be HOST:PORT, or several"):
            load({"coordinator": wrong})


def test_precedence_and_origins(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        '# where\n\ncoordinator = "file:1"\nstreams = 4\nlease_s = 2\n',
    )
    settings = load(
        {"coordinator": "flag:3", "listen": None},
        env={"MX_PEER_COORDINATOR": "env:2", "MX_PEER_STREAMS": "8", "MX_PEER_LISTEN": ""},
        file=path,
    )
    assert settings.coordinator == "flag:3"
    assert settings.origin("coordinator") == "`coordinator`"
    assert settings.streams == 8
    assert settings.origin("streams") == "environment MX_PEER_STREAMS"
    assert settings.lease_s == 2.0
    assert settings.origin("lease_s") == f"{path}, line 5"
    assert settings.origin("listen") == "default"


def test_the_default_file_follows_the_environment(tmp_path: Path) -> None:
    assert config.default_file({"HOME": "/h"}) == Path("/h/.config/mx/config.toml")
    assert config.default_file({"HOME": "/h", "XDG_CONFIG_HOME": "not/absolute"}) == Path(
        "/h/.config/mx/config.toml"
    )
    (tmp_path / "mx").mkdir()
    (tmp_path / "mx" / "config.toml").write_text("streams = 3\n")
    assert load(env={"XDG_CONFIG_HOME": str(tmp_path)}).streams == 3
    other = toml(tmp_path, "streams = 5\n")
    env = {"XDG_CONFIG_HOME": str(tmp_path), "MX_PEER_CONFIG": str(other)}
    assert load(env=env).streams == 5


def test_the_page_of_settings_says_what_the_fields_say() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), (
        "write it again: python -m tests.support.settings_page"
    )


BAD = [
    ("coordinator", "nowhere", "HOST:PORT"),
    ("coordinator", "host:70000", "HOST:PORT"),
    ("coordinator", ":7600", "HOST:PORT"),
    ("listen", "::1:0", "HOST:PORT"),
    ("lease_s", "soon", "a time from"),
    ("lease_s", "nan", "a time from"),
    ("lease_s", "-1", "from 0.5"),
    ("streams", "0", "1 to 32"),
    ("streams", "33", "1 to 32"),
    ("streams", "2.5", "whole number"),
    ("streams", "٣", "whole number"),
    ("max_readers", "-1", "whole number"),
    ("max_bandwidth", "fast", "2Gbit/s"),
    ("max_bandwidth", "1kB/s", "at least 1MB/s"),
    ("max_bandwidth", "1Gb/s", "2Gbit/s"),
    ("insecure", "perhaps", "true or false"),
    ("log_level", "loud", "debug, info"),
    ("state", "etcd:x", "memory"),
]


@pytest.mark.parametrize(("name", "text", "right"), BAD)
def test_a_bad_value_names_its_place_and_what_would_be_right(
    name: str, text: str, right: str, tmp_path: Path
) -> None:
    variable = f"MX_PEER_{name.upper()}"
    with pytest.raises(ConfigError, match=variable) as by_env:
        load(env={variable: text})
    assert right in str(by_env.value)
    with pytest.raises(ConfigError, match=f"`{name}`") as by_flag:
        load({name: text})
    assert right in str(by_flag.value)
    path = toml(tmp_path, f'{name} = "{text}"\n')
    with pytest.raises(ConfigError, match=r"mx\.toml, line") as by_file:
        load(file=path)
    assert right in str(by_file.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("coordinator", "7600"),
        ("streams", "true"),
        ("lease_s", "[1]"),
        ("lease_s", "inf"),
        ("insecure", "1"),
        ("nics", "[1, 2]"),
        ("nics", "{ a = 1 }"),
        ("tls_cert", "5"),
        ("log_level", "1979-05-27"),
    ],
)
def test_a_wrong_type_in_the_file(name: str, value: str, tmp_path: Path) -> None:
    path = toml(tmp_path, f"\n{name} = {value}\n")
    with pytest.raises(ConfigError, match=f"line 2: {name} = .*: it must be"):
        load(file=path)


#: What a pod has of a Service "mx-peer" and of one "mx-peer-web".
LINKS = {
    "MX_PEER_SERVICE_HOST": "10.96.0.12",
    "MX_PEER_SERVICE_PORT": "7600",
    "MX_PEER_SERVICE_PORT_GRPC": "7600",
    "MX_PEER_PORT": "tcp://10.96.0.12:7600",
    "MX_PEER_PORT_7600_TCP": "tcp://10.96.0.12:7600",
    "MX_PEER_PORT_7600_TCP_PROTO": "tcp",
    "MX_PEER_PORT_7600_TCP_PORT": "7600",
    "MX_PEER_PORT_7600_TCP_ADDR": "10.96.0.12",
    "MX_PEER_WEB_SERVICE_HOST": "10.96.0.13",
    "MX_PEER_WEB_PORT": "udp://10.96.0.13:53",
}


def test_kubernetes_service_links_are_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_links_were_named", False)
    for _ in range(2):
        assert load(env=LINKS | {"MX_PEER_STREAMS": "5"}).streams == 5
    (line,) = caplog.messages
    assert all(name in line for name in LINKS)


@pytest.mark.parametrize("variable", ["MX_PEER_PORT", "MX_PEER_DATA_PORT", "MX_PEER_SERVICE"])
def test_what_only_looks_like_a_service_link_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no setting {variable}"):
        load(env={variable: "7600"})


def test_unknown_names_get_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1.* cordinator .*coordinator\?"):
        load(file=toml(tmp_path, 'cordinator = "a:1"\n'))
    with pytest.raises(ConfigError, match="MX_PEER_CORDINATOR.*MX_PEER_COORDINATOR"):
        load(env={"MX_PEER_CORDINATOR": "a:1"})
    with pytest.raises(ConfigError, match="line 2.*setting server .*known are"):
        load(file=toml(tmp_path, "\n[server]\nx = 1\n"))
    with pytest.raises(ConfigError, match=r"`flags`.* stream .*streams\?"):
        load({"stream": 3})
    # Another project's variables are ignored.
    load(env={"MX_COORDINATOR": "x", "PATH": "/bin"})


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load(file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is not TOML.*line 1"):
        load(file=toml(tmp_path, "streams : 3\n"))
    with pytest.raises(ConfigError, match="cannot read"):
        load(file=tmp_path)
    (tmp_path / "latin").write_bytes(b'trace = "\xe9"\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(file=tmp_path / "latin")


def test_tls_is_all_three_files_or_none(tmp_path: Path) -> None:
    paths = {}
    for name in ("tls_cert", "tls_key", "tls_ca"):
        paths[name] = str(tmp_path / name)
        (tmp_path / name).write_text("pem")
    assert load(dict(paths)).tls_ca == paths["tls_ca"]
    for missing in paths:
        given = {name: path for name, path in paths.items() if name != missing}
        with pytest.raises(ConfigError, match=f"missing: {missing}"):
            load(dict(given))
    with pytest.raises(ConfigError, match="tls_key.*no such file.*name a PEM file"):
        load({**paths, "tls_key": str(tmp_path / "gone")})


def test_lists_are_written_both_ways(tmp_path: Path) -> None:
    assert load(env={"MX_PEER_NICS": "eth0, eth1"}).nics == ("eth0", "eth1")
    assert load(file=toml(tmp_path, 'nics = ["eth0", "eth1"]\n')).nics == ("eth0", "eth1")


@given(st.text(max_size=40))
def test_any_text_is_accepted_or_raises_a_config_error(text: str) -> None:
    for name in config.descriptions():
        try:
            value = load({name: text}).value(name)
        except ConfigError:
            continue
        # An accepted value is displayed in a form that is accepted again.
        shown = config_values.format_value(value)
        assert load({name: shown}).value(name) == value


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("500MB/s", 500_000_000),
        ("2Gbit/s", 250_000_000),
        ("1.5 GiB/s", 3 << 29),
        ("100mbit", 12_500_000),
        ("8000000", 8_000_000),
        ("0", 0),
    ],
)
def test_rates_are_bits_or_bytes_per_second(text: str, bytes_per_s: int) -> None:
    assert parse_rate(text) == bytes_per_s
    environ = {"HOME": "/nonexistent", "MX_PEER_MAX_BANDWIDTH": text, "MX_PEER_MAX_READERS": "3"}
    settings = config.load(environ=environ)
    assert (settings.max_bandwidth, settings.max_readers) == (bytes_per_s, 3)


@pytest.mark.parametrize("text", ["", "fast", "-1", "1Gb/s", "5Mb", "1MB/h", "1e9", "1 MB / s"])
def test_malformed_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        parse_rate(text)


def test_a_calls_arguments_beat_the_settings() -> None:
    settings = load({"max_readers": 5})
    changed = config.given(settings, max_readers=None, max_bandwidth="10MB/s")
    assert (changed.max_readers, changed.max_bandwidth) == (5, 10_000_000)
    assert changed.origin("max_bandwidth") == "argument"
    with pytest.raises(ConfigError, match="max_readers"):
        config.given(settings, max_readers=-1)


@pytest.mark.parametrize("outside", [None, "before"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_variables_are_restored_in_whichever_order_blocks_end(
    outside: str | None, order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of threads that use caches of their own."""
    monkeypatch.delenv("MX_OF_TEST", raising=False)
    if outside is not None:
        monkeypatch.setenv("MX_OF_TEST", outside)
    blocks = [config.environment({"MX_OF_TEST": str(n)}) for n in range(3)]
    for block in blocks:
        block.__enter__()
    left = [0, 1, 2]
    for n in order:
        assert os.environ["MX_OF_TEST"] == str(left[-1])
        blocks[n].__exit__(None, None, None)
        left.remove(n)
    assert os.environ.get("MX_OF_TEST") == outside
