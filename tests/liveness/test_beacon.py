"""UDP between workers: who hears of an alarm, and what is ignored."""

import json
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.liveness.beacon import MAX_BYTES, Alarm, Answer, Beacon, relay_ranks
from distflow.liveness.heartbeat import MAX_TASK, MAX_WAITS, Record


@given(st.integers(2, 600), st.integers(0, 599), st.sets(st.integers(0, 599), max_size=3))
def test_an_alarm_reaches_all_in_log_n_hops_around_workers_that_are_gone(n: int, first: int, gone: set[int]) -> None:
    first %= n
    gone = {r % n for r in gone} - {first} if n > 16 else set()
    reached, last, hops = {first}, {first}, 0
    while last:
        last = {r for sender in last for r in relay_ranks(sender, n)} - reached - gone
        reached |= last
        hops += bool(last)
    assert reached == set(range(n)) - gone
    assert hops <= n.bit_length() + len(gone)
    assert len(relay_ranks(first, n)) <= 2 * n.bit_length()


@pytest.fixture
def beacons() -> Iterator[list[Beacon]]:
    pair = [Beacon(r, 2, "127.0.0.1") for r in range(2)]
    for b in pair:
        b.connect("secret", lambda r: pair[r].address)
    yield pair
    for b in pair:
        b.close()


def test_heartbeats_alarms_and_answers_arrive(beacons: list[Beacon]) -> None:
    one, other = beacons
    one.send_beat(Record(0, 11, "a", 3, "judge"))
    record = other.receive(5)
    assert isinstance(record, Record)
    assert (record.rank, record.pid, record.step, record.task) == (0, 11, 3, "judge")
    alarm = Alarm(0, one.address, "a reason")
    one.spread(alarm)
    assert other.receive(5) == alarm
    other.answer(alarm, Answer(Record(1, 12, "b"), "  File x.py", Record(0, 11, "a")))
    answer = one.receive(5)
    assert isinstance(answer, Answer)
    assert (answer.record.rank, answer.stack, answer.silent and answer.silent.rank) == (1, "  File x.py", 0)


def test_the_longest_answer_fits_in_a_frame(beacons: list[Beacon]) -> None:
    one, other = beacons
    record = Record(10**6, 10**6, "h" * 64, 10**6, "t" * MAX_TASK, "1" * MAX_WAITS, 1.123456789, 1.123456789)
    other.answer(Alarm(0, one.address, ""), Answer(record, '  File "é.py"\n' * 1000, record))
    data = one._socket.recv(1 << 16)
    assert len(data) <= MAX_BYTES + 200
    assert isinstance(one._parse(data), Answer)


JUNK = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"[1]",
    json.dumps(["other run", "alarm", {"raiser": 0, "address": "x", "reason": "y"}]).encode(),
    json.dumps(["secret", "alarm", {"raiser": "x"}]).encode(),
    json.dumps(["secret", "beat", {"who": 1}]).encode(),
    json.dumps(["secret", "beat", [1]]).encode(),
    json.dumps(["secret", "answer", None]).encode(),
    json.dumps(["secret", "wake", None]).encode(),
]


@pytest.mark.parametrize("junk", JUNK)
def test_packets_of_strangers_are_ignored(beacons: list[Beacon], junk: bytes) -> None:
    host, port = json.loads(beacons[0].address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(junk, (host, port))
    assert beacons[0].receive(5) is None
    beacons[1].send_beat(Record(1, 1, "a"))
    assert isinstance(beacons[0].receive(5), Record)


@given(st.binary(max_size=200))
def test_nothing_that_arrives_raises(data: bytes) -> None:
    beacon = Beacon(0, 2, "127.0.0.1")
    assert beacon._parse(data) is None
    beacon.close()
