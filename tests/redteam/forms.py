# ruff: noqa: E501 (programs and tests on a line each)
"""Every form of tests that a data set may have, about a function `add(a, b)` or a program that adds what it reads."""

import base64
import json
import zlib
from typing import Any

ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add([1], [2]) == [1, 2]"]
CHECK = (
    "METADATA = {'author': 'x'}\n\ndef check(candidate):\n"
    "    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\n    assert candidate([1], [2]) == [1, 2]\n"
)
PROMPT = 'from typing import Any\n\ndef add(a: Any, b: Any) -> Any:\n    """ Adds. """\n'
UNITTEST = (
    "import unittest\nclass TestAdd(unittest.TestCase):\n    def setUp(self):\n        self.one = 1\n"
    "    def test_numbers(self):\n        self.assertEqual(add(self.one, 2), 3)\n"
    "    def test_close(self):\n        self.assertAlmostEqual(add(0.1, 0.2), 0.3)\n"
    "    def test_refuses(self):\n        with self.assertRaises(TypeError):\n            add(1, 'a')\n"
)
PYTEST = (
    "import pytest\n\n@pytest.fixture\ndef one():\n    return 1\n\n"
    "@pytest.mark.parametrize('a, b, c', [(1, 2, 3), ('a', 'b', 'ab')])\ndef test_adds(a, b, c):\n    assert add(a, b) == c\n\n"
    "def test_near(one):\n    assert add(one, 0.5) == pytest.approx(1.5)\n\n"
    "def test_refuses():\n    with pytest.raises(TypeError):\n        add(1, 'a')\n"
)
CALLS = {"inputs": [[1, 2], ["a", "b"], [[1], [2]]], "outputs": [3, "ab", [1, 2]], "fn_name": "add"}
STDIN = {"inputs": ["1 2\n", "20 22\n"], "outputs": ["3\n", "42\n"]}
FUNCTIONAL = [
    {"input": "1\n2", "output": "3", "testtype": "functional"},
    {"input": '"a"\n"b"', "output": '"ab"', "testtype": "functional"},
]
PRINTED = [
    {"input": "1 2\n", "output": "3", "testtype": "stdin"},
    {"input": "20 22\n", "output": "42", "testtype": "stdin"},
]

Form = tuple[Any, dict[str, Any]]  # the ground truth and the extra info


def compressed(tests: Any) -> str:
    """Returns tests as LiveCodeBench has its private ones: a pickled text of JSON, compressed."""
    text = json.dumps(tests).encode()
    pickled = b"\x80\x04X" + len(text).to_bytes(4, "little") + text + b"."
    return base64.b64encode(zlib.compress(pickled)).decode()


FUNCTION_FORMS: dict[str, Form] = {
    "a list of asserts": (ASSERTS, {}),
    "asserts in one text": ("\n".join(ASSERTS), {}),
    "asserts, with an entry point": (ASSERTS, {"entry_point": "add"}),
    "MBPP": ({"test_list": ASSERTS[:2], "test_setup_code": "", "challenge_test_list": ASSERTS[2:]}, {}),
    "MBPP, sanitised": (json.dumps({"test_list": ASSERTS, "test_imports": ["import math"]}), {}),
    "HumanEval": ({"prompt": PROMPT, "test": CHECK, "entry_point": "add"}, {}),
    "HumanEval, its test alone": (CHECK, {"entry_point": "add"}),
    "HumanEval, called at the end": (CHECK + "\ncheck(add)", {}),
    "LeetCode's check": ({"test": CHECK, "entry_point": "Solution().add"}, {}),
    "pytest": (PYTEST, {}),
    "pytest, importing the solution": ("from solution import add\n" + PYTEST, {}),
    "pytest, a class": ("class TestAdd:\n    def test_one(self):\n        assert add(1, 2) == 3 and add('a', 'b') == 'ab'\n", {}),
    "unittest": (UNITTEST, {}),
    "unittest, run by itself": (UNITTEST + "\nif __name__ == '__main__':\n    unittest.main()\n", {}),
    "a main block": ("def main():\n    " + "\n    ".join(ASSERTS) + "\n\nif __name__ == '__main__':\n    main()\n", {}),
    "APPS, a function": (CALLS, {}),
    "TACO, a row": ({"input_output": json.dumps(CALLS), "starter_code": "def add(a, b):"}, {}),
    "APPS, values in lists": ({**CALLS, "outputs": [[3], ["ab"], [[1, 2]]]}, {}),
    "an expected infinity": ('{"inputs": [[1e308, 1e308], [1, 2]], "outputs": [Infinity, 3], "fn_name": "add"}', {}),
    "LiveCodeBench, functional": (
        {
            "public_test_cases": json.dumps(FUNCTIONAL[:1]),
            "private_test_cases": compressed(FUNCTIONAL[1:]),
            "metadata": '{"func_name": "add"}',
        },
        {},
    ),
    "function calls": ([{"type": "function_call", "fn_name": "add", "input": [20, i], "output": 20 + i} for i in (22, 9)], {}),
}  # fmt: skip

