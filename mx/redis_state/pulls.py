"""What the coordinators of one Redis tell each other of the pulls that report to them.

A stream, apart from the state: each coordinator adds one entry in each period, with the latest
report of each of its pulls that has reported meanwhile, and reads those of the others, in one round
trip. The stream is cut to a number of entries, each of them to a number of bytes, and ends with the
last pull. What is missed of it the next reports repeat, so nothing depends on it, and it never
waits for the state nor lets that wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from mx.codec import rate_from_wire
from mx.core.progress_board import EXPIRE_S, ProgressBoard, SharedPull
from mx.errors import MxError
from mx.log import Throttle, event
from mx.redis_state.link import RedisLink
from mx.tasks import unexpected
from mx.wire.progress import pull_from_wire, pull_to_wire
from mx.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)

PERIOD_S = 0.5
#: The most entries of the stream, and the bytes at which one ends: a thousand pulls or so. Those
#: that do not fit go with the next ones.
MAX_ENTRIES = 32
ENTRY_BYTES = 256 << 10
_MAX_PRINCIPAL_CHARS = 4096
#: Pulls that are told or heard before other work of the event loop has its turn.
_SLICE = 64

#: Add an entry, if there is something to tell, and return the entries of others after one, with
#: their ages. Where the clock has gone back, numbers begin anew.
_EXCHANGE = """
local key, who, since, about, pulls = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most, expire_ms = ARGV[5], tonumber(ARGV[6])
local function ms(id) return tonumber(string.match(id, '^%d+')) end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', '1')[1]
local found = {}
if last then
  if ms(last[1]) < ms(since) then since = '0-0' end
  local read = redis.call('XREAD', 'STREAMS', key, since)
  for _, entry in ipairs(read and read[1][2] or {}) do
    local age_ms, fields = now_ms - ms(entry[1]), entry[2]
    if fields[2] ~= who and age_ms < expire_ms then
      found[#found + 1] = {age_ms, fields[2], fields[4], fields[6]}
    end
  end
  since = last[1]
end
if about ~= '' then
  redis.pcall('XADD', key, 'MAXLEN', most, '*', 'who', who, 'about', about, 'pulls', pulls)
  redis.pcall('PEXPIRE', key, expire_ms)
end
return {since, found}
"""


class SharedPulls:
    """The pulls of all coordinators of one Redis, on the board of one of them."""

    def __init__(self, link: RedisLink, clock: Callable[[], float], board: ProgressBoard) -> None:
        """
        Args:
            link: Of the state.
            clock: The board's.
            board: What is told, and where what is heard goes.
        """
        self._link, self._clock = link, clock
        self._who = uuid.uuid4().hex
        self._board = board
        self._script = link.client.register_script(_EXCHANGE)
        self._since = "0-0"
        self._troubles = Throttle()
        board.share()

    async def run(self) -> None:
        """Send and receive changes until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self._exchange()
            except MxError:
                pass  # Redis does not answer: the store says so
            except Exception as error:  # noqa: BLE001 - it goes on whatever happens
                self._say(str(unexpected(error)))

    async def _exchange(self) -> None:
        about, told = await self._untold()
        pulls = told.SerializeToString()
        try:
            async with self._link.answering():
                since, entries = await self._script(
                    keys=[self._link.key("pulls")],
                    args=[self._who, self._since, about, pulls, MAX_ENTRIES, int(EXPIRE_S * 1000)],
                )
        except MxError:
            self._board.not_told(pull.pull_id for pull in told.pulls)
            raise
        self._since = since.decode()
        for age_ms, who, about, pulls in entries:
            await self._hear(who.decode(), max(0, age_ms) / 1000, about, pulls)

    async def _untold(self) -> tuple[str, pb.Pulls]:
        """Return the parts of an entry: what is to be known of each pull, and the pulls."""
        about: list[tuple[str, int, float, float]] = []
        message, nbytes = pb.Pulls(), 0
        while nbytes < ENTRY_BYTES and (row := self._board.next_untold(self._clock())):
            pull = pull_to_wire(row.status)
            nbytes += pull.ByteSize() + len(row.principal) + _SLICE
            message.pulls.append(pull)
            about.append((row.principal, row.claim, round(row.age_s, 3), round(row.left_s, 3)))
            if len(about) % _SLICE == 0:
                await asyncio.sleep(0)
        said = json.dumps(about, separators=(",", ":")) if about else ""
        return said, message

    async def _hear(self, who: str, age_s: float, about: bytes, pulls: bytes) -> None:
        """Take an entry of another coordinator. A bad pull of it spoils no other."""
        try:
            if max(len(about), len(pulls)) > 2 * ENTRY_BYTES:
                raise ValueError(f"{len(pulls)} bytes")
            message, rows = pb.Pulls.FromString(pulls), json.loads(about)
            pairs = list(zip(message.pulls, rows, strict=True))
        except (ValueError, TypeError, RecursionError, DecodeError) as error:
            self._say(f"an entry: {str(error)[:200]}")
            return
        for number, (pull, row) in enumerate(pairs, 1):
            try:
                said = _said(pull, row, age_s)
            except (MxError, ValueError, TypeError) as error:
                self._say(f"a pull: {str(error)[:200]}")
            else:
                self._board.hear(self._clock(), who, said)
            if number % _SLICE == 0:
                await asyncio.sleep(0)

    def _say(self, text: str) -> None:
        held_back = self._troubles.passes("pulls")
        if held_back is not None:
            text = f"pulls of other coordinators cannot be shown: {text}"
            event(log, "state.pulls", level=logging.WARNING, text=text, held_back=held_back)


def _said(pull: pb.PullProgress, row: Sequence[Any], age_s: float) -> SharedPull:
    """Return what an entry of this age says of a pull. Raises an exception if it is not valid."""
    principal, claim, reported_s, left_s = row
    if not isinstance(principal, str) or len(principal) > _MAX_PRINCIPAL_CHARS:
        raise ValueError("its principal is not one")
    if not isinstance(claim, int):
        raise ValueError("its claim is not a number")
    reported_s, left_s = rate_from_wire(reported_s, "age"), rate_from_wire(left_s, "time left")
    return SharedPull(pull_from_wire(pull), principal, claim, reported_s + age_s, left_s - age_s)
