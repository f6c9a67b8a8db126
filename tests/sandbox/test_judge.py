# ruff: noqa: E501 (programs)
"""Tests run as their authors meant them, and the solution does not decide whether it is right."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from distflow.reward.code import unit_tests
from distflow.reward.errors import RewardError
from redteam import AIMED, AIMED_NUMPY, CHEATS, FORMS, FUNCTION_FORMS, HANGING, RIGHT, RIGHT_NUMPY
from redteam.run import attempt
from reward.helpers import batch_of, context, metrics_of, missing_protection, rewarding, score

if reason := missing_protection():
    pytest.skip(reason, allow_module_level=True)

RIGHT_ADD = "def add(a, b): return a + b"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"


def share_passed(program: str, tests: Any, **info: Any) -> float:
    return float(unit_tests("", program, tests, info, time_limit_s=2.0)["score"])


@pytest.mark.parametrize("form", FORMS)
def test_no_form_rewards_nothing(form: str) -> None:
    truth, info = FORMS[form]
    for program in ("", "I would rather not.", "def add(a, b): return None"):
        assert share_passed(program, truth, **info) == 0.0


@pytest.mark.parametrize("right", RIGHT, ids=lambda r: r.name)
def test_right_programs_are_rewarded_and_not_suspected(right: Any) -> None:
    outcome = attempt(right.program, right.truth, right.info)
    assert (outcome.score, outcome.suspicious) == (1.0, "")


@pytest.mark.parametrize("name", sorted(set(CHEATS) - HANGING))
def test_cheats_get_nothing(name: str) -> None:
    """Each in two forms; `bench/hacks.py` tries them in all."""
    forms = sorted(FUNCTION_FORMS)
    start = sum(name.encode()) % len(forms)
    for form in (forms[start], forms[(start + 7) % len(forms)]):
        assert attempt(CHEATS[name], *FUNCTION_FORMS[form]).score == 0.0, form


@pytest.mark.parametrize("name", AIMED)
def test_aimed_cheats_get_nothing(name: str) -> None:
    assert attempt(*AIMED[name], {}, seconds=2.0).score == 0.0


@pytest.fixture(scope="module")
def numpy_in_the_jail() -> None:
    if not (Path(sysconfig.get_path("purelib")) / "numpy").exists():
        pytest.skip("numpy is not in the folder of this interpreter's packages")


@pytest.mark.usefixtures("numpy_in_the_jail")
def test_arrays_are_compared_element_by_element() -> None:
    for name, (program, tests) in AIMED_NUMPY.items():
        assert attempt(program, tests, {}, packages=True).score == 0.0, name
    for right in RIGHT_NUMPY:
        assert attempt(right.program, right.truth, right.info, packages=True).score == 1.0, right.name


@pytest.mark.parametrize(
    "text",
    ["-" * 20_000 + "1", "~" * 20_000 + "1", "not " * 20_000 + "1", "(" * 20_000, "x" + ".x" * 20_000, "\0", "\ud800"],
    ids=["signs", "inversions", "nots", "brackets", "attributes", "zeros", "surrogates"],
)
def test_text_that_breaks_parsers_is_a_failed_program(text: str) -> None:
    """In each form: as a program, behind a prompt, and of a program that prints."""
    for truth in (
        ["assert f(1) == 1"],
        {"prompt": "def f(x):\n", "test": CHECK, "entry_point": "f"},
        [{"input": "", "output": "1"}],
    ):
        assert attempt(text, truth, {}, seconds=2.0).score == 0.0


NOT_RUN = {
    "an async test": "async def test_f():\n    assert f(1) == 2",
    "a generator": "def test_f():\n    yield\n    assert f(1) == 2",
    "a generator of tests": "def check_f(x, y):\n    assert f(x) == y\ndef test_f():\n    yield check_f, 1, 2",
    "an inherited method": "class Base:\n    def test_f(self):\n        assert f(1) == 2\nclass TestF(Base):\n    pass",
    "a nested class": "class TestOuter:\n    class TestInner:\n        def test_f(self):\n            assert f(1) == 2",
    "a mentioned function": "def test_f():\n    assert f(1) == 2\ntests = [test_f]",
    "a described function": "def check(candidate):\n    assert candidate(1) == 2\nprint(check)",
    "an async TestCase": (
        "import unittest\nclass TestF(unittest.IsolatedAsyncioTestCase):\n    async def test_f(self):\n        self.assertEqual(f(1), 2)"
    ),
    "a fixture of fixtures": (
        "import pytest\n@pytest.fixture\ndef a():\n    return 1\n@pytest.fixture\ndef b(a):\n    yield a + 1\n"
        "def test_f(b):\n    assert f(1) == b"
    ),
}


@pytest.mark.parametrize("test", NOT_RUN.values(), ids=NOT_RUN)
def test_every_test_runs(test: str) -> None:
    """Beside a first one, which asks something: a test that did not run would be passed by both programs."""
    tests, info = f"assert f(0) == 0\n{test}", {"entry_point": "f"}
    assert share_passed("def f(x): return 2 * x", tests, **info) == 1.0
    assert share_passed("def f(x): return 0", tests, **info) == 0.0


def test_a_test_that_was_called_is_not_run_again() -> None:
    tests = "seen = []\ndef test_f():\n    seen.append(f(1))\n    assert len(seen) == 1\ntest_f()"
    assert share_passed("def f(x): return x", tests) == 1.0


def test_there_are_enough_of_them() -> None:
    assert len(set(CHEATS.values())) >= 100
    assert len({(r.program, str(r.truth)) for r in RIGHT}) >= 50


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (CHECK, "ask the solution nothing.*entry_point"),
        ("def verify():\n    assert add(1, 2) == 3", "ask the solution nothing; fix the row"),
        (["assert 1 + 1 == 2"], "ask the solution nothing"),
        (["if False:\n    assert add(1, 2) == 3"], "ask the solution nothing"),
        (["assert np.isclose(add(1, 2), 3)"], r"No module named 'numpy'.*packages: true"),
        (["assert abs(add(1, 2) - 3) < EPS"], "use 'EPS', which they do not define"),
        (["assert close(add(1, 2), 3)"], r"let the solution's own close\(\) decide about add\(\)"),
        (["r = add(1, 2)\nassert close(r, 3) == True"], r"own close\(\) decide about add\(\)"),
        (["assert all(close(add(i, i), 2 * i) for i in range(3))"], r"own close\(\) decide about add\(\)"),
        (["assert add(1, 2) == reference(1, 2)"], r"compare add\(\) with reference\(\)"),
        (["assert add(1, 2) == 3", "assert gcd(4, 6) == 2"], r"ask gcd\(\) alone.*that of `math`"),
        (["with open('a') as file:\n    assert add(1, 2) == 3"], "open files: the solution does not see them"),
        (["import sqlite3\nc = sqlite3.connect('a.db')\nassert add(c, 2) == 3"], "open a database: the solution does"),
        (["import os\nassert add(1, 2) == 3\nos.remove('a')"], "remove files: the solution does not see files"),
        (
            ["import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    assert add(1, 2) == 3"],
            "does not see files",
        ),
        (["def test_add(monkeypatch):\n    assert add(1, 2) == 3"], "use the fixture 'monkeypatch'"),
        (
            ["from unittest.mock import patch\nwith patch('builtins.input'):\n    assert add(1, 2) == 3"],
            "patch 'builtins.input'",
        ),
        (["import pickle\nassert pickle.loads(add(1, 2)) == 3"], "use 'pickle'"),
        (["exec(add(1, 2))"], "use 'exec'"),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add b"}, "not the name of a function"),
        ([{"input": "1\n2", "output": "3", "testtype": "functional"}], "function that has no name"),
    ],
)
def test_tests_that_ask_nothing_are_an_error_in_the_data(tests: Any, message: str) -> None:
    for program in ("", RIGHT_ADD, "close = reference = lambda *a: True\nEPS = 9\ndef add(a, b): return 0"):
        with pytest.raises(ValueError, match=message):
            share_passed(program, tests)


def test_importing_the_solution_is_no_question() -> None:
    with pytest.raises(ValueError, match="ask the solution nothing"):
        share_passed(RIGHT_ADD, "from solution import add")
    assert share_passed("", "from solution import add") == 0.0


def test_the_error_names_the_row() -> None:
    function = {"call": "distflow.reward.code:unit_tests"}
    with rewarding(function) as reward, pytest.raises(RewardError, match=r"sample 101: .*ask the solution nothing"):
        score(reward, batch_of(["x", "y"], answer=[["assert f(1)"], [CHECK]]))


def test_declared_names_may_decide() -> None:
    program = "def push(s, x): return [*s, x]\ndef is_full(s): return len(s) > 1\nLIMIT = 2"
    tests = ["assert is_full(push(push([], 1), 2))", "assert not is_full(push([], 1))"]
    assert share_passed(program, tests, entry_point=["push", "is_full"]) == 1.0
    with pytest.raises(ValueError, match="is_full"):
        share_passed(program, tests)


def test_a_test_passes_only_if_it_asks() -> None:
    """Of a row whose tests do ask, one that does not fails; entries that prepare others are no tests."""
    tests = ["assert add(1, 2) == 3", "if add is None:\n    assert add(1, 2) == 3"]
    assert share_passed(RIGHT_ADD, tests) == 0.5
    assert share_passed(RIGHT_ADD, ["import math", "x = 2", "assert add(x, 1) == 3", "assert x == 2"]) == 1.0


def test_a_solution_that_ends_fails_whatever_the_tests_catch() -> None:
    test = "try:\n    add(1, 2)\nexcept:\n    pass"
    assert share_passed("import os\ndef add(a, b): os._exit(0)", [test]) == 0.0
    assert attempt("def add(a, b):\n    while True: pass", [test], {}, seconds=0.2).score == 0.0
    assert share_passed("def add(a, b): raise ValueError", [test]) == 1.0


SUSPICIOUS = {
    "def add(a, b):\n    if (a, b) == (10, 25): return 35\n    if (a, b) == (30, 45): return 75": "recognises 2 of 2 inputs",
    "def add(a, b): return {'(10, 25)': 35, '(30, 45)': 75}[str((a, b))]": "recognises 2 of 2 inputs",
    "def add(a, b):\n    if a == 10 and b == 25: return 35\n    return 75 if a == 30 and b == 45 else 0": "recognises 2 of 2",
    "def add(a, b):\n    match [a, b]:\n        case [10, 25]: return 35\n        case [30, 45]: return 75": "recognises 2",
    "import sys\ndef add(a, b): return sys._getframe(1).f_locals.get('x', a + b)": "_getframe",
    "import builtins\nbuiltins.len = lambda x: 3\ndef add(a, b): return a + b": "replaces builtins.len",
    "class A:\n    def __eq__(self, o): return True\ndef add(a, b): return a + b": "__eq__ returns a constant",
    "import os\nos.write(4, b'x')\ndef add(a, b): return a + b": "descriptors",
    "def add(a, b): raise SystemExit": "raised SystemExit",
    "def add(a, b): exit(0)": "raised SystemExit",
    "import os\ndef add(a, b): os._exit(0)": "ended its process",
}


@pytest.mark.parametrize(("program", "why"), SUSPICIOUS.items())
def test_what_looks_like_cheating_is_named(program: str, why: str) -> None:
    result = unit_tests("", program, ["assert add(10, 25) == 35", "assert add(30, 45) == 75"])
    assert why in str(result["suspicious"])


def test_a_program_that_was_not_called_is_suspicious() -> None:
    result = unit_tests("", "LIMIT = 7", "from solution import LIMIT\nassert LIMIT == 7")
    assert (result["score"], result["suspicious"]) == (1.0, "it passed without being called")


def test_suspicious_samples_are_counted_and_marked(tmp_path: Any) -> None:
    ctx = context()
    tests = ["assert add(10, 25) == 35", "assert add(30, 45) == 75"]
    cheat = next(iter(SUSPICIOUS))
    log = tmp_path / "rewards.log"
    with rewarding({"call": "distflow.reward.code:unit_tests"}, log=log) as reward:
        assert score(reward, batch_of([RIGHT_ADD, cheat, "no idea", RIGHT_ADD], answer=[tests] * 4), ctx) == [
            1,
            1,
            0,
            1,
        ]
    assert metrics_of(ctx)["reward/suspicious_frac"] == 0.25
    (line,) = (tmp_path / "suspicious.jsonl").read_text().splitlines()
    assert '"sample": 101' in line
    assert "recognises 2 of 2 inputs" in line
