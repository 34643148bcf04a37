"""The command line itself: what it parses, how it errs, what it imports. Real processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import mx
import mx.cli
import mx.cli.app
import mx.cli.coordinator
from mx import config
from mx.cli import outcome, show
from mx.cli.stop import Stop

VERBS = (
    "serve",
    "pull",
    "plan",
    "verify",
    "models",
    "sources",
    "cache",
    "topo",
    "web",
    "doctor",
    "demo",
    "bench",
    "config show",
    "artifacts keygen",
    "artifacts record",
    "artifacts publish",
    "artifacts list",
    "artifacts inspect",
    "artifacts check",
    "artifacts pull",
)


def environment(**extra: str) -> dict[str, str]:
    """The tests' own, without settings of the user; tables in full width."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MX_PEER_", "XDG_"))}
    return kept | {"HOME": "/nonexistent", "COLUMNS": "200"} | extra


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


class Mx:
    """Runs command lines in this process, as `mx` and `mx-coordinator` would."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._patch = patch

    def __call__(
        self,
        *arguments: str,
        main: Callable[[Sequence[str]], None] = mx.cli.main,
        **extra: str,
    ) -> Result:
        with self._patch.context() as patch:
            for name in set(os.environ) - set(environment()):
                patch.delenv(name)
            for name, value in environment(**extra).items():
                patch.setenv(name, value)
            # A process of its own would take these with it.
            patch.setattr(sys, "excepthook", sys.excepthook)
            patch.setattr(outcome, "_quiet", False)
            patch.setattr(outcome, "_as_lines", False)
            loggers = [logging.getLogger(name) for name in ("", "grpc", "mx", "mx_transports")]
            logged = [(each, each.level, list(each.handlers)) for each in loggers]
            handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
            try:
                with pytest.raises(SystemExit) as ended:
                    main(arguments)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                for logger, level, those in logged:
                    logger.setLevel(level)
                    logger.handlers[:] = those
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, *self._capsys.readouterr())


@pytest.fixture
def run_mx(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Mx:
    return Mx(capsys, monkeypatch)


def the_object(text: str) -> dict[str, Any]:
    """`--json` prints one object, on one line, and nothing else."""
    (line,) = text.splitlines()
    result = json.loads(line)
    assert isinstance(result, dict)
    assert result["schema"] == 1
    return result


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_teaches_with_an_example(run_mx: Mx, verb: str) -> None:
    result = run_mx(*verb.split(), "--help")
    assert result.returncode == 0, result.stderr
    assert f"mx {verb}" in result.stdout.split("Example", 1)[1]
    assert result.stderr == ""
    narrow = run_mx(*verb.split(), "--help", COLUMNS="80")
    assert "…" not in narrow.stdout  # nothing is cut
    assert not re.search(r"\{[A-Z]+\}|<(str|int|path)", narrow.stdout)  # nothing of typer's


def test_help_lists_verbs_and_exit_codes(run_mx: Mx) -> None:
    result = run_mx("--help")
    assert result.returncode == 0
    for verb in VERBS:
        assert verb.split()[0] in result.stdout
    assert "6 incomplete" in result.stdout
    coordinator = run_mx("--help", main=mx.cli.coordinator_main)
    assert coordinator.returncode == 0
    assert "--lease-s" in coordinator.stdout
    for main in (mx.cli.main, mx.cli.coordinator_main):
        assert "…" not in run_mx("--help", main=main, COLUMNS="80").stdout


def test_help_has_the_common_options_first(run_mx: Mx) -> None:
    shown = run_mx("pull", "--help").stdout
    order = ["--out ", "--hold ", "--artifacts ", "--coordinator ", "--json ", "--tls-cert "]
    order += ["--hub-id ", "--control-memory "]
    places = [shown.index(flag, shown.index("Options ─")) for flag in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("pul", "mx pull"),
        ("list", "mx models"),
        ("ls", "mx models"),
        ("status", "mx top"),
        ("download", "mx pull"),
        ("version", "mx --version"),
        ("help", "mx --help"),
        ("artifacts lst", "mx artifacts list"),
        ("config set", "mx config show"),
        ("qwertz", "mx --help lists"),
    ],
)
def test_a_wrong_verb_gets_the_nearest(run_mx: Mx, typed: str, meant: str) -> None:
    result = run_mx(*typed.split(), "streams", "4")
    assert result.returncode == 2
    said, hint = result.stderr.splitlines()
    assert said == f"error: there is no command mx {typed}"
    assert meant in hint


def test_service_links_are_named_once_in_the_log_that_was_asked_for(
    run_mx: Mx, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, warned in [((), True), (("--quiet",), False)]:
        monkeypatch.setattr(config, "_links_were_named", False)
        shown = run_mx(
            *("config", "show", *arguments),
            MX_PEER_PORT="tcp://10.0.0.1:7600",
            MX_PEER_SERVICE_HOST="10.0.0.1",
        )
        assert shown.returncode == 0
        assert ("MX_PEER_PORT, MX_PEER_SERVICE_HOST are not settings" in shown.stderr) == warned


def test_each_flag_of_a_setting_is_where_its_field_says() -> None:
    group: Any = typer.main.get_command(mx.cli.app.app)
    coordinator = typer.main.get_command(mx.cli.coordinator.app)
    verbs = {name: group.get_command(None, name) for name in group.list_commands(None)}
    verbs["coordinator"] = coordinator
    verbs |= vars(verbs.pop("config"))["commands"]
    artifacts = vars(verbs.pop("artifacts"))["commands"]
    verbs |= {f"artifacts_{verb}": command for verb, command in artifacts.items()}
    taken = {
        (option.name, verb, option.opts[0])
        for verb, command in verbs.items()
        for option in command.params
        if option.name in config.descriptions()
    }
    assert taken == {
        (name, verb, about.flag)
        for name, about in config.descriptions().items()
        for verb in about.verbs
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pul",), "there is no command mx pul"),
        (("pull",), "Missing argument 'MODEL'"),
        (("serve",), "Missing argument 'CHECKPOINT'"),
        (("pull", "m", "--fast"), "No such option"),
        (("pull", "m", "--streams", "many"), "must be a whole number from 1 to 32, or auto"),
        (("pull", "m", "--coordinator", "nowhere"), "must be HOST:PORT"),
        (("models", "--config", "/nonexistent/mx.toml"), "no configuration file"),
        (("models", "--tls-cert", "/dev/null"), "missing: tls_key, tls_ca"),
        (("config", "show", "--listen", "x"), "flag --listen"),
    ],
)
def test_misuse_ends_with_2_and_two_lines(
    run_mx: Mx, arguments: tuple[str, ...], says: str
) -> None:
    result = run_mx(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    as_json = run_mx(*arguments, "--json")
    assert as_json.returncode == 2
    error = the_object(as_json.stdout)["error"]
    assert says in error["message"]
    assert error["exit_code"] == 2
    assert error["type"] in ("UsageError", "ConfigError")


def test_a_bare_command_shows_its_help(run_mx: Mx) -> None:
    result = run_mx()
    assert result.returncode == 2
    assert "Usage: mx" in result.stdout
    assert result.stderr == ""


def test_config_show_says_what_a_default_of_0_means(run_mx: Mx) -> None:
    shown = " ".join(run_mx("config", "show").stdout.split())
    assert "bytes per second. (default: no limit)" in shown
    assert "(default: 127.0.0.1:7600)" not in shown


def test_config_show_says_where_values_come_from(run_mx: Mx, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("lease_s = 3\nstreams = 4\n")
    arguments = ("config", "show", "--config", str(file), "--coordinator", "c:1")
    shown = the_object(run_mx(*arguments, "--json", MX_PEER_STREAMS="6").stdout)
    assert shown["coordinator"] == {"value": "c:1", "origin": "flag --coordinator"}
    assert shown["streams"] == {"value": 6, "origin": "environment MX_PEER_STREAMS"}
    assert shown["lease_s"] == {"value": 3.0, "origin": f"{file}, line 1"}
    assert shown["listen"]["origin"] == "default"
    assert shown["config_file"] == {"path": str(file), "read": True}
    table = run_mx(*arguments, MX_PEER_STREAMS="6").stdout
    assert "environment MX_PEER_STREAMS" in table and "It was read." in table
    # A default that is shown as the value is not said again; what an empty value means is.
    assert "(default: any" in table
    about = config.descriptions()["connect_timeout_s"]
    assert show._meaning(about, shows_default=True) == about.help
    assert show._meaning(about, shows_default=False) == f"{about.help} (default: 3)"
    home: Any = {"XDG_CONFIG_HOME": str(tmp_path), "MX_PEER_CONFIG": ""}
    default = {"path": str(tmp_path / "mx" / "config.toml"), "read": False}
    assert the_object(run_mx("config", "show", "--json", **home).stdout)["config_file"] == default
    assert "There is none." in run_mx("config", "show", **home).stdout


def in_terminal(code: str, *arguments: str, **more: str) -> list[str]:
    """Run a program in a terminal of 80 columns, and return the lines that it writes."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=kept | {"TERM": "xterm", "LANG": "C.UTF-8"} | more,
    ):
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the end, as Linux says it
            while data := os.read(ours, 1 << 16):
                text += data
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode()).splitlines()


