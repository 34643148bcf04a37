"""The meeting of ranks on one host while another user connects to the same name.

The other user is a real one: a process of `nobody`, which only root can start.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mx.core.local_ranks import MOST_RANKS, LocalRanks
from mx.fetching import ranks as meeting
from mx.fetching.exchange import Exchange
from mx.fetching.ranks import meet
from tests.support.local_exchange import TIMEOUT_S, all_of, content_of
from tests.support.transfer_machine import grid_of

NOBODY = 65534

#: Connects and says nothing, again and again, and stays until its input ends.
IDLE = f"""
import os, select, socket, sys
os.chdir("/")
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
address, wanted, made = "\\0" + sys.argv[1], int(sys.argv[2]), []
while not select.select([sys.stdin], [], [], 0.001)[0]:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    if one.connect_ex(address):
        one.close()
        continue
    made.append(one)
    if len(made) == wanted:
        print("there", flush=True)
    if len(made) > 2 * wanted:
        made.pop(0).close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user at hand")
def test_the_idle_connections_of_another_user_keep_no_rank_from_meeting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = [LocalRanks(rank, 3, str(os.getpid()), wait_s=TIMEOUT_S / 2) for rank in range(3)]
    grid, content = grid_of([4]), content_of("strangers")
    address = meeting._address(ranks[0], content)
    with (
        ThreadPoolExecutor(3) as pool,
        subprocess.Popen(
            [sys.executable, "-I", "-c", IDLE, address.removeprefix("\0"), str(MOST_RANKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other,
        caplog.at_level(logging.DEBUG, "mx"),
    ):
        assert other.stdin is not None and other.stdout is not None
        try:
            found = [pool.submit(meet, ranks[0], content, grid, all_of(grid), lambda: False)]
            assert other.stdout.readline() == "there\n"
            found += [
                pool.submit(meet, each, content, grid, all_of(grid), lambda: False)
                for each in ranks[1:]
            ]
            met: list[Exchange | None] = [each.result(2 * TIMEOUT_S) for each in found]
        finally:
            other.stdin.close()
            other.wait(TIMEOUT_S)
    fellows = [each and len(each._fellows) for each in met]
    for each in met:
        if each is not None:
            each.close()
    assert fellows == [2, 2, 2]
    assert caplog.records == []
