"""A pull in a notebook: a bar while it is waited for, and the pull as HTML, in a real kernel."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mx import api
from tests.support.commands import environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


#: Runs a cell in a kernel, both in processes of their own, and prints what it shows.
CELL = """
import json, sys
from jupyter_client.manager import KernelManager
manager = KernelManager(transport="ipc")
manager.start_kernel()
client = manager.client()
client.start_channels()
shown = []
try:
    client.wait_for_ready(timeout=60)
    client.execute_interactive(
        sys.stdin.read(),
        timeout=60,
        output_hook=lambda message: shown.append((message["msg_type"], message["content"])),
    )
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
print(json.dumps(shown, default=str))
"""


def run_cell(folder: Path, code: str) -> list[tuple[str, dict[str, Any]]]:
    """Run a cell. Returns the kind and the contents of each message that it shows."""
    if importlib.util.find_spec("ipykernel") is None:
        pytest.skip("ipykernel is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CELL],
        input=code,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=folder,
        env=environment(IPYTHONDIR=str(folder), JUPYTER_RUNTIME_DIR=str(folder)),
    )
    shown: list[tuple[str, dict[str, Any]]] = json.loads(done.stdout)
    return shown


def test_a_kernel_shows_one_bar_that_grows(served: str, tmp_path: Path) -> None:
    shown = run_cell(
        tmp_path,
        f"import mx\npull = mx.pull('slow', coordinator={served!r}, attach=False)\n"
        "try: pull.wait(3)\nexcept TimeoutError: pull",
    )
    assert [each for each in shown if each[0] in ("error", "stream")] == []
    bars = [each for kind, each in shown if kind in ("display_data", "update_display_data")]
    assert len({each["transient"]["display_id"] for each in bars}) == 1
    texts = [each["data"]["text/html"] for each in bars]
    done = [int(re.findall(r'value="(\d+)"', text)[0]) for text in texts]
    assert len(done) > 2
    assert done == sorted(done) and done[0] < done[-1]


def test_a_kernel_shows_a_pull_that_is_a_cells_value(served: str, tmp_path: Path) -> None:
    shown = run_cell(
        tmp_path,
        f"import mx\npull = mx.pull('m', coordinator={served!r}, attach=False)\n"
        "report = pull.wait()\npull",
    )
    assert [each for each in shown if each[0] in ("error", "stream")] == []
    (result,) = [each["data"] for kind, each in shown if kind == "execute_result"]
    most, done = re.findall(r'(?:max|value)="(\d+)"', result["text/html"])
    assert most == done
    assert "<Pull m" in result["text/plain"]
    last = [each for kind, each in shown if kind == "update_display_data"][-1]
    assert last["data"]["text/html"] == result["text/html"]


def test_a_kernel_interrupts_a_wait_and_its_limit_holds(served: str, tmp_path: Path) -> None:
    shown = run_cell(
        tmp_path,
        f"import mx, os, signal, threading\npull = mx.pull('slow', coordinator={served!r}, "
        "attach=False)\ntry: pull.wait(0.1)\nexcept TimeoutError as error: print(error)\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try: pull.wait()\nexcept KeyboardInterrupt: print('interrupted')\npull.close()",
    )
    said = "".join(each["text"] for kind, each in shown if kind == "stream")
    assert said == "the pull is still running\ninterrupted\n"


def test_a_pull_as_html_is_text_where_others_wrote_it(served: str) -> None:
    with api.pull("m", coordinator=served) as pull:
        pull.wait()
        assert f"<code>{html.escape(str(pull.model))}</code>" in pull._repr_html_()
    with pytest.raises(api.MxError), api.pull("<b>x</b>", coordinator=served) as unknown:
        try:
            unknown.wait()
        finally:
            shown = unknown._repr_html_()
    assert "<b>" not in shown and "&lt;b&gt;" in shown
