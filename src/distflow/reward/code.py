"""Scores programs with unit tests in a sandbox: `call: distflow.reward.code:unit_tests`, or `all_unit_tests`."""

import functools
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distflow.reward.errors import RewardError
from distflow.reward.suite import FunctionCase, ProgramCase, Suite, parse_suite
from distflow.sandbox.compare import same_output
from distflow.sandbox.sandbox import ProgramLimits, Sandbox, SandboxError

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
# Every jail has imported this module already, so it costs nothing per program.
_IMPORT = "from distflow.sandbox.remote_tests import run_tests, serve_solution, print_suspicions\n"
_READING = ProgramLimits(cpu_s=2.0, wall_s=5.0)
_OUTPUT_KB = 1024  # beyond what a program should print


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
    ) -> dict[str, float | str]:
        """Tests the last fenced block of the response, or the whole response if there is none.

        `ground_truth` has the tests in the form of a data set, as a value or as JSON (`suite.py` has the forms).
        `extra_info` may hold `setup`, Python that runs before the tests, `entry_point`, the function that they test,
        and `all_or_nothing`. Each test may take `time_limit_s` of CPU time and twice that of wall time, all tests
        together `total_s` of wall time; tests that are not reached count as failed.
        """
        info = extra_info or {}
        program = last_block(solution_str)
        suite = parse_suite(ground_truth, info)
        limits = ProgramLimits(cpu_s=time_limit_s, wall_s=2 * time_limit_s, memory_mb=memory_mb)
        solver, tester = _sandboxes(tuple(accept_missing), packages)
        deadline = time.monotonic() + total_s
        strict, passed = self.all_or_nothing or bool(info.get("all_or_nothing")), 0
        observed: list[str] = []
        outcomes = itertools.chain(
            _run_cases(solver, program, suite, limits, deadline),
            _run_remote(solver, tester, program, suite, limits, deadline, observed),
        )
        for outcome in outcomes:
            passed += outcome
            if strict and not outcome:
                break
        all_passed = float(passed == len(suite.tests))
        return {
            "score": all_passed if strict else passed / len(suite.tests),
            "all_passed": all_passed,
            "suspicious": "; ".join(dict.fromkeys([*observed, *_suspicions(tester, program, suite.inputs)])),
        }


unit_tests = UnitTests()
all_unit_tests = UnitTests(all_or_nothing=True)


def last_block(response: str) -> str:
    """Returns the last fenced block, closed or not, or the whole response if there is none."""
    blocks = [b for b in _FENCED.findall(response) if b.strip()]
    return blocks[-1] if blocks else response


def _run_cases(solver: Sandbox, program: str, suite: Suite, limits: ProgramLimits, deadline: float) -> Iterator[bool]:
    for case in (t for t in suite.tests if isinstance(t, ProgramCase)):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        output_kb = _OUTPUT_KB + 2 * len(case.stdout.encode(errors="replace")) // 1024
        result = solver.run(program, case.stdin, replace(limits, wall_s=min(limits.wall_s, left), output_kb=output_kb))
        yield result.status == "ok" and same_output(result.stdout, case.stdout)


def _run_remote(
    solver: Sandbox,
    tester: Sandbox,
    program: str,
    suite: Suite,
    limits: ProgramLimits,
    deadline: float,
    observed: list[str],
) -> Iterator[bool]:
    """Restarts a solution that exits or hangs, so that it fails only the test in which it does.

    Appends to `observed` the reasons to suspect how it ran.
    """
    tests = [_encode(t) for t in suite.tests if not isinstance(t, ProgramCase)]
    arguments = (program, suite.prefix, suite.shared, suite.classes)
    solving = f"{_IMPORT}serve_solution{arguments!r}"
    done = 0
    while done < len(tests) and (left := deadline - time.monotonic()) > 0:
        testing = _testing(suite, tests[done:], limits.wall_s)
        outcomes, summary = _run_pair((solver, solving), (tester, testing), replace(limits, cpu_s=left, wall_s=left))
        if len(outcomes) == len(tests) and not summary["asked"] and not summary["lost"]:
            _check_asks(tester, suite, tests, limits)
        observed += summary["strange"]
        if any(outcomes) and not summary["calls"]:
            observed.append("it passed without being called")
        yield from outcomes
        done += max(1, len(outcomes))
        if summary["lost"] and not summary["loaded"]:
            return  # it would not load for the next test either


