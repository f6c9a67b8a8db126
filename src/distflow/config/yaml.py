"""Strict YAML: floats such as 1e-6, no duplicate keys, and limits on the size of numbers and of expanded aliases."""

import re
from typing import Any

import yaml

from distflow.errors import cut, shown

MAX_BYTES = 1 << 20  # of a config
_MAX_VALUES = 20_000  # of a config, with aliases expanded
_MAX_DIGITS = 400  # of a number: `1:59:59…`, which is in base 60, takes quadratic time


class _Loader(yaml.SafeLoader):
    """PyYAML alone reads 1e-6 as a string, and integers of any size."""

    values = 0  # so far

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.values += 1
        if self.values > _MAX_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"there are more than {_MAX_VALUES:,} values",
                problem_mark=self.get_mark(),
            )
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: Any) -> int:
        number = int(super().construct_yaml_int(node)) if len(node.value) <= _MAX_DIGITS else 2**63
        if not -(2**63) <= number < 2**63:
            raise _error(f"the number {cut(node.value, 30)} is too large", node)
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def parse(text: str) -> Any:
    """Returns the value of a YAML text; raises ValueError with the reason if it has none."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root, {})
        return loader.construct_document(root)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (AttributeError, LookupError) as e:  # of PyYAML's constructors
        raise ValueError(f"a value does not fit its tag ({type(e).__name__}: {cut(str(e))})") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as e:
        raise ValueError(cut(str(e), 400)) from None


def _check(node: Any, sizes: dict[int, int]) -> int:
    """Returns the number of values in a node, with aliases expanded; raises if it cannot be a config."""
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise _error("an alias is used inside its own value", node)
        return sizes[id(node)]
    sizes[id(node)], size = 0, 1
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise _error(f"the key '{cut(key.value)}' is given twice", key)
                keys.add(key.value)
            size += _check(key, sizes) + _check(value, sizes)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_check(value, sizes) for value in node.value)
    elif any("\ud800" <= c <= "\udfff" for c in node.value):
        raise _error(f"{shown(node.value, 40)} has a lone surrogate, half of a character", node)
    if size > _MAX_VALUES:
        raise _error(f"there are more than {_MAX_VALUES:,} values here once its aliases are expanded", node)
    sizes[id(node)] = size
    return size


def _error(problem: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
