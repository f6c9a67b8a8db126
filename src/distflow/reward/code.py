"""Programs, judged by unit tests in a sandbox: `call: distflow.reward.code:unit_tests`, or `all_unit_tests`."""

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

from distflow.reward.sandbox import Limits, Sandbox

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_USE = "from distflow.reward.witness import answer, judge\n"  # each sandbox has it in memory
_INPUTS, _OUTPUTS = ("input", "stdin"), ("output", "expected_output", "stdout", "expected")


@dataclass(frozen=True)
class Case:
    """A program that reads `stdin` must print `stdout`."""

    stdin: str
    stdout: str


class UnitTests:
    """A reward function: the share of tests that pass, or with `all_or_nothing` 1 if all do and else 0."""

    def __init__(self, all_or_nothing: bool = False) -> None:
        self.all_or_nothing = all_or_nothing

    def prepare(self, accept_missing: Sequence[str] = (), packages: bool = False, **_: Any) -> None:
        """Before any sample: whatever this machine cannot contain is told now."""
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
        """Takes the last fenced block of the response, or all of it.

        `ground_truth` is Python that asserts (a text, or a list of which each counts as a test), or a list of
        `{input, output}`, or `{inputs, outputs}`, or `{inputs, outputs, fn_name}`; any of these may be JSON.
        `extra_info` may hold `setup`, Python for all tests, and `all_or_nothing`. Each test has `time_limit_s` of CPU
        time and twice that by the clock, all of them `total_s`; those that are not reached count as failed.
        """
        info = extra_info or {}
        program = last_block(solution_str)
        tests = parse_tests(ground_truth, program)
        limits = Limits(cpu_s=time_limit_s, wall_s=2 * time_limit_s, memory_mb=memory_mb)
        solver, judge = _sandboxes(tuple(accept_missing), packages)
        end = time.monotonic() + total_s
        asserts = [t for t in tests if isinstance(t, str)]
        cases = [t for t in tests if isinstance(t, Case)]
        strict, passed = self.all_or_nothing or bool(info.get("all_or_nothing")), 0
        verdicts = itertools.chain(
            _run_cases(solver, program, cases, limits, end),
            _run_asserts(solver, judge, program, str(info.get("setup") or ""), asserts, limits, end),
        )
        for verdict in verdicts:
            passed += verdict
            if strict and not verdict:
                break
        every = float(passed == len(tests))
        return {"score": every if strict else passed / len(tests), "all_passed": every}


unit_tests = UnitTests()
all_unit_tests = UnitTests(all_or_nothing=True)


def last_block(response: str) -> str:
    """The last fenced block, also one that is not closed; all of the response if there is none."""
    blocks = [b for b in _FENCED.findall(response) if b.strip()]
    return blocks[-1] if blocks else response


def parse_tests(truth: Any, program: str) -> list[str | Case]:
    """Any of the usual forms, as asserts or cases."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            truth = [truth]
    if isinstance(truth, Mapping) and "inputs" in truth and "outputs" in truth:
        pairs = list(zip(truth["inputs"], truth["outputs"], strict=True))
        name = truth.get("fn_name")
        tests = [_call(name, *p, program) if name else Case(_text(p[0]), _text(p[1])) for p in pairs]
    elif isinstance(truth, list):
        tests = [t if isinstance(t, str) else _case(t) for t in truth]
    else:
        tests = []
    if not any(t.strip() if isinstance(t, str) else True for t in tests):
        raise ValueError(
            f"the ground truth {str(truth)[:60]!r} holds no tests; write asserts as a list of texts, or"
            " a list of {input, output}"
        )
    return tests


def _case(given: Any) -> Case:
    if isinstance(given, Mapping):
        found = [next((given[k] for k in keys if k in given), None) for keys in (_INPUTS, _OUTPUTS)]
        if found[1] is not None:
            return Case(_text(found[0] or ""), _text(found[1]))
    raise ValueError(f"the test {str(given)[:60]!r} is neither a text nor has it `input` and `output`")


def _call(name: str, args: Any, expected: Any, program: str) -> str:
    """As LeetCode has it: a function, or a method of `Solution`."""
    owner = "Solution()." if re.search(r"^class Solution\b", program, re.MULTILINE) else ""
    return f"assert {owner}{name}({', '.join(map(repr, args))}) == {expected!r}"


def _text(given: Any) -> str:
    return given if isinstance(given, str) else "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _run_cases(solver: Sandbox, program: str, cases: Sequence[Case], limits: Limits, end: float) -> Iterator[bool]:
    for case in cases:
        left = end - time.monotonic()
        if left <= 0:
            return
        result = solver.run(program, case.stdin, replace(limits, wall_s=min(limits.wall_s, left)))
        yield result.status == "ok" and _lines(result.stdout) == _lines(case.stdout)


def _lines(text: str) -> list[str]:
    """Blanks at the end of a line, and empty lines at the end, are nobody's fault."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run_asserts(
    solver: Sandbox, judge: Sandbox, program: str, setup: str, tests: Sequence[str], limits: Limits, end: float
) -> Iterator[bool]:
    """A solution that ends, or hangs, is started anew for the tests that follow."""
    names = _names("\n".join([setup, *tests]))
    done = 0
    while done < len(tests) and (left := end - time.monotonic()) > 0:
        most = replace(limits, cpu_s=left, wall_s=left)
        judging = f"{_USE}judge({setup!r}, {list(tests[done:])!r}, {names!r}, {limits.wall_s})"
        verdicts = _run_pair((solver, f"{_USE}answer({program!r})"), (judge, judging), most)
        yield from verdicts
        done += max(1, len(verdicts))


def _run_pair(solution: tuple[Sandbox, str], tests: tuple[Sandbox, str], limits: Limits) -> list[bool]:
    """Both at once, joined by pipes; the verdicts on the tests that came to an end."""
    requests, replies, verdicts = os.pipe(), os.pipe(), os.pipe()
    try:
        solved = solution[0].start(solution[1], (requests[0], replies[1]), limits)
        judged = tests[0].start(tests[1], (replies[0], requests[1], verdicts[1]), limits)
    finally:
        for fd in (*requests, *replies, verdicts[1]):
            os.close(fd)
    with open(verdicts[0], "rb") as told:
        judged.wait()
        solved.stop()
        return [v == ord("1") for v in told.read()]


def _names(tests: str) -> list[str]:
    """What tests mention without having made it: the solution's."""
    try:
        top = symtable.symtable(tests, "tests", "exec")
    except SyntaxError as e:
        raise ValueError(f"the tests are no Python: {e}") from e
    own = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return sorted(_mentioned(top) - own - set(dir(builtins)))


def _mentioned(table: symtable.SymbolTable) -> set[str]:
    found = {s.get_name() for s in table.get_symbols() if s.is_global() or table.get_type() == "module"}
    return found.union(*map(_mentioned, table.get_children()))


@functools.cache
def _sandboxes(accept_missing: tuple[str, ...], packages: bool) -> tuple[Sandbox, Sandbox]:
    """For solutions and for tests; they live as long as this process."""
    return Sandbox(None, accept_missing, packages), Sandbox(None, accept_missing, packages)
