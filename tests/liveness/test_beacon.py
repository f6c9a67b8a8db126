"""UDP between workers: who hears of an alarm, and what is ignored."""

import hmac
import json
import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.liveness.beacon import MAX_BYTES, Alarm, Answer, Beacon, Beat, Question, relay_ranks
from distflow.liveness.heartbeat import MAX_TASK, MAX_WAITS, Record
from distflow.liveness.tcp_messages import MOST


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
    beat = other.receive(5)
    assert isinstance(beat, Beat)
    record = beat.record
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
    select.select([one._socket], [], [], 10)
    data = one._socket.recv(1 << 16)
    assert len(data) <= MAX_BYTES + 200
    assert isinstance(one._parse(data), Answer)


def signed(data: bytes, token: bytes = b"secret") -> bytes:
    return hmac.digest(token, data, "sha256") + data


JUNK = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[" * 60_000,
    signed(b"[]", b"other run"),
    signed(json.dumps(["alarm", {"raiser": 0, "address": "x", "reason": "y"}]).encode(), b"other run"),
    signed(b"[]"),
    signed(b"[1]"),
    signed(json.dumps(["alarm", {"raiser": "x"}]).encode()),
    signed(json.dumps(["beat", {"who": 1}]).encode()),
    signed(json.dumps(["beat", [1]]).encode()),
    signed(json.dumps(["answer", None]).encode()),
    signed(json.dumps(["wake", None]).encode()),
    signed(b"[" * 2000),
]


def ports(beacon: Beacon) -> tuple[tuple[str, int], tuple[str, int]]:
    udp, tcp = json.loads(beacon.address)
    return tuple(json.loads(udp)), tuple(json.loads(tcp))


def next_beat(beacon: Beacon) -> Beat:
    """Waits for a heartbeat; all before it must have been ignored."""
    while (received := beacon.receive(10)) is None:
        pass
    assert isinstance(received, Beat)
    return received


@pytest.mark.parametrize("junk", JUNK)
def test_packets_of_strangers_are_ignored(beacons: list[Beacon], junk: bytes) -> None:
    udp, tcp = ports(beacons[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger, socket.create_connection(tcp) as other:
        stranger.sendto(junk, udp)
        other.sendall(junk[:4000])
        other.shutdown(socket.SHUT_WR)
        beacons[1].send_beat(Record(1, 1, "a"))
        assert not next_beat(beacons[0]).by_tcp


def test_a_rank_that_is_asked_answers_by_tcp(beacons: list[Beacon]) -> None:
    """As where UDP is lost."""
    asking, asked = beacons
    asking.ask(1)
    while (question := asked.receive(0.1)) is None:
        asking.receive(0.001)
    assert isinstance(question, Question)
    assert question.rank == 0
    asked.reply(question, Record(1, 12, "b"))
    ways: set[bool] = set()
    while len(ways) < 2:
        if isinstance(beat := asking.receive(0.1), Beat):
            ways.add(beat.by_tcp)
        asked.receive(0.001)
    assert asking.reach(1) == "connected"


def test_a_port_that_is_closed_is_known_from_tcp(beacons: list[Beacon]) -> None:
    beacons[1].close()
    beacons[0].ask(1)
    while beacons[0].reach(1) is None:
        beacons[0].receive(0.1)
    assert beacons[0].reach(1) == "refused"
    beacons[1] = Beacon(1, 2, "127.0.0.1")


def test_strangers_that_connect_and_say_nothing_are_bounded_and_keep_nobody_out(beacons: list[Beacon]) -> None:
    _, tcp = ports(beacons[0])
    with ExitStack() as stack:
        for _ in range(3 * MOST):
            stack.enter_context(socket.create_connection(tcp))
        before = len(os.listdir("/proc/self/fd"))
        beacons[1].ask(0)
        while not isinstance(beacons[0].receive(0.1), Question):
            beacons[1].receive(0.001)
            assert len(os.listdir("/proc/self/fd")) - before <= MOST + 1


@given(st.binary(max_size=200))
def test_nothing_that_arrives_raises(data: bytes) -> None:
    beacon = Beacon(0, 2, "127.0.0.1")
    assert beacon._parse(data) is None
    beacon.connect("secret", lambda rank: beacon.address)
    assert beacon._parse(data) is None
    beacon._parse(signed(data))
    beacon.close()
