"""A watchdog thread in every worker: a wait that takes too long, or a peer without a sign of life, ends the run."""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import distflow
from distflow.device.process import START_LIMIT_S
from distflow.errors import DistflowError, PeerLostError, StoppedError, StuckError, cut
from distflow.liveness.beacon import Alarm, Answer, Beacon, Beat, Question, relay_ranks
from distflow.liveness.collectives import Collective, oldest_unfinished
from distflow.liveness.evidence import describe_network, process_state, unacknowledged
from distflow.liveness.heartbeat import Heartbeat, Record, cut_ranks, read_record
from distflow.liveness.waits import describe_waits
from distflow.plan.layout import format_ranks
from distflow.util.parent import process_exists

logger = logging.getLogger(__name__)
UNHEARD_S = 60.0  # after which a peer of which nothing was ever heard is reported
MAX_NAMED, MAX_NOTES = 16, 2  # ranks and sentences in an answer
PACKAGE = str(Path(distflow.__file__).parent)


class Watchdog:
    """Calls `on_stuck`, in the watchdog's thread, with the error that ends this worker; it must not return.

    It checks how long this worker waits, for others or in a collective of a model, and listens to the heartbeat of the
    next rank, as a worker that was stopped has none. UDP may be lost where TCP is
    not: data received is a sign of life, too, and a rank that is not heard is asked by TCP before it is reported.

    Once `stop_requested`, this worker ends at once if another one on this host is gone: then it was not asked for a
    last step, but is being cleaned up by its launcher. `beacon`: None if there is only one worker.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        beacon: Beacon | None,
        limit_s: float,
        on_stuck: Callable[[DistflowError], None],
        stop_requested: Callable[[], bool] = lambda: False,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self.start_limit_s = max(limit_s, start_limit_s)
        self.heartbeat, self.beacon, self.limit_s, self.on_stuck = heartbeat, beacon, limit_s, on_stuck
        self.rank, self.workers = heartbeat.rank, beacon.workers if beacon else 1
        self.tick_s = min(1.0, limit_s / 10)
        self._pause_s = 5 * self.tick_s + 2
        self._next_rank, self._next = (self.rank + 1) % self.workers, PeerMonitor(self._pause_s)
        self._heard: dict[int, float] = {}  # when something came from a rank, whatever it was
        self._by_tcp_since: float | None = None  # that the next rank is heard by TCP only
        self._ask_at = 0.0
        self._ticked, self._paused = time.monotonic(), -math.inf  # the last tick, and the last one that came late
        self._alarm: Alarm | None = None
        self._alarm_since, self._alarm_ticks = 0.0, 0
        self._raise_at = 0.0  # while another worker may still be first
        self._answers: dict[int, Answer] = {}
        self._stack = ""
        self._stop_requested, self._peer_was_gone, self._warned = stop_requested, False, False
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Marks this worker as done, so that no peer misses its heartbeat."""
        self._stop.set()
        if self.beacon:
            self.beacon.wake()
        self._thread.join()
        self.heartbeat.finish()
        if self.beacon:
            for _ in range(3):  # some may be lost
                self.beacon.send_beat(self.heartbeat.record)
            self.beacon.close()

    def _run(self) -> None:
        next_tick = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + self.tick_s
            if self.beacon is None:
                self._stop.wait(next_tick - time.monotonic())
                continue
            match self.beacon.receive(next_tick - time.monotonic()):
                case Beat() as beat:
                    self._hear(beat, time.monotonic())
                case Question() as question:
                    self._heard[question.rank] = time.monotonic()
                    self.beacon.reply(question, self.heartbeat.record)
                case Alarm() as alarm:
                    self._heed(alarm)
                case Answer() as answer:
                    self._heard[answer.record.rank] = time.monotonic()
                    self._answers[answer.record.rank] = answer

    def _hear(self, beat: Beat, now: float) -> None:
        rank = beat.record.rank
        self._heard[rank] = now
        if rank != self._next_rank:
            return
        self._next.hear(beat.record, now)
        if not beat.by_tcp:
            self._by_tcp_since = None
        elif self._by_tcp_since is None:
            self._by_tcp_since = now

    def _tick(self, now: float) -> None:
        self.heartbeat.beat()
        record = self.heartbeat.record
        if self.beacon:
            self.beacon.send_beat(record)
        if now - self._ticked > self._pause_s:
            self._paused = now
        self._ticked = now
        limit_s = self.limit_s if record.step > 0 else self.start_limit_s
        silent_s = self._silent_s(now)
        self._ask_next(now)
        self._warn_unheard(now)
        if self._stop_requested() and self._local_peer_is_gone():
            if self._peer_was_gone:  # the main thread had a tick to notice by itself and to report it
                self.on_stuck(StoppedError("another worker has failed"))
            self._peer_was_gone = True
        if self._alarm:
            self._continue_alarm(now)
        elif record.waits_for and time.monotonic() - record.since > limit_s:
            self._raise_alarm(f"a worker has waited more than {limit_s:g} s for others (wait_limit_s)", now)
        elif stuck := self._stuck_collective(record, self._collective_limit_s(record)):
            where = f"rank {self.rank} in {stuck}"
            limit_s = self._collective_limit_s(record)
            reason = f"a worker has waited more than {limit_s:g} s for others (wait_limit_s): {where}"
            self._raise_alarm(reason, now)
        elif silent_s > limit_s:
            reason = f"a worker has had no heartbeat for more than {limit_s:g} s (wait_limit_s)"
            self._raise_alarm(reason, now, accused=self._next_rank)
        else:
            self._raise_at = 0.0

    def _collective_limit_s(self, record: Record) -> float:
        """Returns how long a collective of a model may take: short, once the first step is over."""
        return self.limit_s if record.step > self.heartbeat.first_step else self.start_limit_s

    def _stuck_collective(self, record: Record, limit_s: float) -> Collective | None:
        """Returns a collective of a model that takes longer than the limit, in a task that does, too."""
        if record.waits_for or time.monotonic() - record.since <= limit_s:
            return None
        stuck = oldest_unfinished()
        return stuck if stuck and stuck.age_s > limit_s else None

    def _own_record(self) -> Record:
        """Returns what this worker does, and for whom it waits in a collective of a model."""
        record = self.heartbeat.record
        stuck = None if record.waits_for else oldest_unfinished()
        if stuck is None or stuck.age_s <= 3 * self.tick_s:
            return record
        others = format_ranks(tuple(r for r in stuck.ranks if r != self.rank))
        return replace(record, task=f"{record.task}: {stuck}", waits_for=cut_ranks(others))

    def _local_peer_is_gone(self) -> bool:
        """Returns whether a worker of this host has ended, although this one has not finished."""
        if self.heartbeat.record.task == "finish":
            return False
        return any(p.local and not process_exists(p.pid) for r, p in enumerate(self.heartbeat.peers) if r != self.rank)

    def _silent_s(self, now: float) -> float:
        """Returns for how long there was no sign of life of the next rank."""
        silent_s, age_s = self._next.silent_s(now), self.heartbeat.data_age_s(self._next_rank)
        return silent_s if age_s is None else min(silent_s, age_s)

    def _ask_next(self, now: float) -> None:
        """Asks the next rank by TCP if it was not heard for a part of the limit, or never."""
        silent_s = self._next.silent_s(now) if self._next.record else now - self._started
        if self.beacon and silent_s > self.limit_s / 3 and now >= self._ask_at:
            self._ask_at = now + max(self.tick_s, self.limit_s / 20)
            self.beacon.ask(self._next_rank)

    def _warn_unheard(self, now: float) -> None:
        """Says once that UDP does not arrive."""
        if self.workers == 1 or self._warned:
            return
        if self._next.record is None:
            problem = "without it, one that stops is noticed only by those that wait for it"
            self._warned = now - self._started > UNHEARD_S
        else:
            problem = "it is asked by TCP now and then"
            self._warned = self._by_tcp_since is not None and now - self._by_tcp_since > 3 * self.tick_s
        if self._warned:
            logger.warning(
                "rank %d on %s gets no heartbeat of rank %d%s: allow UDP between the hosts; %s",
                self.rank,
                self.heartbeat.host,
                self._next_rank,
                self._place(self._next_rank),
                problem,
            )

    def _place(self, rank: int) -> str:
        return f" on {self.heartbeat.peers[rank].host}" if self.heartbeat.peers else ""

    def _unheard(self, now: float) -> tuple[int, ...]:
        """Returns the ranks that should be heard now and then, and were not for the time of the limit."""
        limit_s, age_s = 0.9 * self.limit_s, self.heartbeat.data_age_s
        silent = (r for r in (self.beacon.known if self.beacon else ()) if now - self._heard.get(r, 0.0) > limit_s)
        return tuple(r for r in silent if (age := age_s(r)) is None or age > limit_s)

    def _is_deaf(self, now: float) -> bool:
        """Returns whether this worker hears none of several other hosts: then it is its own that is suspected first."""
        peers, unheard = self.heartbeat.peers, set(self._unheard(now))
        remote = [r for r in self.beacon.known if peers[r].host != self.heartbeat.host] if self.beacon and peers else []
        several = len({peers[r].host for r in remote}) > 1
        return several and unheard.issuperset(remote) and not self._heard.keys().isdisjoint(remote)

    def _raise_alarm(self, reason: str, now: float, accused: int = -1) -> None:
        """Raises the alarm, unless another worker does within a tick: often all wait for the same one."""
        if not self._raise_at:
            self._raise_at = now + self.tick_s * (0.618 * self.rank % 1)
        if now < self._raise_at:
            return
        deaf, host = self._is_deaf(now), self.heartbeat.host
        if deaf:
            reason += f", and rank {self.rank} on {host} hears no other host any more: packets to {host} may be lost"
        address = self.beacon.address if self.beacon else ""
        self._heed(Alarm(self.rank, address, reason, host, accused, deaf))

    def _heed(self, alarm: Alarm) -> None:
        """Passes an alarm on and answers it, or raises a better one where this worker knows that it is mistaken."""
        now = time.monotonic()
        if alarm.raiser != self.rank:
            self._heard[alarm.raiser] = now
            if self.beacon and (reason := self._contradict(alarm, now)):
                alarm = Alarm(self.rank, self.beacon.address, reason, self.heartbeat.host, informed=True)
        if self._alarm and self._alarm.priority <= alarm.priority:
            return
        self._alarm_since = self._alarm_since or now
        self._alarm, self._alarm_ticks = alarm, 0
        self._stack = self._stack or self._find_stack()
        self._continue_alarm(now)

    def _contradict(self, alarm: Alarm, now: float) -> str:
        """Returns why an alarm accuses the wrong worker; "" unless it was raised by one that does not hear this one."""
        here, there = self.heartbeat.host, alarm.host
        if here == there or now - self._paused < self.limit_s:  # this worker itself may have been stopped
            return ""
        raiser = f"rank {alarm.raiser} on {there}"
        if alarm.deaf and not self._is_deaf(now):
            return f"{raiser} hears no other host, but rank {self.rank} on {here} hears it: packets to {there} are lost"
        if alarm.accused == self.rank:
            return (
                f"{raiser} does not hear rank {self.rank} on {here}, which runs and hears it: packets from {here} to"
                f" {there} are lost"
            )
        return ""

    def _continue_alarm(self, now: float) -> None:
        """Repeats the alarm for some ticks, as packets may be lost, and ends this worker when it is over."""
        alarm, elapsed_s = self._alarm, now - self._alarm_since
        assert alarm is not None
        notes = self._notes(now)
        own = Answer(
            self._own_record(),
            self._stack,
            self._silent_peer(now),
            self._unheard(now)[:MAX_NAMED],
            tuple(self._states().items())[:MAX_NAMED],
            notes,
        )
        self._alarm_ticks += 1
        if self.beacon and self._alarm_ticks <= 4:
            self.beacon.spread(alarm, tcp=self._alarm_ticks > 1)
            self.beacon.answer(alarm, own, tcp=self._alarm_ticks > 1)
        if alarm.raiser == self.rank:
            self._answers[self.rank] = own
            if len(self._answers) == self.workers or elapsed_s > 3 * self.tick_s + 3:
                self._report(alarm)
        elif elapsed_s > 5 * self.tick_s + 8:  # the launcher has not ended this worker
            self._continue_stopped()
            place = f" on {alarm.host}" if alarm.host != self.heartbeat.host else ""
            lines = [f"rank {self.rank} ends: rank {alarm.raiser}{place} has raised the alarm: {alarm.reason}", *notes]
            self.on_stuck(PeerLostError("\n".join(lines)))

    def _report(self, alarm: Alarm) -> None:
        now, answers, peers, folder = time.monotonic(), self._answers, self.heartbeat.peers, self.heartbeat.folder
        silent = {a.silent.rank: a.silent for a in answers.values() if a.silent}
        states = {rank: state for a in answers.values() for rank, state in a.states}
        for rank in states:
            # Of a rank that its own watcher cannot report, because that is stopped as well.
            if folder and peers[rank].local and (written := read_record(folder, rank)):
                silent.setdefault(rank, written)
        silent = {r: record for r, record in silent.items() if r not in answers}
        unheard_by = {r: [q for q, a in answers.items() if r in a.unheard] for r in range(self.workers)}
        mute = [r for r in range(self.workers) if r not in answers]
        table = describe_waits(
            self.workers,
            answers,
            silent,
            peers,
            {r: why for r in mute if (why := self._explain(r, alarm, states.get(r, ""), unheard_by[r], now))},
            Counter({r: len(ranks) for r, ranks in unheard_by.items()}),
        )
        notes = dict.fromkeys(note for _, a in sorted(answers.items()) for note in a.notes)
        self._continue_stopped()
        for record in silent.values() if not peers else ():
            if record.host == self.heartbeat.host:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(record.pid, signal.SIGCONT)
        self.on_stuck(StuckError("\n".join([f"{alarm.reason}; who waits for whom:", table, *notes])))

    def _explain(self, rank: int, alarm: Alarm, state: str, unheard_by: list[int], now: float) -> str:
        """Returns what is known of a rank that did not answer, "" if nothing is."""
        here = self.heartbeat.host
        if state:
            return f"its process {state}"
        if alarm.deaf:
            return f"nothing arrives at {here} any more, from no host"
        if not self.beacon or not self.heartbeat.peers:
            return ""
        there = self.heartbeat.peers[rank].host
        witnesses = [q for q in self._answers if rank in relay_ranks(q, self.workers) and q not in unheard_by]
        if self.rank in unheard_by and witnesses:
            ranks = format_ranks(tuple(sorted(witnesses)))
            return f"ranks {ranks} hear it, and rank {self.rank} does not: packets from {there} to {here} are lost"
        match self.beacon.reach(rank):
            case "refused":
                return f"{there} refuses TCP there, so its process is gone"
            case "connected":
                return f"{there} takes TCP from {here}, but its process does not answer: it is stopped, or hangs"
            case "no answer":
                several = f", nor to ranks {format_ranks(tuple(sorted(unheard_by)))}" if len(unheard_by) > 1 else ""
                return (
                    f"no packet, UDP or TCP, comes from {there} to {here}{several}: the machine is gone, or the network"
                    " to it is cut"
                )
        return ""

    def _states(self) -> dict[int, str]:
        """Returns the states of the processes of this host that are not well, by rank."""
        local = ((r, p.pid) for r, p in enumerate(self.heartbeat.peers) if p.local and r != self.rank)
        return {rank: state for rank, pid in local if (state := process_state(pid))}

    def _continue_stopped(self) -> None:
        """Continues workers of this host that are stopped: they would not react to the SIGTERM of their launcher."""
        for rank, state in self._states().items():
            if state == "is stopped":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.heartbeat.peers[rank].pid, signal.SIGCONT)

    def _notes(self, now: float) -> tuple[str, ...]:
        """Returns what is wrong with TCP from this host to others."""
        peers, unheard, here = self.heartbeat.peers, set(self._unheard(now)), self.heartbeat.host
        hosts = {p.address: p.host for p in peers if p.address and p.host != here}
        notes, known = [], self.beacon.known if self.beacon else ()
        for address, size in unacknowledged().items() if hosts else ():
            if host := hosts.get(address):
                heard = any(r not in unheard for r in known if peers[r].host == host)
                notes.append(cut(describe_network(here, host, size, heard), 300))
        return tuple(notes[:MAX_NOTES])

    def _silent_peer(self, now: float) -> Record | None:
        heard = self._next.record
        if heard is None or self._silent_s(now) <= 3 * self.tick_s:
            return None
        # What it wrote for a launcher on this host is newer than what it sent with its last tick.
        written = read_record(self.heartbeat.folder, heard.rank) if self.heartbeat.folder else None
        return replace(written, beat=heard.beat) if written else heard

    def _find_stack(self) -> str:
        stack = traceback.extract_stack(sys._current_frames().get(self._main_thread))
        user_code = [f for f in stack if not f.filename.startswith((PACKAGE, "<frozen"))]
        return "".join(traceback.StackSummary.from_list(user_code or stack).format()[-6:])


class PeerMonitor:
    """Measures how long another rank has had no heartbeat, by this worker's clock: the clocks of two hosts differ."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.record: Record | None = None  # the last one
        self._since = self._checked = 0.0

    def hear(self, record: Record, now: float) -> None:
        self.record, self._since = record, now

    def silent_s(self, now: float) -> float:
        """Returns the seconds since the last heartbeat. After a pause of `pause_s` between two calls it was this worker
        that was stopped, and counting starts again."""
        paused, self._checked = now - self._checked > self.pause_s, now
        if paused:
            self._since = now
        return now - self._since if self.record and not self.record.done else 0.0
