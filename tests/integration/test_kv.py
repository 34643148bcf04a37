"""KV blocks between real processes: bit-equal, for holders of the name's key alone, and never
another block than the one that was asked for, whatever dies, is evicted, or lies in memory."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mx.errors import ClosedError, ConfigError, LocalError
from mx.kv import KvPool, KvReader, proof
from mx.kv import reader as kv_reader
from mx.namekey import LenderKey
from tests.integration.scripts import ran
from tests.support.certificates import Authority
from tests.support.commands import Run, start_coordinator
from tests.support.kv_blocks import (
    FORM,
    HEADS,
    NAME,
    SLOTS,
    KvChild,
    Listing,
    Taking,
    fetched,
    key_file,
    kv_child,
    memory,
    names,
    other_form,
    same,
    settings,
    tensors,
    until,
)
from tests.support.policy_site import MEMBERS, authority

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

__all__ = ["authority"]  # a fixture

ALL = 20


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


@pytest.fixture
def child(commands_are_forked: None) -> Iterator[KvChild]:
    with kv_child() as process:
        yield process


@pytest.fixture
def listed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reader, "LIST_S", 0.2)


def lists(child: KvChild, key: Path, more: str = "") -> str:
    """Have the process list blocks as `own`; return its endpoint."""
    found = child.ask(f"(own := Listing({str(key)!r}, {more})).endpoint")
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("transport", ["tcp", "shm", None])
def test_blocks_are_those_of_the_maker(child: KvChild, key: Path, transport: str | None) -> None:
    endpoint, slots = lists(child, key), child.ask("own.slots")
    with Taking(key, endpoint, transport=transport) as own:
        assert own.finds(ALL)
        assert own.why() == (transport or "shm")
        assert own.fetch(ALL) == []
        assert own.has(tensors(1), slots)
        # Slots that were not read into are as they were.
        rest = [(slot, slot) for slot in range(ALL, SLOTS)]
        assert same(own.cache, tensors(0), rest)
        assert own.reader.found(own.names) == ALL  # and no more than there are
        missing = fetched(own.reader, [(own.names[ALL], 30), (own.names[0], 31)])
        assert missing.failed == {own.names[ALL]}
        assert same(own.cache, tensors(1), [(31, slots[0])])
        assert child.ask("own.pool.counts()['readers']") == 1
    assert child.ask("until(lambda: not own.pool.counts()['readers'])")
    assert child.ask("[own.pool.close(), own.pool.close()]") == [None, None]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_layers_come_one_after_the_other(child: KvChild, key: Path, transport: str) -> None:
    with Taking(key, lists(child, key), transport=transport) as own:
        assert own.finds(ALL)
        fetch = own.reader.fetch(own.wanted(ALL))
        for layer, theirs in enumerate(tensors(1)):
            assert fetch.wait_layer(layer, 60)
            for slot, there in enumerate(child.ask("own.slots")):
                assert (own.cache[layer][:, slot] == theirs[:, there]).all()
        assert fetch.is_done
        assert not fetch.failed


def test_ranks_with_half_the_heads_make_one_block(key: Path) -> None:
    half = HEADS // 2
    with kv_child() as one, kv_child() as two, Taking(key) as own:
        ends = [
            lists(one, key, f"heads={half}"),
            lists(two, key, f"heads={half}, first={half}, count=15"),
        ]
        own.reader.add(ends[0])
        until(lambda: own.reader.peers().get(ends[0]) == "shm")
        assert own.reader.wait_for(own.names[:1], 0.1) == 0  # half a block is none
        assert own.fetch(1) == own.names[:1]
        own.reader.add(ends[1])
        assert own.finds(15)
        assert own.reader.found(own.names) == 15
        assert own.fetch(15) == []
        both = one.ask("own.slots"), two.ask("own.slots")
        for layer, theirs in enumerate(tensors(1)):
            for slot, (a, b) in enumerate(zip(*both, strict=False)):
                assert (own.cache[layer][:, slot, :half] == theirs[:, a, :half]).all()
                assert (own.cache[layer][:, slot, half:] == theirs[:, b, half:]).all()
        # And each rank reads what another one of its heads has.
        with Taking(key, *ends, heads=half, first=half) as rank:
            assert rank.finds(15)
            assert rank.fetch(15) == []
            assert rank.has(tensors(1, half, half), two.ask("own.slots")[:15])


def test_two_makers_share_the_load(key: Path) -> None:
    """Of one block that both have, either is right; what one withdraws the other still has."""
    with Listing(key, seed=1) as one, kv_child() as two, Taking(key, one.endpoint) as own:
        own.reader.add(lists(two, key, "seed=1"))
        until(lambda: list(own.reader.peers().values()) == ["shm", "shm"])
        assert own.finds(ALL)
        one.pool.withdraw(one.names)
        until(lambda: one.pool.counts()["free"] == SLOTS)
        assert own.fetch(ALL) == []
        assert own.has(tensors(1), two.ask("own.slots"))


def test_sources_of_the_model_are_asked_for_their_blocks(
    run: Run, child: KvChild, key: Path, listed_often: None
) -> None:
    coordinator, _ = start_coordinator(run)
    endpoint = child.ask(
        f"[own := Listing({str(key)!r}), "
        "mx := __import__('mx'), "
        "source := mx.serve({'w': np.ones(64, np.float32)}, model=NAME, embed=False, "
        f"coordinator={coordinator!r}, settings=settings({str(key)!r})), "
        "source.endpoint][-1]"
    )
    assert endpoint != child.ask("own.endpoint")
    with Taking(key, coordinator=coordinator) as own:
        assert own.finds(ALL)
        assert list(own.reader.peers()) == [endpoint]
        assert own.fetch(ALL) == []
        child.ask("source.close()")
        until(lambda: not own.reader.peers())  # it is not listed any more
        assert own.fetch(ALL) == sorted(own.names[:ALL])


def test_a_pool_that_was_named_stays_when_it_is_listed_no_more(
    run: Run, child: KvChild, key: Path, listed_often: None
) -> None:
    coordinator, _ = start_coordinator(run)
    child.ask(f"[own := Listing({str(key)!r}), mx := __import__('mx'), None][-1]")
    endpoint = child.ask(
        "[source := mx.serve({'w': np.ones(64, np.float32)}, model=NAME, embed=False, "
        f"coordinator={coordinator!r}, settings=settings({str(key)!r})), source.endpoint][-1]"
    )
    with Taking(key, endpoint, coordinator=coordinator) as own:
        assert own.finds(ALL)
        time.sleep(5 * kv_reader.LIST_S)
        child.ask("source.close()")
        until(lambda: "shm" not in own.why())
        time.sleep(5 * kv_reader.LIST_S)
        assert list(own.reader.peers()) == [endpoint]


# -- keys ------------------------------------------------------------------------------------------


def test_another_key_is_refused_at_both_ends(
    child: KvChild, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, other = lists(child, key), key_file(tmp_path, "name.other.key")
    with Taking(other, endpoint) as own:
        own.refused("holders of its name key alone")  # the reader finds that the pool has another
        assert own.reader.found(own.names) == 0
        assert child.ask("own.pool.counts()['readers']") == 0
    # The pool finds it, too, where a reader does not look.
    monkeypatch.setattr(proof, "check", lambda *_: None)
    with Taking(other, endpoint) as own:
        own.refused("holders of its name key alone")
        assert child.ask("own.pool.counts()['readers']") == 0


def lender(key: Path, name: str, *kinds: str, expires_s: float = 3600, of: str = NAME) -> Path:
    from mx import keyfile, namekey

    owner = namekey.load(settings(key))
    path = key.parent / f"lender.{name}.key"
    keyfile.make(path, LenderKey.issue(owner, [of], kinds, int(time.time() + expires_s)))
    return path


def test_lender_keys_for_kv(child: KvChild, key: Path) -> None:
    for_kv, states = lender(key, "kv", "kv", "states"), lender(key, "states", "states")
    endpoint = lists(child, for_kv)
    with Taking(key, endpoint) as owner, Taking(for_kv, endpoint) as own:
        for each in (owner, own):
            assert each.finds(ALL)
            assert each.fetch(ALL) == []
            assert each.has(tensors(1), child.ask("own.slots"))
    for wrong in (states, lender(key, "other", "kv", of="other")):
        with pytest.raises(ConfigError, match="lender key"):
            KvReader.open(NAME, FORM, memory(tensors()), settings=settings(wrong))
        with pytest.raises(ConfigError, match="lender key"):
            KvPool.open(NAME, FORM, memory(tensors()), settings=settings(wrong))


def test_lender_keys_that_are_not_for_kv_or_too_old(child: KvChild, key: Path) -> None:
    """Their holders know the secret of the names, from a key that they had before."""
    endpoint = lists(child, key)
    expired = lender(key, "expired", "kv", expires_s=-1)
    with Taking(expired, endpoint) as own:
        own.refused("has expired")
        assert child.ask("own.pool.counts()['readers']") == 0
    child.ask("own.pool.close()")
    with Taking(key, lists(child, expired)) as own:
        own.refused("has expired")


@pytest.mark.parametrize("who", ["reader", "pool"])
def test_a_lender_key_ends_within_a_stream(child: KvChild, key: Path, who: str) -> None:
    short = lender(key, "short", "kv", expires_s=15)
    pool, reader = (key, short) if who == "reader" else (short, key)
    with Taking(reader, lists(child, pool)) as own:
        assert own.finds(ALL)
        assert own.fetch(ALL) == []
        own.refused("has expired")
        assert own.reader.found(own.names) == 0
        assert child.ask("until(lambda: not own.pool.counts()['readers'])")


def test_a_lender_key_of_another_is_refused(child: KvChild, key: Path) -> None:
    from mx import keyfile, namekey

    path = key.parent / "lender.bound.key"
    owner, until_s = namekey.load(settings(key)), int(time.time() + 3600)
    keyfile.make(path, LenderKey.issue(owner, [NAME], ["kv"], until_s, principal="node-7"))
    with Taking(path, lists(child, key)) as own:
        own.refused("is for node-7")


# -- another block is a miss -----------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"version": "2"}, {"layout": "b,2,h,t,d"}, {"dtype": "f16"}])
def test_another_form_is_refused(child: KvChild, key: Path, change: dict[str, str]) -> None:
    (value,) = change.values()
    with Taking(key, lists(child, key), form=other_form(**change)) as own:
        own.refused("another form", value)
        assert own.fetch(ALL) == sorted(own.names[:ALL])


def test_another_salt_or_other_weights_are_a_miss(child: KvChild, key: Path) -> None:
    with Taking(key, lists(child, key, "shared_with=['salt']")) as own:
        given = settings(key)
        assert own.reader.wait_for(names(given, ALL, "salt"), 60) == ALL
        for other in (names(given, ALL), names(given, ALL, "other"), names(given, ALL, first=1)):
            assert own.reader.found(other) == 0
            assert fetched(own.reader, [(other[0], 0)]).failed == {other[0]}
        assert same(own.cache, tensors(0), [(0, 0)])


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_flipped_bit_is_a_miss_and_its_block_goes(
    child: KvChild, key: Path, transport: str
) -> None:
    with Taking(key, lists(child, key), transport=transport) as own:
        assert own.finds(ALL)
        child.ask("own.cache[2].view('u1')[1, own.slots[7]].reshape(-1).__setitem__(5, 77)")
        assert own.fetch(ALL) == [own.names[7]]
        assert own.wrong == 1
        assert child.ask("until(lambda: own.pool.wrong)") == 1
        until(lambda: own.reader.found(own.names) == 7)
        assert own.reader.found(own.names[8:ALL]) == ALL - 8
        # It is the block's fault: the others are still read, and the slot may be written again.
        rest = [(each, slot) for slot, each in enumerate(own.names[8:ALL])]
        assert not fetched(own.reader, rest).failed
        counts = {"listed": ALL - 1, "free": SLOTS - ALL + 1, "leaving": 0, "readers": 1}
        until(lambda: child.ask("own.pool.counts()") == counts)


def test_a_pool_that_gives_wrong_blocks_is_left(child: KvChild, key: Path) -> None:
    with Taking(key, lists(child, key)) as own:
        assert own.finds(ALL)
        child.ask("[each.fill(0) for each in own.cache]")
        assert own.fetch(ALL) == sorted(own.names[:ALL])
        own.refused("wrong blocks")
        assert own.reader.found(own.names) == 0
        assert own.wrong == ALL
        assert child.ask(f"until(lambda: own.pool.wrong == {ALL})")  # it was told of all


# -- deaths ----------------------------------------------------------------------------------------

SLOW: dict[str, Any] = {"max_bandwidth": "1MB/s"}
STALL: dict[str, Any] = {"stall_timeout_s": 2.0}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_maker_that_dies_or_stops_fails_what_is_read(
    child: KvChild, key: Path, number: int
) -> None:
    endpoint = lists(child, key, f"**{SLOW}")
    with Taking(key, endpoint, transport="tcp", **STALL) as own:
        assert own.finds(ALL)
        fetch = own.reader.fetch(own.wanted(ALL))
        own.reader.fetch(own.wanted(ALL))
        child.stop()
        more = own.reader.fetch(own.wanted(ALL))
        child.send_signal(number)
        assert fetch.wait(60)
        assert more.wait(60)
        assert more.failed
        assert more.errors
        right = [at for at in range(ALL) if own.names[at] not in fetch.failed]
        assert same(own.cache, tensors(1), [(at, at) for at in right])  # it took the first slots
        until(lambda: own.reader.found(own.names) == 0)
        assert "tcp" not in own.why()
        assert own.wrong == 0


def test_a_maker_that_starts_again_is_found_again(key: Path) -> None:
    with kv_child() as first:
        endpoint = lists(first, key)
        with Taking(key, endpoint) as own:
            assert own.finds(ALL)
            first.send_signal(signal.SIGKILL)
            first.wait()
            until(lambda: own.reader.found(own.names) == 0)
            assert own.fetch(1) == own.names[:1]
            given = settings(key)
            with KvPool.open(
                NAME, FORM, memory(cache := tensors(3)), listen=endpoint, settings=given
            ) as pool:
                (slot,) = pool.take(1)
                pool.publish(own.names[0], slot)
                assert own.finds(1)
                assert own.fetch(1) == []
                assert same(own.cache, cache, [(0, slot)])


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_stopped_reader_keeps_no_slot_for_ever(child: KvChild, key: Path, transport: str) -> None:
    with Listing(key) as own:
        child.ask(
            f"[took := Taking({str(key)!r}, {own.endpoint!r}, transport={transport!r}), "
            f"took.finds({ALL}), None][-1]"
        )
        child.stop()
        own.pool.withdraw(own.names[:5])
        assert own.pool.counts()["leaving"] == 5
        until(lambda: not own.pool.counts()["leaving"])
        assert own.pool.counts()["free"] == SLOTS - ALL + 5
        (slot,) = own.pool.take(1)
        for each in own.cache:
            each[:, slot] = 0
        child.send_signal(signal.SIGCONT)
        # Where it reads before it knows, what is not there any more is a miss, and no lie.
        failed = child.ask("[each.hex() for each in fetched(took.reader, took.wanted(20)).failed]")
        assert own.names[slot].hex() in failed
        # It is back by itself, and knows what is there now.
        assert child.ask("until(lambda: not took.reader.found(took.names))") is True
        assert child.ask(f"until(lambda: took.reader.found(took.names[5:]) == {ALL - 5})") is True
        # Until it knows that its lease has ended, what it reads over that fails.
        assert child.ask("until(lambda: not took.fetch_one(took.names[9]))") is True
        assert child.ask("took.wrong") == 0


def test_a_reader_that_exits_or_dies_is_forgotten(key: Path) -> None:
    with Listing(key) as own:
        for ends in (KvChild.ends, lambda child: (child.send_signal(signal.SIGKILL), child.wait())):
            with kv_child() as child:
                child.ask(
                    f"[took := Taking({str(key)!r}, {own.endpoint!r}), took.finds({ALL}), "
                    f"took.reader.fetch(took.wanted({ALL})), None][-1]"
                )
                assert own.pool.counts()["readers"] == 1
                ends(child)
                until(lambda: not own.pool.counts()["readers"])
        own.pool.withdraw(own.names)
        assert own.pool.counts()["free"] == SLOTS


def test_a_process_exits_without_closing(child: KvChild, key: Path) -> None:
    endpoint = lists(child, key)
    child.ask(f"[took := Taking({str(key)!r}, {endpoint!r}), took.finds(3), None][-1]")
    with Taking(key, endpoint) as own:
        assert own.finds(ALL)
        assert child.ends() == 0
        until(lambda: own.reader.found(own.names) == 0)


def test_a_forked_child_uses_nothing_of_it(key: Path) -> None:
    code = f"""
