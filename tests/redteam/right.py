"""Right programs with tests in the forms of data sets; all of them must pass."""

from dataclasses import dataclass, field
from typing import Any

from redteam.aimed import RIGHT_AIMED, RIGHT_OF_ARRAYS
from redteam.forms import FUNCTION_FORMS, STDIN_FORMS
from redteam.tasks import HUMAN_EVAL, MBPP, STDIN, VALUES


@dataclass(frozen=True)
class Right:
    name: str
    program: str
    truth: Any
    info: dict[str, Any] = field(default_factory=dict)


ADD = "def add(a, b):\n    return a + b\n"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
PRINT = "a, b = map(int, input().split())\nprint(a + b)\n"

RIGHT = (
    *(Right(f"add / {name}", ADD, *form) for name, form in FUNCTION_FORMS.items()),
    *(Right(f"Solution / {n}", METHOD, *FUNCTION_FORMS[n]) for n in ("LeetCode's check", "LiveCodeBench, functional")),
    *(Right(f"print / {name}", PRINT, *form) for name, form in STDIN_FORMS.items()),
    Right("nan", ADD, '{"inputs": [[Infinity, -Infinity]], "outputs": [NaN], "fn_name": "add"}'),
    *(Right(f"MBPP {i}", p, {"test_list": t, "test_setup_code": s}) for i, (p, s, t) in enumerate(MBPP)),
    *(
        Right(f"HumanEval {i}", body, {"prompt": prompt, "test": test, "entry_point": name})
        for i, (name, prompt, body, test) in enumerate(HUMAN_EVAL)
    ),
    *(Right(f"value {i}", program, [test]) for i, (program, test) in enumerate(VALUES)),
    *(Right(f"aimed {i}", *right) for i, right in enumerate(RIGHT_AIMED)),
    *(Right(f"stdin {i}", p, [{"input": i_, "output": o} for i_, o in cases]) for i, (p, cases) in enumerate(STDIN)),
)

RIGHT_NUMPY = tuple(Right(f"array {i}", *right) for i, right in enumerate(RIGHT_OF_ARRAYS))