_EXPRESSIONS = {
    "in a list": "assert add(1, 2) in [3] and add(2, 2) in [4] and add(1, 2) not in [0, 1, 2]",
    "in what it returns": "assert 2 in add([1], [2]) and 1 in add([1], [2]) and 7 not in add([1], [2])",
    "not unequal": "assert not add(1, 2) != 3 and not add('a', 'b') != 'ab'",
    "expected first": "assert 3 == add(1, 2) and [3] == [add(1, 2)] and (4,) == (add(2, 2),)",
    "as a key": "assert {add(1, 2): 1} == {3: 1} and {add(1, 2)} == {3} and {4: 'x'}[add(2, 2)] == 'x'",
    "near": "assert abs(add(1, 2) - 3) < 1e-6 and abs(add(2, 2) - 4) < 1e-6",
    "isclose, not imported": "assert math.isclose(add(0.5, 0.25), 0.75) and isclose(add(0.5, 0.5), 1.0)",
    "all of a map": "assert all(map(lambda p: add(*p) == sum(p), [(1, 2), (3, 4), (5, 6)]))",
    "zip of a map": "assert all(a == b for a, b in zip(map(add, [1, 3], [2, 4]), [3, 7]))",
    "a loop over cases": "for a, b, c in [(1, 2, 3), (3, 4, 7)]:\n    assert add(a, b) == c",
    "a sum": "assert sum(add(i, i) for i in range(4)) == 12 and sum(add(i, 1) for i in range(4)) == 10",
    "sorted": "assert sorted([add(2, 1), add(0, 1)]) == [1, 3] and max(add(1, 2), add(2, 2)) == 4",
    "fractions, not imported": "assert add(Fraction(1, 4), Fraction(1, 4)) == Fraction(1, 2)",
    "its arguments afterwards": "x, y = [3], [1]\nz = add(x, y)\nassert z == x + y and len(z) == 2",
    "as text": "assert str(add(1, 2)) == '3' and f'{add(1, 2)}' == '3' and repr(add('a', 'b')) == \"'ab'\"",
    "its type": "assert isinstance(add(1, 2), int) and type(add(2, 2)) is int and add(1, 2) == 3 and add(2, 2) == 4",
    "its length and items": "r = add([1], [2])\nassert len(r) == 2 and r[0] == 1 and r[-1] == 2 and r == [1, 2]",
    "evaluated": "assert eval(str(add(1, 2))) == 3 and eval(repr(add([1], [2]))) == [1, 2] and add(2, 2) == 4",
    "a handler for everything": "try:\n    r = add(1, 2)\nexcept:\n    r = None\nassert r is None or r == 3\nassert r == 3 and add(2, 2) == 4",
    "a helper": "def close(a, b):\n    return abs(a - b) < 1e-9\nassert close(add(1, 2), 3) and close(add(2, 2), 4)",
}  # fmt: skip
FUNCTION_FORMS |= {f"asserts: {name}": (test, {}) for name, test in _EXPRESSIONS.items()}

STDIN_FORMS: dict[str, Form] = {
    "cases": ([{"input": "1 2\n", "output": "3\n"}, {"input": "20 22", "output": "42"}], {}),
    "cases, other names": ([{"stdin": "1 2", "expected_output": "3"}, {"stdin": "20 22", "expected": "42"}], {}),
    "APPS": (STDIN, {}),
    "TACO": ({"input_output": json.dumps({**STDIN, "inputs": [["1 2"], ["20 22"]]})}, {}),
    "LiveCodeBench": ({"public_test_cases": PRINTED[:1], "private_test_cases": compressed(PRINTED[1:])}, {}),
}
FORMS = FUNCTION_FORMS | STDIN_FORMS
