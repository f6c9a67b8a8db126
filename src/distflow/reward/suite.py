"""Reads the tests of a program from a ground truth, in any of the forms that data sets have them in."""

import base64
import binascii
import functools
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.reward.entry_points import parse_python, shared_classes, solution_names, split_tests
from distflow.sandbox.special_cases import input_key, python_inputs

_INPUT_KEYS, _OUTPUT_KEYS = ("input", "stdin"), ("output", "expected_output", "stdout", "expected")
_MAX_PRIVATE = 1 << 28  # bytes of private tests, unpacked


@dataclass(frozen=True)
class ProgramCase:
    """A test of a program that reads `stdin` and must print `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class FunctionCase:
    """A test of a function: the call with `args` must return one of `expected`, which is JSON."""

    args: Sequence[Any]
    expected: Sequence[Any]


@dataclass(frozen=True)
class Suite:
    """All tests of a row. Tests that are Python take `names` from the solution, and nothing else.

    `setup` runs before them on their side, `prefix` before the program on the side of the solution. `inputs` are the
    keys of what the tests give to it. `classes` hold data, so both sides have them; `shared` defines them.
    """

    tests: Sequence[str | ProgramCase | FunctionCase]
    names: Sequence[str] = ()
    setup: str = ""
    prefix: str = ""
    inputs: frozenset[str] = frozenset()
    classes: Sequence[str] = ()
    shared: str = ""


@dataclass(frozen=True)
class _Parts:
    """The content of a ground truth, before it is known which names the tests take from the solution."""

    tests: list[str | ProgramCase | FunctionCase]
    setup: Sequence[str] = ()
    entry: Sequence[str] = field(default=())
    prefix: str = ""


def parse_suite(truth: Any, info: Mapping[str, Any]) -> Suite:
    """Reads a ground truth; of `info` it uses `setup` and `entry_point`. Raises a ValueError if it holds no tests."""
    setup, entry = str(info.get("setup") or ""), info.get("entry_point") or ()
    return _parse_suite(truth if isinstance(truth, str) else json.dumps(truth), setup, _names(entry))


@functools.lru_cache(8)  # all responses to a prompt have the same tests, which may be large
def _parse_suite(text: str, setup: str, entry: tuple[str, ...]) -> Suite:
    try:
        truth = json.loads(text)
    except ValueError:
        truth = [text]
    parts = _parse(truth, entry)
    entry = tuple(parts.entry) or entry
    if not any(t.strip() if isinstance(t, str) else True for t in parts.tests):
        raise ValueError(
            f"the ground truth {text[:60]!r} holds no tests; use a list of strings with asserts,"
            " or a list of {input, output}"
        )
    if any(isinstance(t, FunctionCase) for t in parts.tests) and len(entry) != 1:
        raise ValueError("the tests call a function that has no name; add `fn_name` or `entry_point` to the row")
    code = [t for t in parts.tests if isinstance(t, str)]
    others = [t for t in parts.tests if not isinstance(t, str)]
    given = {input_key(t.args if isinstance(t, FunctionCase) else [t.stdin]) for t in others} - {""}
    if not code:
        return Suite(others, entry, inputs=frozenset(given))
    setup = "\n".join(filter(None, [*parts.setup, setup]))
    names, imports = solution_names(setup, code, entry)
    tests = [*others, *split_tests(code, names)]
    inputs = frozenset(given | python_inputs(code, names))
    classes, shared = shared_classes(setup, names)
    return Suite(tests, names, "\n".join(filter(None, [imports, setup])), parts.prefix, inputs, classes, shared)


def _parse(truth: Any, entry: Sequence[str]) -> _Parts:
    if isinstance(truth, list):
        tests = [t if isinstance(t, str) else _parse_test(t) for t in truth]
        named = {n for t in truth if isinstance(t, Mapping) for n in _names(_function_of(t))}
        return _Parts(tests, entry=sorted(named))
    if not isinstance(truth, Mapping):
        return _Parts([])
    for parse in (_parse_human_eval, _parse_apps, _parse_live_code_bench, _parse_mbpp):
        if parts := parse(truth, entry):
            return parts
    return _Parts([])


def _parse_apps(truth: Mapping[str, Any], entry: Sequence[str]) -> _Parts | None:
    """APPS and TACO: `{inputs, outputs}`, with `fn_name` for functions; the row has it as JSON in `input_output`."""
    if "input_output" in truth:
        content = truth["input_output"]
        return _parse(json.loads(content) if isinstance(content, str) else content, entry)
    if "inputs" not in truth or "outputs" not in truth:
        return None
    inputs, outputs = truth["inputs"], truth["outputs"]
    pairs = list(zip(inputs, outputs, strict=True))
    name = truth.get("fn_name")
    if not name:
        return _Parts([ProgramCase(_to_text(i), _to_text(o)) for i, o in pairs])
    # Some rows have each value in a list of its own, others have the values themselves.
    wrapped = all(isinstance(o, list) and len(o) == 1 for o in outputs)
    calls = [FunctionCase(i if isinstance(i, list) else [i], [o, o[0]] if wrapped else [o]) for i, o in pairs]
    return _Parts(list(calls), entry=_names(name))


def _parse_live_code_bench(truth: Mapping[str, Any], entry: Sequence[str]) -> _Parts | None:
    """LiveCodeBench: lists of `{input, output, testtype}`, of which the private one may be compressed."""
    columns = [truth[c] for c in ("public_test_cases", "private_test_cases") if truth.get(c)]
    if not columns:
        return None
    tests = [test for column in columns for test in _read_tests(column)]
    parts = _parse(tests, entry)
    return _Parts(parts.tests, entry=parts.entry or _names(_function_of(truth)))


def _parse_mbpp(truth: Mapping[str, Any], _: Sequence[str]) -> _Parts | None:
    """MBPP: lists of asserts, and code or imports that they need."""
    if "test_list" not in truth:
        return None
    tests = [*truth["test_list"], *(truth.get("challenge_test_list") or ())]
    setup = [*(truth.get("test_imports") or ()), truth.get("test_setup_code") or ""]
    return _Parts(tests, setup, _names(truth.get("entry_point") or ()))


def _parse_human_eval(truth: Mapping[str, Any], entry: Sequence[str]) -> _Parts | None:
    """HumanEval: `test` defines `check(candidate)` for the function `entry_point`, which completes `prompt`.

    Functions that the prompt defines for the tests are theirs: a solution that defines them, too, changes its own copy.
    """
    test = truth.get("test")
    if not isinstance(test, str):
        return None
    prompt = truth.get("prompt")
    prefix = prompt if isinstance(prompt, str) and parse_python(prompt) else ""
    return _Parts([test], [prefix], _names(truth.get("entry_point") or ()) or entry, prefix)


def _parse_test(test: Any) -> ProgramCase | FunctionCase:
    if isinstance(test, Mapping):
        stdin, stdout = (next((test[k] for k in keys if k in test), None) for keys in (_INPUT_KEYS, _OUTPUT_KEYS))
        if stdout is not None and test.get("testtype") == "functional":
            return FunctionCase(
                [json.loads(line) for line in str(stdin).splitlines() if line.strip()], [_from_json(stdout)]
            )
        if stdout is not None and test.get("type") == "function_call":
            return FunctionCase(stdin if isinstance(stdin, list) else [stdin], [stdout])
        if stdout is not None:
            return ProgramCase(_to_text(stdin or ""), _to_text(stdout))
    raise ValueError(
        f"the test {str(test)[:60]!r} is neither a string nor a dict with `input` and `output`; fix the row"
    )


def _read_tests(column: Any) -> list[Any]:
    """Reads a list of tests: as it is, as JSON, or as LiveCodeBench compresses it."""
    if not isinstance(column, str):
        return list(column)
    try:
        return list(json.loads(column))
    except ValueError:
        pass
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(column, validate=True), _MAX_PRIVATE)
        # It is a pickle of one text. Its parts are listed, not loaded.
        texts = [a for op, a, _ in pickletools.genops(data) if isinstance(a, str) and "UNICODE" in op.name]
        return list(json.loads(texts[0]))
    except (ValueError, zlib.error, binascii.Error, IndexError) as e:
        raise ValueError(f"the tests {column[:40]!r} are neither JSON nor compressed JSON; fix the row") from e


def _function_of(row: Mapping[str, Any]) -> Any:
    """Returns the name of the function that a test or a row is about, if it has one."""
    metadata = row.get("metadata")
    metadata = _from_json(metadata) if isinstance(metadata, str) else metadata
    inner = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return row.get("fn_name") or row.get("entry_point") or inner or ()


def _names(entry: Any) -> tuple[str, ...]:
    """Returns names of functions; LeetCode's are written `Solution().name`."""
    names = [entry] if isinstance(entry, str) else list(entry)
    names = [str(name).removeprefix("Solution().").removesuffix("()") for name in names]
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"the entry point {name!r} is not the name of a function; fix the row")
    return tuple(names)


def _from_json(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)
