"""The buffer of one worker: columns keyed by (step, partition, field), freed after their last reader."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from distflow.data.batch import Column


class Key(NamedTuple):
    step: int
    partition: str
    field: str


class Buffer:
    """Columns come in by `put`, are read by `get` and leave by `free`; their memory is given back behind the work."""

    def __init__(self) -> None:
        self._columns: dict[Key, Column] = {}
        self._reclaimer = ThreadPoolExecutor(1, "reclaim")

    def put(self, key: Key, column: Column) -> None:
        self._columns[key] = column

    def get(self, key: Key) -> Column:
        return self._columns[key]

    def pop(self, key: Key) -> Column:
        """The last reader takes it along."""
        return self._columns.pop(key)

    def drop(self, key: Key) -> None:
        self._columns.pop(key, None)

    def free(self, step: int, partition: str, fields: tuple[str, ...]) -> None:
        dead = [self._columns.pop(Key(step, partition, f)) for f in fields]
        # Unmapping large memory takes milliseconds: the last reference is dropped in the background.
        self._reclaimer.submit(dead.clear)

    def left(self, step: int) -> list[Key]:
        """What is still here of a step."""
        return [k for k in self._columns if k.step == step]

    def close(self) -> None:
        self._columns.clear()
        self._reclaimer.shutdown()