def _testing(suite: Suite, tests: Sequence[Mapping[str, Any]], seconds: float, dry: bool = False) -> str:
    job = {"names": suite.names, "classes": suite.classes, "setup": suite.setup, "tests": tests, "seconds": seconds}
    return f"{_IMPORT}run_tests({json.dumps({**job, 'dry': dry})!r})"


def _check_asks(tester: Sandbox, suite: Suite, tests: Sequence[Mapping[str, Any]], limits: ProgramLimits) -> None:
    """Runs the tests where there is no solution: if they ask nothing, it is the row that is wrong."""
    outcomes, summary = _run_pair(None, (tester, _testing(suite, tests, limits.wall_s, dry=True)), limits)
    if len(outcomes) == len(tests) and not summary["asked"]:
        reason = f" ({summary['error']})" if summary["error"] else ""
        cure = "set `packages: true`, or fix the row" if "ModuleNotFound" in reason else "fix the row"
        raise ValueError(f"the tests ask the solution nothing{reason}; {cure}")


def _suspicions(tester: Sandbox, program: str, inputs: frozenset[str]) -> list[str]:
    """Reads a program in the jail, which its text may break."""
    job = json.dumps({"program": program, "inputs": sorted(inputs)})
    result = tester.run(f"{_IMPORT}print_suspicions({job!r})", limits=_READING)
    try:
        return [str(reason) for reason in json.loads(result.stdout)]
    except ValueError:
        return [f"its text cannot be read: {result.reason}"]


def _encode(test: str | FunctionCase) -> dict[str, Any]:
    return {"code": test} if isinstance(test, str) else {"args": test.args, "expected": test.expected}


def _run_pair(
    solution: tuple[Sandbox, str] | None, tests: tuple[Sandbox, str], limits: ProgramLimits
) -> tuple[list[bool], Mapping[str, Any]]:
    """Runs both at once, connected by pipes; returns the outcomes of the tests that finished, and a summary."""
    requests, replies, outcomes = os.pipe(), os.pipe(), os.pipe()
    try:
        solution_run = solution and solution[0].start(solution[1], (requests[0], replies[1]), limits)
        tests_run = tests[0].start(tests[1], (replies[0], requests[1], outcomes[1]), limits)
    finally:
        for fd in (*requests, *replies, outcomes[1]):
            os.close(fd)
    with open(outcomes[0], "rb") as file:
        tests_run.wait()
        end = solution_run and solution_run.stop()
        passed, _, text = file.read().partition(b"\n")
    summary = json.loads(text) if text else _unfinished()
    if summary["lost"] and end and end.status == "ok":
        summary["strange"].append("it ended its process during the tests")
    return [byte == ord("1") for byte in passed], summary


def _unfinished() -> dict[str, Any]:
    """Returns the summary of a judge that was killed."""
    return {"asked": 0, "calls": 0, "lost": True, "loaded": True, "strange": [], "error": ""}


@functools.cache
def _sandboxes(accept_missing: tuple[str, ...], packages: bool) -> tuple[Sandbox, Sandbox]:
    """Returns one sandbox for solutions and one for tests; they live as long as this process."""
    try:
        return Sandbox(None, accept_missing, packages), Sandbox(None, accept_missing, packages)
    except SandboxError as e:
        accepted = f"args: {{accept_missing: [{', '.join([*accept_missing, *e.missing])}]}}"
        hint = f"; or accept the risk with `{accepted}` of the reward function" if e.missing else ""
        raise RewardError(f"{e}{hint}") from None