@pytest.mark.parametrize("verb", ["config show", "doctor --only keys"])
def test_tables_are_as_wide_as_a_terminal_and_nothing_is_cut(verb: str, tmp_path: Path) -> None:
    file, key = tmp_path / f"{'settings-' * 9}.toml", tmp_path / ("long-name-" * 12)
    file.write_text(f'name_key = "{key}"\n')
    code = "from mx.cli import main; main()"
    lines = in_terminal(code, *verb.split(), "--config", str(file))
    assert lines and max(map(len, lines)) <= 80, lines
    shown = "".join("".join(lines).split())
    assert "…" not in shown and (str(key) in shown or verb == "config show"), lines


def test_a_result_is_broken_at_spaces_in_a_terminal() -> None:
    code = "from mx.cli import outcome; import sys; outcome.write(sys.argv[1])"
    pin = "m@" + "0123456789abcdef" * 8
    said = "m: 16.1 GB in 12.3 s (1.31 GB/s), 33 layers, the first after 30 ms, verified by digest"
    lines = in_terminal(code, f"{said}\n  tcp from a\n  pin {pin}")
    first, rest = said.removesuffix(" digest"), "    digest"
    assert lines == [first, rest, "  tcp from a", "  pin", f"    {pin}"]


def test_an_unexpected_error_is_one_line_and_asks_for_a_report(tmp_path: Path) -> None:
    code = (
        "import mx.cli.show\n"
        "def broken(context): raise RuntimeError('boom')\n"
        "mx.cli.show.options.settings_of = broken\n"
        "import mx.cli\n"
        "mx.cli.main()\n"
    )

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, "config", "show", *flags],
            capture_output=True,
            text=True,
            timeout=30,
            env=environment(),
            check=False,
        )

    plain = run()
    assert plain.returncode == 1
    assert plain.stderr.splitlines()[0] == "error: RuntimeError: boom"
    assert "please report" in plain.stderr
    assert "Traceback" not in plain.stderr
    assert "Traceback" in run("--debug").stderr
    assert the_object(run("--json").stdout)["error"]["type"] == "RuntimeError"


