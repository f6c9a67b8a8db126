"""The table of who waits for whom."""

import re
import time

from distflow.liveness.beacon import Answer
from distflow.liveness.heartbeat import Peer, Record
from distflow.liveness.waits import describe_waits


def record(rank: int, task: str = "judge", waits_for: str = "", host: str = "a", age: float = 0) -> Record:
    now = time.monotonic()
    return Record(rank, 100 + rank, host, 7, task, waits_for, now - age, now - age)


def test_the_table_names_the_rank_that_is_busy() -> None:
    answers = {0: Answer(record(0, "move m2 (response)", "1")), 1: Answer(record(1), "  File judge.py, line 3\n")}
    text = describe_waits(2, answers, {})
    assert re.search(r"^0 +a:100 +7 +move m2 \(response\) +0 s +1 +0 s ago$", text, re.M)
    assert "rank 1 waits for no other rank: it is busy with 'judge' of step 7, at:\n  File judge.py, line 3" in text


def test_the_table_names_ranks_without_a_heartbeat_and_the_hosts_of_those_that_do_not_answer() -> None:
    silent = {1: record(1, "update", host="b", age=100)}
    peers = [Peer(host, 9, False) for host in ("a", "b", "c")]
    text = describe_waits(3, {0: Answer(record(0, "move", "1-2"))}, silent, peers)
    assert "rank 1 has had no heartbeat for 100 s: it was stopped or its machine is gone" in text
    assert "it was in step 7, 'update' on b" in text
    assert re.search(r"^2 +c:9 +– +no answer$", text, re.M)
    assert "rank 2 on c did not answer: it is gone, or the network to its host is cut" in text


def test_ranks_that_do_the_same_share_a_row_if_there_are_many() -> None:
    n = 1024
    answers = {r: Answer(record(r, "move m1", "511")) for r in range(n) if r not in (511, 700)}
    answers[511] = Answer(record(511), "  File judge.py\n")
    text = describe_waits(n, answers, {})
    assert re.search(r"^0-510,512-699,701-1023 +1022 +7 +move m1 +511$", text, re.M), text
    assert re.search(r"^511 +1 +7 +judge +none$", text, re.M)
    assert "rank 511 waits for no other rank" in text
    assert "rank 700 did not answer" in text
    assert len(text.splitlines()) < 10


def test_the_table_of_many_ranks_stays_short_whatever_they_wait_for() -> None:
    answers = {r: Answer(record(r, f"task {r % 3}", str((r + 1) % 1024))) for r in range(1024)}
    lines = describe_waits(1024, answers, {}).splitlines()
    assert len(lines) == 4
    assert all(line.rstrip().endswith("others") for line in lines[1:])
    nobody = describe_waits(1024, {0: Answer(record(0))}, {}).splitlines()
    assert nobody[-1] == "… and 1007 more ranks"
