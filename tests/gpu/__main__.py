"""Runs every test that needs a GPU: python -m tests.gpu [options] [pytest's options].

From a plain checkout: PYTHONPATH=.:transports python -m tests.gpu. pytest is all that it needs
besides mx itself and cuda-bindings.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    """Run the tests on the GPUs of this machine, or over the stand-in driver.

    Args:
        arguments: The command's own options, and pytest's.

    Returns:
        The exit code, pytest's.
    """
    parser = argparse.ArgumentParser("python -m tests.gpu", allow_abbrev=False)
    parser.add_argument(
        "--standin",
        type=int,
        choices=(12, 13),
        metavar="MAJOR",
        help="run over the stand-in driver with cuda-bindings of CUDA 12 or 13; no GPU is needed",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the stand-in, see tests/support/driver/standin.h",
    )
    own, pytests = parser.parse_known_args(arguments)
    if own.standin:
        return _over_the_standin(own.standin, dict(each.split("=", 1) for each in own.set), pytests)
    import pytest

    # The project's own settings name plugins that may not be installed.
    settings = ["-c", str(HERE / "pytest.ini"), f"--confcutdir={HERE}"]
    settings += ["-p", "no:cacheprovider", "-p", "no:asyncio"]
    files = [] if any((HERE / each.split("::")[0]).exists() for each in pytests) else [str(HERE)]
    pytests = [
        str(HERE / each) if (HERE / each.split("::")[0]).exists() else each for each in pytests
    ]
    return int(pytest.main([*settings, *files, *pytests]))


def _over_the_standin(major: int, settings: dict[str, str], pytests: list[str]) -> int:
    """Run the tests in a process that finds the stand-in in place of the driver."""
    from tests.support.driver.build import environment, why_not

    if reason := why_not(major):
        print(f"the stand-in driver can't be used: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mx-standin-log-") as log:
        found = environment(major, {"KERNELS": True, "LOG": log, **settings})
        command = [sys.executable, "-m", "tests.gpu", *pytests]
        return subprocess.run(command, env=found, cwd=os.getcwd(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
