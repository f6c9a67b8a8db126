"""The unit test reward: correct programs pass, and programs that cheat do not."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from distflow.reward.code import all_unit_tests, last_block, unit_tests
from distflow.reward.errors import RewardError
from distflow.reward.suite import FunctionCase, ProgramCase, parse_suite
from distflow.run.program import Program
from reward.helpers import batch_of, context, metrics_of, missing_protection, rewarding, score

if reason := missing_protection():
    pytest.skip(reason, allow_module_level=True)

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]


def share_passed(program: str, tests: Any, **info: Any) -> float:
    return float(unit_tests("", program, tests, info, time_limit_s=0.5, total_s=20.0)["score"])


def test_the_last_fenced_block_is_the_program() -> None:
    assert last_block("text ```x``` \n```python\na\n```\nor\n  ```py\nb\n  ```\nend") == "b\n"
    assert last_block("```\nopen\n") == "open\n"
    assert last_block("```\na\n```\n```\n") == "a\n"
    assert last_block("x = 1") == "x = 1"
    assert share_passed(f"First:\n```python\nwrong\n```\nNo:\n```python\n{ADD}```\nThat is it.", TESTS) == 1.0


@pytest.mark.parametrize(
    ("truth", "tests"),
    [
        (["assert f()"], ["assert f()"]),
        ("assert f()\nassert g()", ["assert f()\nassert g()"]),
        (json.dumps(["assert f()"]), ["assert f()"]),
        ([{"input": "1", "output": "2"}], [ProgramCase("1", "2")]),
        ([{"stdin": "1", "expected_output": "2"}], [ProgramCase("1", "2")]),
        ('{"inputs": ["1", ["2", "3"]], "outputs": ["4", 5]}', [ProgramCase("1", "4"), ProgramCase("2\n3", "5")]),
        ({"inputs": [[1, [2]]], "outputs": ["x"], "fn_name": "f"}, [FunctionCase([1, [2]], ["x"])]),
    ],
)
def test_the_usual_forms_of_tests(truth: Any, tests: list[Any]) -> None:
    assert parse_suite(truth, {}).tests == tests


@pytest.mark.parametrize("truth", [[], "", None, {"a": 1}, [3], [{"input": "1"}], ["assert f("]])
def test_a_ground_truth_without_valid_tests_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="test"):
        share_passed(ADD, truth)


def test_the_share_of_tests_that_pass() -> None:
    assert share_passed(ADD, TESTS) == 1.0
    assert share_passed(ADD, [*TESTS, "assert add(1, 1) == 3", "assert sub(1, 1) == 0"]) == 0.5
    assert share_passed("def add(a, b): return 3", TESTS, all_or_nothing=True) == 0.0
    assert all_unit_tests("", "def add(a, b): return 3", TESTS) == {"score": 0.0, "all_passed": 0.0, "suspicious": ""}
    assert unit_tests("", ADD, TESTS) == {"score": 1.0, "all_passed": 1.0, "suspicious": ""}


def test_programs_that_read_and_print() -> None:
    cases = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10 \n\n"}, {"input": "x", "output": "x"}]
    assert share_passed("print(sum(map(int, input().split())))", cases) == pytest.approx(2 / 3)
    assert share_passed("print(3)\nraise SystemExit(1)", cases) == 0.0


def test_tests_may_use_the_solution_as_tests_do() -> None:
    program = (
        "import math\nfrom collections import Counter, namedtuple\n"
        "P = namedtuple('P', 'x y')\nLIMIT = 7\n"
        "class Stack:\n"
        "    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n"
        "class Solution:\n    def twice(self, x): return 2 * x\n"
        "def sort(x): x.sort()\n"
        "def count(x): return Counter(x)\n"
        "def point(): return P(1, 2)\n"
        "def gen(n): yield from range(n)\n"
        "def fail(): raise ValueError('no')\n"
        "def root(x): return math.sqrt(x)\n"
        "def big(): return 10 ** 5000\n"
        "def kinds(): return [None, True, 1.5, 1j, b'b', (1,), {1}, frozenset([2]), {(1, 2): 'x'}, float('inf')]\n"
    )
    tests = [
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]",
        "assert count('aab') == {'a': 2, 'b': 1}",
        "from solution import LIMIT\nassert point() == (1, 2) and LIMIT == 7",
        "assert list(gen(3)) == [0, 1, 2]",
        "g = gen(2)\nassert next(g) == 0",
        "try:\n    fail()\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'",
        "import math\nassert math.isclose(root(2), 1.41421356, rel_tol=1e-6)",
        "assert abs(root(2) - 1.4142) < 1e-3 and isinstance(root(4), float)",
        "s = Stack()\ns.push(1)\ns.push([2])\nassert len(s) == 2 and s.pop() == [2] and s.items == [1]",
        "assert Solution().twice(x=4) == 8",
        "def check(f):\n    for i in range(3):\n        assert f(x=i) == 2 * i\ncheck(Solution().twice)",
        "assert big() == 10 ** 5000",
        "assert kinds() == [None, True, 1.5, 1j, b'b', (1,), {1}, {2}, {(1, 2): 'x'}, float('inf')]",
        "assert helper(Solution().twice(1)) == 3",
    ]
    for test in tests:
        assert share_passed(program, [test], setup="def helper(x): return x + 1") == 1.0, test


def test_one_test_that_hangs_or_dies_does_not_cost_the_others() -> None:
    program = (
        "import os\n"
        "def f(x):\n"
        "    while x == 1: pass\n"
        "    if x == 2: os._exit(0)\n"
        "    if x == 3: os.kill(os.getpid(), 11)\n"
        "    return x\n"
    )
    assert share_passed(program, [f"assert f({i}) == {i}" for i in range(6)]) == 0.5


def test_a_solution_that_does_not_load_passes_nothing() -> None:
    lenient = "try:\n    add(1)\nexcept Exception:\n    pass"
    assert share_passed(ADD, [lenient]) == 1.0
    for end in (
        "raise ValueError",
        "import sys\nsys.exit(0)",
        "input()",
        "import os\nos._exit(0)",
        "import nowhere",
        ")",
    ):
        assert share_passed(ADD + end, [lenient, *TESTS]) == 0.0


def test_the_total_time_is_bounded() -> None:
    began = time.monotonic()
    loop = "while True: pass"
    assert unit_tests("", loop, [{"input": "", "output": ""}] * 99, time_limit_s=9, total_s=0.5)["score"] == 0.0
    assert unit_tests("", loop, ["assert f()"] * 99, time_limit_s=9, total_s=0.5)["score"] == 0.0
    assert unit_tests("", loop, ["assert f()"] * 99, time_limit_s=0.2, total_s=99)["score"] == 0.0  # it never loads
    assert time.monotonic() - began < 20


CHEATS = {
    "exits at once": "import sys\nsys.exit(0)",
    "exits without a trace": "import os\nos._exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit when called": "def add(a, b): raise SystemExit(0)",
    "prints success": "print('1' * 100, flush=True)\nprint('OK', 'passed')\ndef add(a, b): return 0",
    "an object that equals everything": (
        "class Any:\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 3\n"
        "def add(a, b): return Any()"
    ),
    "a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(0)"
    ),
    "a text that equals everything": (
        "class Any(str):\n"
        "    def __eq__(self, other): return True\n"
        "    def __str__(self): return self\n"
        "def add(a, b): return Any('z')"
    ),
    "assertions that are none": (
        "import builtins\nbuiltins.AssertionError = type('A', (SystemExit,), {})\n"
        "__debug__ and None\ndef add(a, b): return 0"
    ),
    "builtins that lie": (
        "import builtins\n"
        "for name in ('abs', 'len', 'sorted', 'isinstance', 'all', 'any', 'bool', 'type', 'compile'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\n"
        "def add(a, b): return 0"
    ),
    "looks for what is expected in the frames": (
        "import sys\n"
        "def add(a, b):\n"
        "    frame, seen = sys._getframe(), []\n"
        "    while frame: seen.append(repr((frame.f_locals, frame.f_globals))); frame = frame.f_back\n"
        "    return 3 if ' '.join(['assert', 'add']) in ''.join(seen) else 0"
    ),
    "looks for what is expected in memory": (
        "import gc\n"
        "def add(a, b):\n"
        "    needle = ' '.join(['assert', 'add'])\n"
        "    texts = [str(x)[:10**5] for x in gc.get_objects() if isinstance(x, (list, tuple, dict))]\n"
        "    return 3 if any(needle in x for x in texts) else 0"
    ),
    "writes the verdict itself": (
        "import os\n"
        "for fd in range(3, 32):\n"
        "    try: os.write(fd, b'1' * 10)\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "answers in advance": (
        "import os\nos.write(4, b'[\"ok\", true, {}]\\n' * 100)\ndef add(a, b): return 0"
    ),
    "patches the module that serves the solution": (
        "import sys, json\n"
        "main = sys.modules['distflow.sandbox.remote_tests']\n"
        "main.run_tests = main.pack = main.unpack = lambda *a: True\n"
        "json.dumps = lambda *a: '[\"ok\", true, {}]'\n"
        "def add(a, b): return 0"
    ),
    "reports changed arguments": (
        "import os\nos.write(4, b'[\"ok\", 0, {\"0\": [1], \"1\": [], \"7\": 3}]\\n' * 9)\ndef add(a, b): return 0"
    ),
    "a tracer": "import sys, threading\nsys.settrace(lambda *a: sys.exit(0))\ndef add(a, b): return 0",
    "leaves a file behind": (
        "open('test.py', 'w').write('pass')\nopen('sitecustomize.py', 'w').write('')\ndef add(a, b): return 0"
    ),
    "talks nonsense": "import os\nos.write(4, b'rubbish\\n' * 9)\ndef add(a, b): return 0",
    "no Python": "I would rather not.",
}  # fmt: skip


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_cheats_do_not_pass(program: str) -> None:
    tests = ["assert add(1, 2) == 3", "assert not add(1, 2) != 3", "assert add(1, 2) in [3]"]
    tests += ["assert [3] == [add(1, 2)]", "assert {add(1, 2): 1} == {3: 1}"]
    tests += ["assert abs(add(1, 2) - 3) < 1e-6", "assert (lambda x: x == 3)(add(1, 2))"]
    assert share_passed(program, tests) == 0.0


def test_cheats_on_printed_answers_do_not_pass() -> None:
    for program in ("import os\nos._exit(0)", "print('ok')", "import sys\nsys.stdout = None", "print(open(4).read())"):
        assert share_passed(program, [{"input": "1", "output": "2"}]) == 0.0


def test_it_runs_as_a_reward_of_a_pool() -> None:
    ctx = context()
    call = {"call": "distflow.reward.code:unit_tests", "args": {"time_limit_s": 1.0}}
    with rewarding(call) as reward:
        responses = [f"```python\n{ADD}```", "no idea", "def add(a, b): return 3"]
        assert score(reward, batch_of(responses, answer=[TESTS] * 3), ctx) == [1.0, 0.0, 0.5]
    assert metrics_of(ctx)["reward/all_passed/mean"] == pytest.approx(1 / 3)


def test_options_arrive_from_a_config(tmp_path: Path) -> None:
    function = {"call": "distflow.reward.code:unit_tests", "args": {"total_s": 3.0}}
    (tmp_path / "data.jsonl").write_text('{"prompt": "p"}\n')
    text = json.dumps({"flow": "grpo", "data": "data.jsonl", "model": "none", "reward": function})
    (tmp_path / "grpo.yaml").write_text(text)
    args = Program.load(tmp_path / "grpo.yaml").role_bindings["reward"].args
    assert args["functions"][0]["args"] == {"total_s": 3.0}


def test_a_wrong_option_is_an_error_before_any_sample() -> None:
    call = {"call": "distflow.reward.code:unit_tests", "args": {"accept_missing": ["internet"]}}
    with (
        rewarding(call, on_failure=0.0) as reward,
        pytest.raises(RewardError, match="there is no protection 'internet'"),
    ):
        score(reward, batch_of(["x"], answer=[TESTS]))
