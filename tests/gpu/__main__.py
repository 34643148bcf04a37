"""Runs every test that needs a GPU, with pytest alone: python -m tests.gpu [pytest's options].

From a plain checkout: PYTHONPATH=.:transports python -m tests.gpu
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Contract tests, which use the real GPU where there is one.
CONTRACTS = ("test_cuda_ipc.py", "test_pcie_p2p.py")


def main(arguments: list[str]) -> int:
    import pytest

    # The project's own settings name plugins that may not be installed.
    settings = ["-c", str(HERE / "pytest.ini"), f"--confcutdir={HERE}", "-p", "no:cacheprovider"]
    where = [str(HERE), *(str(HERE.parent / "contract" / name) for name in CONTRACTS)]
    return int(pytest.main([*settings, *where, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
