"""Scores programs with unit tests in a sandbox: `call: distflow.reward.code:unit_tests`, or `all_unit_tests`."""

import builtins
import functools
import itertools
import json
import os
import re
import symtable
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distflow.reward.sandbox.sandbox import Limits, Sandbox

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
# Every jail has imported this module already, so it costs nothing per program.
_IMPORT = "from distflow.reward.sandbox.remote_tests import run_tests, serve_solution\n"
_INPUT_KEYS, _OUTPUT_KEYS = ("input", "stdin"), ("output", "expected_output", "stdout", "expected")


@dataclass(frozen=True)
class Case:
    """A test of a program that reads `stdin` and must print `stdout`."""

    stdin: str
    stdout: str


class UnitTests:
    """A reward function that returns the share of tests that pass; with `all_or_nothing`, 1 if all pass, else 0."""

    def __init__(self, all_or_nothing: bool = False) -> None:
        self.all_or_nothing = all_or_nothing

    def prepare(self, accept_missing: Sequence[str] = (), packages: bool = False, **_: Any) -> None:
        """Starts the sandboxes, so that missing isolation is an error before the first sample."""
        _sandboxes(tuple(accept_missing), packages)

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        time_limit_s: float = 5.0,
        total_s: float = 20.0,
        memory_mb: int = 1024,
        packages: bool = False,
        accept_missing: Sequence[str] = (),
    ) -> dict[str, float]:
        """Tests the last fenced block of the response, or the whole response if there is none.

        `ground_truth` is Python with asserts (a string is one test, a list has one test per entry), or a list of
        `{input, output}`, or `{inputs, outputs}`, or `{inputs, outputs, fn_name}`; any of these may be JSON.
        `extra_info` may hold `setup`, Python that runs before the tests, and `all_or_nothing`. Each test may take
        `time_limit_s` of CPU time and twice that of wall time, all tests together `total_s` of wall time; tests that
        are not reached count as failed.
        """
        info = extra_info or {}
        program = last_block(solution_str)
        tests = parse_tests(ground_truth, program)
        limits = Limits(cpu_s=time_limit_s, wall_s=2 * time_limit_s, memory_mb=memory_mb)
        solver, tester = _sandboxes(tuple(accept_missing), packages)
        deadline = time.monotonic() + total_s
        asserts = [t for t in tests if isinstance(t, str)]
        cases = [t for t in tests if isinstance(t, Case)]
        strict, passed = self.all_or_nothing or bool(info.get("all_or_nothing")), 0
        outcomes = itertools.chain(
            _run_cases(solver, program, cases, limits, deadline),
            _run_asserts(solver, tester, program, str(info.get("setup") or ""), asserts, limits, deadline),
        )
        for outcome in outcomes:
            passed += outcome
            if strict and not outcome:
                break
        all_passed = float(passed == len(tests))
        return {"score": all_passed if strict else passed / len(tests), "all_passed": all_passed}


unit_tests = UnitTests()
all_unit_tests = UnitTests(all_or_nothing=True)


def last_block(response: str) -> str:
    """Returns the last fenced block, closed or not, or the whole response if there is none."""
    blocks = [b for b in _FENCED.findall(response) if b.strip()]
    return blocks[-1] if blocks else response


