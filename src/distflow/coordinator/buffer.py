"""The buffer of one worker: columns keyed by (step, partition, field), freed after their last reader."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from distflow.batch.batch import Column


class Key(NamedTuple):
    step: int
    partition: str
    field: str


class Buffer:
    """Holds columns from `put` until `free` or `pop`. Freed memory is released in the background."""

    def __init__(self) -> None:
        self._columns: dict[Key, Column] = {}
        self._reclaimer = ThreadPoolExecutor(1, "reclaim")

    def put(self, key: Key, column: Column) -> None:
        self._columns[key] = column

    def get(self, key: Key) -> Column:
        return self._columns[key]

    def pop(self, key: Key) -> Column:
        """Removes a column and returns it to its last reader."""
        return self._columns.pop(key)

    def discard(self, key: Key) -> None:
        """Removes a column if it is there."""
        self._columns.pop(key, None)

    def free(self, step: int, partition: str, fields: tuple[str, ...]) -> None:
        freed = [self._columns.pop(Key(step, partition, f)) for f in fields]
        # Unmapping large memory takes milliseconds: the last reference is dropped in the background.
        self._reclaimer.submit(freed.clear)

    def columns(self, field: str) -> list[Column]:
        """Returns all columns of a field, of any step and partition."""
        return [column for key, column in list(self._columns.items()) if key.field == field]

    def remaining(self, step: int) -> list[Key]:
        """Returns the keys of a step that have not been freed."""
        return [k for k in self._columns if k.step == step]

    def close(self) -> None:
        self._columns.clear()
        self._reclaimer.shutdown()