import threading
from tests.support.kv_blocks import *
own = Listing({str(key)!r})
took = Taking({str(key)!r}, own.endpoint)
assert took.finds(20)
fetch = took.reader.fetch(took.wanted(20))
fetch.wait()
with own.pool._lock, took.reader._changed:  # as another thread may hold them
    pid = os.fork()
if not pid:
    signal.alarm(60)
    refused = [
        lambda: own.pool.publish(took.names[25], 25),
        lambda: took.reader.fetch([(took.names[0], 0)]),
        lambda: took.reader.add('127.0.0.1:1'),
        lambda: Listing({str(key)!r}),
        lambda: fetch.wait(),
    ]
    for number, call in enumerate(refused):
        try:
            call()
        except (ForkError, ClosedError) as error:
            pass
        else:
            raise AssertionError(number)
    own.pool.counts(), own.pool.take(1), took.reader.peers(), took.reader.wait_for(took.names, 0)
    own.pool.close()
    took.reader.close()
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(took.fetch(20), own.pool.counts()['readers'])
took.reader.close()
own.pool.close()
"""
    ended, out, err = ran(code, "none")
    assert (ended, out.split()) == (0, ["5", "[]", "1"]), err
    assert "Traceback" not in err


# -- eviction --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_eviction_under_load(key: Path, transport: str, child: KvChild) -> None:
    """A pool of few slots makes blocks all the time, of which readers fetch what they find: what is
    not said to have failed is right, and no slot is lost."""
    count, first = 6, random.Random(3)
    cache, given = tensors(slots=count), settings(key)
    prompts = names(given, 40)
    with KvPool.open(NAME, FORM, memory(cache), settings=given) as pool:
        child.ask(
            f"[took := Taking({str(key)!r}, {pool.endpoint!r}, transport={transport!r}), "
            "__import__('threading').Thread(target=took.loop, args=(40,), daemon=True).start(), "
            "None][-1]"
        )
        with Taking(key, pool.endpoint, transport=transport) as own:
            reading = threading.Thread(target=own.loop, args=(40,))
            reading.start()
            until_s, made = time.monotonic() + 15, 0
            while time.monotonic() < until_s:
                block = first.randrange(40)
                if pool.slot_of(prompts[block]) is not None:
                    continue
                for slot in pool.take(1, wait_s=20):
                    for layer, each in enumerate(cache):
                        each[:, slot] = 1000 * block + layer  # what it holds says what it is
                    pool.publish(prompts[block], slot)
                    made += 1
            own.ending = True
            reading.join(60)
            assert made > 50
            assert own.right > 0
            assert own.mistaken == 0
            assert own.wrong == 0
            assert child.ask("[setattr(took, 'ending', True), took.mistaken, took.wrong]") == [
                None,
                0,
                0,
            ]
            assert child.ask("until(lambda: took.right)")
            counts = until(lambda: pool.counts() if not pool.counts()["leaving"] else None)
            assert counts["listed"] + counts["free"] == count
            assert pool.wrong == 0
        child.ask("took.reader.close()")
        pool.withdraw(prompts)
        until(lambda: pool.counts()["free"] == count)
        assert sorted(pool.take(count)) == list(range(count))


def test_takers_at_once_get_what_can_be_withdrawn(key: Path) -> None:
    """A slot that leaves is counted by each who waits, and had by one."""
    with Listing(key, count=SLOTS) as own, Taking(key, own.endpoint) as took:
        assert took.finds(SLOTS)
        found: list[list[int]] = []
        takers = [
            threading.Thread(target=lambda: found.append(own.pool.take(4, wait_s=60)))
            for _ in range(4)
        ]
        for each in takers:
            each.start()
        for each in takers:
            each.join()
        assert [len(each) for each in found] == [4] * 4
        assert len({slot for each in found for slot in each}) == 16


def test_take_without_time_and_with_too_many(key: Path) -> None:
    with Listing(key, count=10) as own:
        assert own.pool.take(0) == []
        assert sorted(own.pool.take(SLOTS + 5)) == sorted(set(range(SLOTS)))
        assert own.pool.take(1) == []
        own.pool.give_back([3, 4])
        assert sorted(own.pool.take(3)) == [3, 4]


def test_a_full_pool_has_slots_at_once(key: Path) -> None:
    """Engines do not wait for readers to let go of what is withdrawn for the next blocks."""
    with Listing(key, count=SLOTS) as own, Taking(key, own.endpoint) as took:
        assert took.finds(SLOTS)
        assert len(own.pool.take(3, wait_s=60)) == 3
        for round_ in range(4):
            until(lambda: not own.pool.counts()["leaving"])
            slots = own.pool.take(3)
            assert len(slots) == 3
            made = names(own.settings, 3, str(round_))
            for block, slot in zip(made, slots, strict=True):
                own.pool.publish(block, slot)
        assert own.pool.counts()["listed"] >= SLOTS // 2 - 3


# -- closing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("closes", ["pool", "reader"])
def test_closing_while_blocks_are_read(key: Path, transport: str, closes: str) -> None:
    with Listing(key, **SLOW) as own, Taking(key, own.endpoint, transport=transport) as took:
        assert took.finds(ALL)
        fetches = [took.reader.fetch(took.wanted(ALL)) for _ in range(3)]
        (own.pool if closes == "pool" else took.reader).close()
        for each in fetches:
            assert each.wait(60)
        # What came is right.
        failed = set.intersection(*(each.failed for each in fetches))
        right = [at for at in range(ALL) if took.names[at] not in failed]
        assert same(took.cache, own.cache, [(at, own.slots[at]) for at in right])
        assert took.wrong == 0
        if closes == "reader":
            with pytest.raises(ClosedError):
                took.reader.fetch([])
            until(lambda: not own.pool.counts()["readers"])
        else:
            with pytest.raises(ClosedError):
                own.pool.publish(took.names[25], 25)
            until(lambda: took.reader.found(took.names) == 0)
            until(lambda: "closed" in took.why() or "refused" in took.why())


def test_one_pool_of_a_name_in_a_process(key: Path) -> None:
    opened: list[object] = []

    def open_one() -> None:
        try:
            opened.append(KvPool.open(NAME, FORM, memory(tensors()), settings=settings(key)))
        except LocalError as error:
            opened.append(str(error))

    several = [threading.Thread(target=open_one) for _ in range(4)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    pools = [each for each in opened if isinstance(each, KvPool)]
    assert len(pools) == 1
    assert len([each for each in opened if "already" in str(each)]) == 3
    pools[0].close()
    open_one()
    again = opened[-1]
    assert isinstance(again, KvPool)
    again.close()


def test_slots_of_the_reader_that_are_not_there(key: Path) -> None:
    with Listing(key) as own, Taking(key, own.endpoint) as took:
        assert took.finds(ALL)
        for slot in (-1, SLOTS):
            with pytest.raises(ValueError, match="slot"):
                took.reader.fetch([(took.names[0], slot)])
        with pytest.raises(ValueError, match="name"):
            own.pool.publish(b"short", 30)
        assert same(took.cache, tensors(0), [(slot, slot) for slot in range(SLOTS)])


# -- certificates ----------------------------------------------------------------------------------

ALLOWED = f"""
[[allow]]
principal = "spiffe://mx.test/ns/a/sa/reader"
may = "pull"
models = "{NAME}"
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_a_policy_says_who_may_read(key: Path, tmp_path: Path, authority: Authority) -> None:
    def shown(name: str) -> dict[str, Any]:
        files = authority.certificate(name, MEMBERS[name])
        return {"tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.authority}

    policy = tmp_path / "policy.toml"
    policy.write_text(ALLOWED)
    with (
        Listing(key, policy=str(policy), **shown("source")) as own,
        Taking(key, own.endpoint, transport="tcp", **shown("reader")) as reader,
        Taking(key, own.endpoint, **shown("second")) as second,
    ):
        assert reader.finds(ALL)
        assert reader.fetch(ALL) == []
        assert reader.has(own.cache, own.slots)
        second.refused("may not pull")
        assert own.pool.counts()["readers"] == 1
        # A right that is taken back ends what runs.
        new = tmp_path / "new.toml"
        new.write_text(ALLOWED.replace(NAME, "other"))
        new.rename(policy)
        reader.refused("may not pull")
        assert reader.reader.found(reader.names) == 0
        assert own.pool.counts()["readers"] == 0
