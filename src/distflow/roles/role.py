"""The interface of a role: all that a run calls on it besides its nodes. Imports no torch."""

from collections.abc import Iterable
from functools import cache
from types import new_class
from typing import TYPE_CHECKING, Any

from distflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distflow.comm.collectives import SendReceive
    from distflow.config.schema import TrainConfig
    from distflow.dataset.view import DatasetView
    from distflow.plan.layout import Layout


class Role:
    """A part of a flow that keeps something between its calls: a model, counts, processes.

    Its nodes are methods marked with `@node`. Every worker that runs one of them, or moves its weights, makes one
    object of the class, with the `args` of the config. A parameter of `__init__` called `role` gets a `RoleContext`.

    The methods here are optional, and each does nothing by default. A run calls them in this order: `check_training`,
    `__init__`, `restore`, `check_fields`, `check_rows`; in every step `sync_weights`, the nodes, `copy_weights` and
    `state`; at the end `close`. A class does not have to inherit from `Role`: its methods of these names are called.
    """

    __hooks__: tuple[str, ...]  # the methods here, which are no nodes: errors do not propose them

    @staticmethod
    def check_training(config: "TrainConfig", role: str, node: str, layout: "Layout") -> None:
        """Refuses a config or a layout that a node of type `train` cannot have; called before any process starts."""

    def check_fields(self, fields: Iterable[str], where: str = "") -> None:
        """Refuses a node that reads too little: called before the first step, once per node, with the fields it reads.

        `where` begins the error.
        """

    def check_rows(self, rows: "DatasetView", rank: int, workers: int) -> None:
        """Refuses data that the role cannot use: called before the first step, for training and for held-out data.

        Each of the `workers` may check a share of the rows.
        """

    def state(self) -> Any:
        """Returns what a checkpoint keeps of the role; None: nothing.

        It is made of plain JSON values; if it is a dict, its values may also be whole tensors. A role whose tensors are
        cut over its ranks returns a `RoleState`. Called when a checkpoint is due, on all ranks of the role.
        """
        return None

    def restore(self, state: Any) -> None:
        """Takes up what `state` returned when the checkpoint was written.

        Of a `RoleState` it gets the plain values; then the tensors of a new `state()` are filled in place.
        """

    def sync_weights(self, version: int, weights: Any = None) -> "Iterator[SendReceive]":
        """Moves the weights from the training ranks to the generating ones; yields the messages this takes.

        Called before a node with `generates=True`, on all ranks of the role. `version`: how many steps have trained the
        weights. `weights`: what `copy_weights` returned after these steps; None: the newest.
        """
        yield from ()

    def copy_weights(self) -> Any:
        """Returns a copy of this rank's part of the weights, which may be trained further before they are synced.

        Called after every step of a run with `rollout.staleness` or `rollout.chunk`.
        """
        return None

    def close(self) -> None:
        """Gives back processes, files and connections; called once, also after an error."""


@cache
def as_role(cls: type) -> type[Role]:
    """Returns the class of a role's object: one that does not inherit from `Role` gets the methods that it lacks."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = cls if issubclass(cls, Role) else new_class(cls.__name__, (cls, Role), {}, lambda body: body.update(names))
    if defines(made, "state") and not defines(made, "restore"):
        raise ConfigError(
            f"{cls.__module__}:{cls.__qualname__} has a method `state()`, but none to resume with; add `restore(state)`"
        )
    return made


def defines(cls: type[Role], method: str) -> bool:
    """Returns whether a class has an implementation of its own of a method of `Role`."""
    return getattr(cls, method) is not getattr(Role, method)


Role.__hooks__ = tuple(name for name in vars(Role) if not name.startswith("_"))