@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [("bash", "mx pu", "pull"), ("zsh", "mx pull --transp", "--transport")],
)
def test_shell_completion(shell: str, words: str, expected: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mx"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env=environment(
            _MX_COMPLETE=f"complete_{shell}",
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split()) - 1),
            _TYPER_COMPLETE_ARGS=words,
        ),
    )
    assert expected in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        "import mx",
        "import mx.cli.app",
        "import mx.cli.coordinator",
        "import mx.api.pulling, mx.api.serving",
    ],
)
def test_commands_do_not_import_torch(command: str) -> None:
    heavy = ("torch", "transformers", "safetensors")
    code = f"{command}; import sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[]\n"


def test_quiet_logs_errors_only() -> None:
    code = (
        "import logging\n"
        "from types import SimpleNamespace\n"
        "from mx.cli import options\n"
        "options.settings_of(SimpleNamespace(params={'quiet': True}), level='info')\n"
        "logging.getLogger('mx').warning('a warning')\n"
        "logging.getLogger('mx').error('an error')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert "an error" in done.stderr and "a warning" not in done.stderr


def test_import_mx_is_free_and_its_names_are_found() -> None:
    code = (
        "import sys, mx\n"
        "assert 'grpc' not in sys.modules\n"
        "assert {*mx.__all__, *mx._MODULES, 'Observer'} <= set(dir(mx))\n"
        "for name in dir(mx): getattr(mx, name)\n"
        "try: mx.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert "no attribute 'nothing'" in done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_the_coordinator_starts_answers_and_stops(number: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "mx.cli.coordinator", "--listen", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert said["listen"].startswith("127.0.0.1:")
            process.send_signal(number)
            assert process.wait(20) == code
        finally:
            process.kill()


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    # A FIFO keeps the command busy opening its configuration until it is interrupted.
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    with subprocess.Popen(
        [sys.executable, "-m", "mx", "config", "show", "--config", str(fifo), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            # Opening for writing succeeds once the command has opened it for reading.
            writer = os.open(fifo, os.O_WRONLY)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
            os.close(writer)
        finally:
            process.kill()
    assert process.returncode == 130
    assert err == "error: interrupted\n"
    assert the_object(out)["error"]["exit_code"] == 130


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 10, 20, 40, 80, 120])
def test_ctrl_c_while_it_is_imported_is_130(nth: int) -> None:
    code = f"""
import os, signal, sys
counted = None

def interrupt(event, arguments):
    global counted
    if event != "import" or arguments[0] in ("mx", "__future__"):
        return
    if counted is not None:
        counted += 1
        if counted == {nth}:
            os.kill(os.getpid(), signal.SIGINT)
    elif arguments[0] == "mx.cli":
        counted = 0

sys.addaudithook(interrupt)
from mx.cli import main
main(["models", "--coordinator", "127.0.0.1:1"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environment(),
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr in ("", "error: interrupted\n")


def test_ctrl_c_while_a_class_is_made_in_an_import_is_130() -> None:
    code = """
import sys
from mx import cli

class Interrupted:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt

class Finder:
    def find_spec(self, name, *_):
        if name == "mx.cli.app":
            type("Made", (), {"field": Interrupted()})

sys.meta_path.insert(0, Finder())
cli.main(["--version"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_in_a_destructor_is_not_lost() -> None:
    code = """
import os, signal, threading
from mx.cli import _Interruptible

class Left:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        list(range(1000))

with _Interruptible():
    left = Left()
    del left
    threading.Event().wait(60)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=60, check=False)
    assert done.returncode == 130


def test_a_signal_stops_what_does_not_wait_for_it_yet() -> None:
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with stop.on_signals():
            if number == signal.SIGINT:
                os.kill(os.getpid(), number)
                stop.wait()
            else:
                with pytest.raises(SystemExit):  # the second one ends it at once
                    os.kill(os.getpid(), number)
                    signal.pause()


@pytest.mark.parametrize("package", ["grpc", "typer", "numpy"])
def test_a_package_that_is_not_installed_is_named(package: str, tmp_path: Path) -> None:
    absent = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    (tmp_path / f"{package}.py").write_text(absent)
    code = f"import mx.cli, sys; sys.path.insert(0, {str(tmp_path)!r}); mx.cli.main()"
    command = [sys.executable, "-c", code, "artifacts", "list", "m", "--json"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    error = the_object(done.stdout)["error"]
    assert error["exit_code"] == 2 and error["message"].startswith(package) and error["hint"]
    assert "Traceback" not in done.stderr


def test_no_coordinator_is_started_for_a_checkpoint_that_is_not_there(
    run_mx: Mx, tmp_path: Path
) -> None:
    for path in (tmp_path / "none", tmp_path):
        result = run_mx("serve", str(path))
        assert result.returncode == 2 and "coordinator." not in result.stderr


def test_an_error_is_short_in_a_notebook() -> None:
    with pytest.raises(mx.errors.ConfigError) as caught:
        mx.pull("m", transport="rdma")
    lines = caught.value._render_traceback_()
    assert "mx.pull" in lines[0] and f"line {caught.tb.tb_lineno}, in " in lines[0]
    assert lines[1].startswith("ConfigError: ") and "ucx" in lines[2] and len(lines) == 3
