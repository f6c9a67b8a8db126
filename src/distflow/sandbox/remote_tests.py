"""The judge's side: runs tests beside a solution that is in another process, and decides whether they pass.

Tests get stand-ins for the names that they take from the solution. A call of one sends its arguments as data and
returns data, so all comparing is done here, with Python's own types. Needs only the standard library, as the jail does.
"""

import contextlib
import json
import os
import signal
import sys
import types
from collections.abc import Mapping
from typing import Any

from distflow.sandbox.arrays import Arrays
from distflow.sandbox.collect import prepare, run_all
from distflow.sandbox.compare import same
from distflow.sandbox.judge_builtins import BUILTINS
from distflow.sandbox.remote import RemoteObject, SolutionConnection, SolutionLostError, changing, doc_of, edit, type_of
from distflow.sandbox.rewrite import rewrite
from distflow.sandbox.solution import serve_solution
from distflow.sandbox.suspicion import print_suspicions

__all__ = ["print_suspicions", "run_tests", "serve_solution"]

_OUTCOMES = 5  # the descriptor that outcomes are written to
_RECURSION = 1000  # calls that tests may nest; parsers of replies count on a limit that is not too high


def run_tests(text: str) -> None:
    """Runs the tests of a job (JSON); writes 1 or 0 for each, in order, and a line of JSON about all of them.

    `names` are taken from the solution, `setup` runs before the tests. A test is Python (`code`), or arguments of the
    only name and values of which one is `expected`. Stops after the first test in which the solution is lost; with
    `dry`, where there is none, each test runs up to its first question.
    """
    sys.setrecursionlimit(_RECURSION)
    job = json.loads(text)
    judge = _Judge(job)
    for test in job["tests"]:
        os.write(_OUTCOMES, b"1" if judge.passes(test) else b"0")
        if judge.connection.lost and not job["dry"]:
            break
    os.write(_OUTCOMES, b"\n" + json.dumps(judge.summary()).encode())


class _Judge:
    """Has the namespace of the tests and the connection to the solution."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.connection = SolutionConnection(job["dry"])
        self._job = job
        self._ran: set[str] = set()  # functions of the test
        self._arrays = Arrays(self.connection.numbers)
        self._ready = False
        self._error = ""  # the first one
        self._namespace: dict[str, Any] = {
            "__name__": "__main__",
            "__builtins__": BUILTINS,
            "_judge_changing": changing,
            "_judge_doc_of": doc_of,
            "_judge_edit": edit,
            "_judge_operate": self._arrays.operate,
            "_judge_ran": self._ran.add,
            "_judge_type_of": type_of,
        }
        self._entry = RemoteObject(self.connection, job["names"][0]) if len(job["names"]) == 1 else None
        signal.signal(signal.SIGALRM, self._time_is_up)

    def passes(self, test: Mapping[str, Any]) -> bool:
        """Runs a test. It passes if nothing is raised, the solution was asked something, and has answered always."""
        asked = 0
        try:
            signal.setitimer(signal.ITIMER_REAL, self._job["seconds"])
            self._prepare()
            asked = self.connection.asked
            self._run(test)
            return self.connection.asked > asked and not self.connection.lost
        except SolutionLostError:
            return False
        except BaseException as e:
            self._error = self._error or f"{type(e).__name__}: {str(e)[:200]}"
            return False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def summary(self) -> dict[str, Any]:
        connection = self.connection
        return {
            "asked": connection.asked,
            "calls": connection.calls,
            "lost": connection.lost,
            "loaded": connection.loaded,
            "strange": connection.strange,
            "error": self._error,
        }

    def _prepare(self) -> None:
        if self._ready:
            return
        sys.modules["solution"] = _SolutionModule(self.connection)
        prepare("\n".join(test.get("code", "") for test in self._job["tests"]))
        names = {name: RemoteObject(self.connection, name) for name in self._job["names"]}
        self.connection.named = names
        self._namespace |= names
        self._execute(self._job["setup"], "setup.py")
        classes = {name: self._namespace.get(name) for name in self._job["classes"]}
        self.connection.classes = {name: kind for name, kind in classes.items() if isinstance(kind, type)}
        self._namespace |= names  # once more: the setup may define a stub of the function that is tested
        self._ready = True

    def _run(self, test: Mapping[str, Any]) -> None:
        if "code" not in test:
            value = RemoteObject(self.connection, self._job["names"][0])(*test["args"])
            if not any(same(value, expected) for expected in test["expected"]):
                raise AssertionError("it returned another value")
            return
        self.connection.numbers.clear()
        self._ran.clear()
        before = dict(self._namespace)
        self._execute(test["code"], "test.py")
        new = {name: value for name, value in self._namespace.items() if before.get(name) is not value}
        run_all(new, self._ran, self._entry)

    def _execute(self, code: str, name: str) -> None:
        try:
            arrays = "numpy" in code or "numpy" in sys.modules
            if arrays:
                with contextlib.suppress(ImportError):
                    import numpy.testing  # noqa: F401 (its functions are guarded before the tests import them)
                self._arrays.guard()
            tree = rewrite(code, self._job["names"], arrays)
            exec(compile(tree, name, "exec"), self._namespace)  # from the data set, but sandboxed all the same
        except SystemExit as e:  # of the tests' own: one of the solution's is another error
            if e.code:
                raise AssertionError(f"the tests exited with {e.code}") from e

    def _time_is_up(self, *_: Any) -> None:
        self.connection.lost = True
        raise SolutionLostError("the time is up")


class _SolutionModule(types.ModuleType):
    """The module that tests import as `solution`."""

    def __init__(self, connection: SolutionConnection) -> None:
        super().__init__("solution")
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = None if self._connection.dry else self._connection.request("get", name)
        named = self._connection.dry or type(value) is RemoteObject
        return RemoteObject(self._connection, name) if named else value
