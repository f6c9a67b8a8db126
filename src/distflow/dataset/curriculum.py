"""Which rows a step has when they come from several sources, or follow what the model can do already.

A function of the config, the rows, and the results of earlier steps, which all workers know: each computes it for
itself, and all agree. The results of a step change the draw `lag` steps later, when every worker has them.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distflow.dataset.shuffle import permute
from distflow.errors import DataError
from distflow.util.alike import warn_alike
from distflow.util.arrays import Ints

logger = logging.getLogger(__name__)
_KEPT = 256  # draws before the newest one
_STREAM = 1_000_003  # between the seeds of two sources


class FollowRules(Protocol):
    """Makes prompts follow results: the section `data.curriculum` of a config."""

    @property
    def pass_score(self) -> float: ...
    @property
    def drop_solved(self) -> float | None: ...
    @property
    def drop_unsolved(self) -> float | None: ...
    @property
    def visits(self) -> int: ...
    @property
    def adapt(self) -> bool: ...
    @property
    def floor(self) -> float: ...
    @property
    def memory(self) -> float: ...


@dataclass(frozen=True)
class Draw:
    """The rows of a step, and the sources as they were then; steps count from 0 here."""

    rows: Ints
    sources: Ints  # of each row
    ratios: list[float]  # of each source
    dropped: list[int]  # rows of each source that are not drawn


class Curriculum:
    """Draws `batch` rows for each step. `source_of`: the source of every row; `ratios`: of the sources, by name.

    Without `follow`, ratios stay as they are and nothing is dropped. The prefetching thread draws, too, and another one
    may bring results.
    """

    def __init__(
        self,
        source_of: Ints,
        ratios: Mapping[str, float],
        batch: int,
        seed: int,
        shuffle: bool = True,
        follow: FollowRules | None = None,
        lag: int = 2,
    ) -> None:
        self.names, self.given, self.batch = list(ratios), np.array(list(ratios.values())), batch
        self.seed, self.shuffle, self.follow, self.lag = seed, shuffle, follow, lag
        self.source_of: Ints = np.asarray(source_of, np.int64)
        self.rows = [np.flatnonzero(self.source_of == i) for i in range(len(ratios))]
        for name, rows in zip(ratios, self.rows, strict=True):
            if not len(rows):
                raise DataError(f"data.sources.{name}: none of its rows can be used; give others, or leave it out")
        self._lock = threading.Lock()
        self._draws: dict[int, Draw] = {}
        self._next = 0  # the step to draw
        self._drawn = np.zeros(len(ratios), np.int64)  # places that were passed in the stream of each source
        self._credit = np.zeros(len(ratios))  # rows that each source is owed
        self._rate = np.full(len(ratios), np.nan)  # moving average of the responses that pass
        self._out = np.zeros(len(self.source_of), bool)  # rows that are not drawn
        self._in_a_row: Ints = np.zeros(len(self.source_of), np.int64)  # visits: solved > 0, not at all < 0
        self._results: dict[int, NDArray[np.float64]] = {}  # step → [3, batch]: of its rows, see `own_results`
        self._noted: dict[int, list[tuple[int, float]]] = {}

    def rows_at(self, first: int, count: int) -> list[int]:
        """Returns the rows at some positions of the stream."""
        steps = range(first // self.batch, -(-(first + count) // self.batch))
        rows = np.concatenate([np.empty(0, np.int64), *(self.draw(s).rows for s in steps)])
        start = first - steps.start * self.batch
        part: list[int] = rows[start : start + count].tolist()
        return part

    def draw(self, step: int) -> Draw:
        """Returns the rows of a step; they are kept for some steps."""
        with self._lock:
            while self._next <= step:
                self._advance()
            return self._draws[step]

    # Results.

    def note(self, step: int, place: int, score: float) -> None:
        """Notes the score of a response to the row at a place of a step, on the worker that has it."""
        self._noted.setdefault(step, []).append((place, score))

    def own_results(self, step: int) -> NDArray[np.float64]:
        """Returns this worker's counts of a step: of each row, its responses, its passing responses, its scores."""
        results, least = np.zeros((3, self.batch)), self.follow.pass_score if self.follow else 1.0
        for place, score in self._noted.pop(step, ()):
            results[:, place] += 1, score >= least, score
        return results

    def learn(self, step: int, results: NDArray[np.float64]) -> None:
        """Takes the results of a step, those of all workers together."""
        with self._lock:
            self._results = {s: r for s, r in self._results.items() if self.follow or s > step - self.lag}
            self._results[step] = results

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step whose results were learned."""
        draw, found = self.draw(step), dict[str, float]()
        responses, passed, scores = self._results[step]
        for i, name in enumerate(self.names):
            own = draw.sources == i
            found[f"source/{name}/share"] = float(own.mean())
            if responses[own].any():
                found[f"source/{name}/score"] = float(scores[own].sum() / responses[own].sum())
                found[f"source/{name}/pass_rate"] = float(passed[own].sum() / responses[own].sum())
            if self.follow:
                found[f"source/{name}/dropped"] = draw.dropped[i]
        return found

    # Checkpoints.

    def state(self, step: int) -> dict[str, Any]:
        """Returns what is needed to draw on from `step`, all of whose results are still to come."""
        with self._lock:
            visited = np.flatnonzero(self._in_a_row)
            return {
                "sources": self.names,
                "rows": len(self.source_of),
                "next": self._next,
                "drawn": self._drawn.tolist(),
                "credit": self._credit.tolist(),
                "rate": [None if np.isnan(r) else r for r in self._rate.tolist()],
                "out": np.flatnonzero(self._out).tolist(),
                "in_a_row": np.stack((visited, self._in_a_row[visited])).tolist(),
                "draws": {
                    str(s): [d.rows.tolist(), d.ratios, d.dropped]
                    for s, d in self._draws.items()
                    if s >= step - self.lag
                },
                "results": {str(s): r.tolist() for s, r in self._results.items() if s < step},
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["sources"] != self.names or state["rows"] != len(self.source_of):
            was = f"{state['rows']} rows of {', '.join(state['sources'])}"
            raise DataError(
                f"data.sources: there are {len(self.source_of)} rows of {', '.join(self.names)}, and the checkpoint was"
                f" written with {was}; put them back, or start anew from an export"
            )
        self._next, self._drawn = int(state["next"]), np.array(state["drawn"], np.int64)
        self._credit = np.array(state["credit"], float)
        self._rate = np.array([np.nan if r is None else r for r in state["rate"]], float)
        self._out[np.array(state["out"], np.int64)] = True
        visited, visits = np.array(state["in_a_row"], np.int64).reshape(2, -1)
        self._in_a_row[visited] = visits
        for s, (rows, ratios, dropped) in state["draws"].items():
            self._draws[int(s)] = Draw(np.array(rows, np.int64), self.source_of[rows], ratios, dropped)
        self._results = {int(s): np.array(r, float) for s, r in state["results"].items()}

    # Drawing.

    def _advance(self) -> None:
        step, self._next = self._next, self._next + 1
        if self.follow and step >= self.lag:
            self._apply(self._draws[step - self.lag], self._results.pop(step - self.lag))
        self._draws.pop(step - _KEPT, None)
        ratios = self._ratios()
        counts = self._counts(ratios)
        parts = [self._take(i, int(n)) for i, n in enumerate(counts)]
        rows = np.concatenate(parts)
        # Sources alternate, so that each worker's share of the step has its share of every source.
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n])
        rows = rows[np.argsort(places, kind="stable")]
        dropped = [int(self._out[own].sum()) for own in self.rows]
        self._draws[step] = Draw(rows, self.source_of[rows], ratios.tolist(), dropped)

    def _ratios(self) -> NDArray[np.float64]:
        """Returns the ratios of the sources now; takes dropped rows back if there are too few others."""
        active = np.array([len(own) - int(self._out[own].sum()) for own in self.rows])
        if self._out.any() and active.sum() < self.batch:
            text = "data.curriculum: %d rows are left, fewer than a batch; the dropped ones are taken back"
            warn_alike(logger, text, active.sum())
            self._out[:], self._in_a_row[:] = False, 0
            active = np.array([len(own) for own in self.rows])
        ratios = self.given.copy()
        if self.follow and self.follow.adapt:
            rate = np.where(np.isnan(self._rate), 0.5, self._rate)
            ratios = ratios * (self.follow.floor + (1 - self.follow.floor) * 4 * rate * (1 - rate))
        ratios = np.where(active > 0, ratios, 0.0)
        shares: NDArray[np.float64] = ratios / ratios.sum()
        return shares

    def _counts(self, ratios: NDArray[np.float64]) -> Ints:
        """Returns how many rows of each source a step has; over many steps, the ratios are kept exactly."""
        owed = np.where(ratios > 0, self._credit, 0.0) + self.batch * ratios
        room = np.array([len(own) - int(self._out[own].sum()) for own in self.rows])
        if room.sum() < self.batch or not self._out.any():  # rows come again within a step, as in any small data set
            room = np.where(ratios > 0, self.batch, 0)
        counts: Ints = np.clip(np.floor(owed), 0, room).astype(np.int64)
        while (missing := self.batch - int(counts.sum())) != 0:
            rest = (
                np.where(counts < room, owed - counts, -np.inf) if missing > 0 else np.where(counts, counts - owed, 0)
            )
            counts[int(np.argmax(rest))] += 1 if missing > 0 else -1
        self._credit = np.clip(owed - counts, -1.0, 1.0)
        return counts

    def _take(self, source: int, count: int) -> Ints:
        """Returns the next rows of a source: its own epochs, each in an order of its own, without dropped rows."""
        own, found = self.rows[source], list[Ints]()
        while count:
            places = np.arange(self._drawn[source], self._drawn[source] + count + 64, dtype=np.int64)
            epoch, index = np.divmod(places, len(own))
            order = index.copy()
            for e in np.unique(epoch).tolist() if self.shuffle else ():
                part = epoch == e
                order[part] = permute(index[part], len(own), self.seed + _STREAM * source, e)
            rows = own[order]
            good = np.flatnonzero(~self._out[rows])[:count]
            self._drawn[source] += int(good[-1]) + 1 if len(good) == count else len(places)
            found.append(rows[good])
            count -= len(good)
        return np.concatenate([np.empty(0, np.int64), *found])

    def _apply(self, draw: Draw, results: NDArray[np.float64]) -> None:
        follow, (responses, passed, _) = self.follow, results
        assert follow
        for row, n, good in zip(draw.rows.tolist(), responses.tolist(), passed.tolist(), strict=True):
            visits = self._in_a_row[row]
            if n and follow.drop_solved is not None and good / n >= follow.drop_solved:
                self._in_a_row[row] = max(visits, 0) + 1
            elif n and follow.drop_unsolved is not None and good / n <= follow.drop_unsolved:
                self._in_a_row[row] = min(visits, 0) - 1
            elif n:
                self._in_a_row[row] = 0
            if abs(self._in_a_row[row]) >= follow.visits:
                self._out[row], self._in_a_row[row] = True, 0
        for i in range(len(self.names)):
            own = draw.sources == i
            if n := responses[own].sum():
                rate, old = passed[own].sum() / n, self._rate[i]
                self._rate[i] = rate if np.isnan(old) else follow.memory * old + (1 - follow.memory) * rate


def sources_of_rows(files_of: Sequence[int], file_of_row: Ints) -> Ints:
    """Returns the source of each row, from how many files each source has and the file of each row."""
    return np.searchsorted(np.cumsum(files_of), file_of_row, side="right")
