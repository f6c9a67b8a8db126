"""YAML without surprises: numbers are numbers, no key is there twice, and aliases do not lead to ever more aliases."""

import re
from typing import Any

import yaml

from distflow.errors import cut, shown

LARGEST = 1 << 20  # bytes of a config
_MOST = 100_000  # values in it, when aliases are written out
# PyYAML lets some of Python's own through, for example where a value does not fit its tag.
_MISTAKES = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, AttributeError | LookupError):
        return f"a value does not fit its tag ({type(error).__name__}: {cut(str(error))})"
    return cut(str(error), 400)


class _Yaml(yaml.SafeLoader):
    """For PyYAML alone, 1e-6 would be a text, and a number might have any number of digits."""

    def construct_yaml_int(self, node: Any) -> int:
        number = int(super().construct_yaml_int(node))
        if not -(2**63) <= number < 2**63:
            raise _mistake(f"the number {cut(node.value, 30)} is too large", node)
        return number


_Yaml.add_constructor("tag:yaml.org,2002:int", _Yaml.construct_yaml_int)
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def parse(text: str) -> Any:
    """What it says; ValueError with the reason if it says nothing sensible."""
    try:
        root = yaml.compose(text, _Yaml)
        if root is not None:
            _size(root, {})
        return yaml.load(text, _Yaml)
    except _MISTAKES as e:
        raise ValueError(_why(e)) from None


def _size(node: Any, known: dict[int, int]) -> int:
    """How many values there are in a node, aliases written out."""
    if id(node) in known:
        if not known[id(node)]:
            raise _mistake("an alias stands for what it is in", node)
        return known[id(node)]
    known[id(node)], size = 0, 1
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise _mistake(f"the key '{cut(key.value)}' is there twice", key)
                keys.add(key.value)
            size += _size(key, known) + _size(value, known)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_size(value, known) for value in node.value)
    elif any("\ud800" <= c <= "\udfff" for c in node.value):
        raise _mistake(f"{shown(node.value, 40)} has half a character", node)
    if size > _MOST:
        raise _mistake(f"there are more than {_MOST:,} values here, as its aliases stand for others", node)
    known[id(node)] = size
    return size


def _mistake(what: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