def parse_tests(truth: Any, program: str) -> list[str | Case]:
    """Reads any of the usual forms of a ground truth; returns Python with asserts, or cases."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            truth = [truth]
    if isinstance(truth, Mapping) and "inputs" in truth and "outputs" in truth:
        pairs = list(zip(truth["inputs"], truth["outputs"], strict=True))
        name = truth.get("fn_name")
        tests = [_assert_call(name, *p, program) if name else Case(_to_text(p[0]), _to_text(p[1])) for p in pairs]
    elif isinstance(truth, list):
        tests = [t if isinstance(t, str) else _parse_case(t) for t in truth]
    else:
        tests = []
    if not any(t.strip() if isinstance(t, str) else True for t in tests):
        raise ValueError(
            f"the ground truth {str(truth)[:60]!r} holds no tests; use a list of strings with asserts,"
            " or a list of {input, output}"
        )
    return tests


def _parse_case(test: Any) -> Case:
    if isinstance(test, Mapping):
        stdin, stdout = (next((test[k] for k in keys if k in test), None) for keys in (_INPUT_KEYS, _OUTPUT_KEYS))
        if stdout is not None:
            return Case(_to_text(stdin or ""), _to_text(stdout))
    raise ValueError(
        f"the test {str(test)[:60]!r} is neither a string nor a dict with `input` and `output`; fix the row"
    )


def _assert_call(name: str, args: Any, expected: Any, program: str) -> str:
    """Writes an assert on a function or, as on LeetCode, on a method of `Solution`."""
    owner = "Solution()." if re.search(r"^class Solution\b", program, re.MULTILINE) else ""
    return f"assert {owner}{name}({', '.join(map(repr, args))}) == {expected!r}"


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _run_cases(solver: Sandbox, program: str, cases: Sequence[Case], limits: Limits, deadline: float) -> Iterator[bool]:
    for case in cases:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        result = solver.run(program, case.stdin, replace(limits, wall_s=min(limits.wall_s, left)))
        yield result.status == "ok" and _lines(result.stdout) == _lines(case.stdout)


def _lines(text: str) -> list[str]:
    """Splits into lines; trailing whitespace and trailing empty lines do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run_asserts(
    solver: Sandbox, tester: Sandbox, program: str, setup: str, tests: Sequence[str], limits: Limits, deadline: float
) -> Iterator[bool]:
    """Restarts a solution that exits or hangs, so that it fails only the test in which it does."""
    names = _undefined_names("\n".join([setup, *tests]))
    done = 0
    while done < len(tests) and (left := deadline - time.monotonic()) > 0:
        total_limits = replace(limits, cpu_s=left, wall_s=left)
        solving = f"{_IMPORT}serve_solution({program!r})"
        testing = f"{_IMPORT}run_tests({setup!r}, {list(tests[done:])!r}, {names!r}, {limits.wall_s})"
        outcomes = _run_pair((solver, solving), (tester, testing), total_limits)
        yield from outcomes
        done += max(1, len(outcomes))


def _run_pair(solution: tuple[Sandbox, str], tests: tuple[Sandbox, str], limits: Limits) -> list[bool]:
    """Runs both at once, connected by pipes; returns the outcomes of the tests that finished."""
    requests, replies, outcomes = os.pipe(), os.pipe(), os.pipe()
    try:
        solution_run = solution[0].start(solution[1], (requests[0], replies[1]), limits)
        tests_run = tests[0].start(tests[1], (replies[0], requests[1], outcomes[1]), limits)
    finally:
        for fd in (*requests, *replies, outcomes[1]):
            os.close(fd)
    with open(outcomes[0], "rb") as file:
        tests_run.wait()
        solution_run.stop()
        return [outcome == ord("1") for outcome in file.read()]


def _undefined_names(tests: str) -> list[str]:
    """Returns the names that tests use but do not define: those of the solution."""
    try:
        top = symtable.symtable(tests, "tests", "exec")
    except SyntaxError as e:
        raise ValueError(f"the tests are not valid Python: {e}; fix the row") from e
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return sorted(_global_names(top) - defined - set(dir(builtins)))


def _global_names(table: symtable.SymbolTable) -> set[str]:
    names = {s.get_name() for s in table.get_symbols() if s.is_global() or table.get_type() == "module"}
    return names.union(*map(_global_names, table.get_children()))


@functools.cache
def _sandboxes(accept_missing: tuple[str, ...], packages: bool) -> tuple[Sandbox, Sandbox]:
    """Returns one sandbox for solutions and one for tests; they live as long as this process."""
    return Sandbox(None, accept_missing, packages), Sandbox(None, accept_missing, packages)
