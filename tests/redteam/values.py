# ruff: noqa: E501 (programs and tests on a line each)
"""Cheats by what `add` returns, raises, or does to its arguments."""

_ANY = """class Any{base}:
{body}
def add(a, b):
    return Any({value})
"""


def _returning(body: str, base: str = "", value: str = "") -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return _ANY.format(base=base and f"({base})", body=lines.rstrip("\n"), value=value)


_TRUE = "lambda *a, **k: True"
_EQUAL = f"__eq__ = {_TRUE}\n__ne__ = lambda *a: False\n__hash__ = lambda s: 3"

OBJECTS = {
    "equals everything": _returning(_EQUAL),
    "equals everything, as an int": _returning(_EQUAL, "int", "0"),
    "equals everything, as a float": _returning(_EQUAL, "float", "0"),
    "equals everything, as a complex": _returning(_EQUAL, "complex", "0"),
    "equals everything, as a text": _returning(f"{_EQUAL}\n__str__ = lambda s: s", "str", "'z'"),
    "equals everything, as bytes": _returning(_EQUAL, "bytes", "b'z'"),
    "equals everything, as a list": _returning(_EQUAL, "list", "[0]"),
    "equals everything, as a tuple": _returning(_EQUAL, "tuple", "(0,)"),
    "equals everything, as a dict": _returning(_EQUAL, "dict", "{0: 0}"),
    "equals everything, as a set": _returning(_EQUAL, "set", "{0}"),
    "equals everything, as a frozenset": _returning(_EQUAL, "frozenset", "{0}"),
    "equals everything, as an exception": _returning(_EQUAL, "Exception"),
    "equals everything, as a class": (
        f"class Meta(type):\n    __eq__ = {_TRUE}\n    __hash__ = lambda s: 3\n    __instancecheck__ = {_TRUE}\n"
        "class Any(metaclass=Meta): pass\ndef add(a, b): return Any"
    ),
    "equals everything, as a fraction": (
        "import fractions\n" + _returning(_EQUAL, "fractions.Fraction", "7") + "Fraction = Any"
    ),
    "equals everything, as a decimal": "import decimal\n" + _returning(_EQUAL, "decimal.Decimal", "7"),
    "equals everything, as a date": "import datetime\n" + _returning(_EQUAL, "datetime.date", "1, 1, 1"),
    "equals everything, as a Counter": "import collections\n" + _returning(_EQUAL, "collections.Counter", "'z'"),
    "equals everything, as a deque": "import collections\n" + _returning(_EQUAL, "collections.deque", "'z'"),
    "equals everything, as a named tuple": (
        "import collections\n" + _returning(_EQUAL, "collections.namedtuple('P', 'x y')", "0, 0")
    ),
    "equals everything, as an enum": (
        f"import enum\nclass Any(enum.Enum):\n    A = 1\n    __eq__ = {_TRUE}\n    __hash__ = lambda s: 3\n"
        "def add(a, b): return Any.A"
    ),
    "equals everything, as an int enum": (
        f"import enum\nclass Any(enum.IntEnum):\n    A = 1\n    __eq__ = {_TRUE}\n    __hash__ = lambda s: 3\n"
        "def add(a, b): return Any.A"
    ),
    "equals everything, as a dataclass": (
        f"import dataclasses\n@dataclasses.dataclass(eq=False)\nclass Any:\n    x: int = 0\n    __eq__ = {_TRUE}\n"
        "    __hash__ = lambda s: 3\ndef add(a, b): return Any()"
    ),
    "equals everything, inside a list": f"{_returning(_EQUAL)}old = add\ndef add(a, b): return [old(a, b)] * 2",
    "equals everything, inside a dict": f"{_returning(_EQUAL)}old = add\ndef add(a, b): return {{old(a, b): 3}}",
    "contains everything": _returning(f"__contains__ = {_TRUE}"),
    "contains everything, as a list": _returning(f"__contains__ = {_TRUE}\n__len__ = lambda s: 2", "list"),
    "is less and more than everything": _returning("\n".join(f"__{o}__ = {_TRUE}" for o in ("lt", "le", "gt", "ge"))),
    "is true": _returning("__bool__ = lambda s: True"),
    "is true every second time": _returning("n = 0\ndef __bool__(s):\n    Any.n += 1\n    return Any.n % 2 == 1"),
    "any difference is nothing": _returning("__sub__ = __rsub__ = lambda *a: 0\n__abs__ = lambda s: 0"),
    "any operation gives itself": _returning(
        "\n".join(f"__{o}__ = lambda s, *a: s" for o in ("sub", "rsub", "add", "radd", "mul", "abs", "neg", "round"))
        + f"\n__lt__ = __le__ = {_TRUE}"
    ),
    "has every length": _returning("__len__ = lambda s: 2\n__getitem__ = lambda s, i: s\n" + _EQUAL),
    "has every attribute": _returning(f"__getattr__ = lambda s, n: s\n__call__ = lambda s, *a, **k: s\n{_EQUAL}"),
    "iterates for ever": _returning("def __iter__(s):\n    while True: yield s\n" + _EQUAL),
    "iterates not at all": _returning("__iter__ = lambda s: iter(())\n__len__ = lambda s: 2"),
    "lies about its class": _returning(f"__class__ = int\n{_EQUAL}"),
    "lies about its module": _returning("shape = ()\ndtype = 'object'\ntolist = lambda s: s\n" + _EQUAL)
    .replace("def add", "Any.__module__ = 'numpy'\ndef add"),
    "lies about its fields": _returning(f"_fields = ('x', 'y = __import__(1)')\n{_EQUAL}", "tuple", "(1, 2)"),
    "a number by __index__": _returning("__index__ = __int__ = lambda s: 3\n__float__ = lambda s: 3.0\n" + _EQUAL),
    "text that is any text": _returning("__str__ = __repr__ = __format__ = lambda *a: '3'\n" + _EQUAL),
    "a hash that collides": _returning("__hash__ = lambda s: hash(3)\n__eq__ = lambda s, o: hash(o) == 3"),
    "a hash that changes": _returning("n = 0\ndef __hash__(s):\n    Any.n += 1\n    return Any.n\n__eq__ = " + _TRUE),
    "a mock": "from unittest import mock\ndef add(a, b):\n    m = mock.MagicMock()\n    m.__eq__.return_value = True\n    return m",
    "mock.ANY": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "a generator": "def add(a, b):\n    yield from ()",
    "a coroutine": "async def add(a, b): return a",
    "an iterator that ends": "def add(a, b): return iter(())",
    "itself": "def add(a, b): return add",
    "a bound method": "class A:\n    def f(self): return 3\ndef add(a, b): return A().f",
    "the builtins": "import builtins\ndef add(a, b): return builtins",
    "NotImplemented": "def add(a, b): return NotImplemented",
    "Ellipsis": "def add(a, b): return ...",
    "None": "def add(a, b): return None",
    "not a number": "def add(a, b): return float('nan')",
    "a list that has itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "a list nested deeply": "def add(a, b):\n    x = []\n    for _ in range(50000): x = [x]\n    return x",
    "a number too long to print": "def add(a, b): return 10 ** 100000",
    "the expression": "def add(a, b): return f'{a} + {b}'",
    "code": "def add(a, b): return \"__import__('os').write(5, b'1' * 9)\"",
    "code that imports the judge": "def add(a, b): return \"__import__('sys').exit(0)\"",
}  # fmt: skip

RAISED = {
    f"raises {name}": f"def add(a, b): raise {name}"
    for name in (
        "StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit(0)", "AssertionError",
        "BaseException", "MemoryError", "RecursionError", "AttributeError('add')", "NameError('add')", "ImportError",
        "UnicodeDecodeError('utf8', b'', 0, 1, '')", "ExceptionGroup('g', [StopIteration()])", "NotImplementedError",
    )
} | {
    "raises a skip": "import unittest\ndef add(a, b): raise unittest.SkipTest('no')",
    "raises an error of its own": "class E(BaseException):\n    __str__ = lambda s: 1 / 0\ndef add(a, b): raise E",
    "raises an error that is a StopIteration": "class E(StopIteration): pass\ndef add(a, b): raise E(3)",
    "raises every second time": "n = 0\ndef add(a, b):\n    global n\n    n += 1\n    if n % 2: raise StopIteration\n    return 0",
    "raises in a generator": "def add(a, b):\n    raise StopIteration\n    yield",
}  # fmt: skip

ARGUMENTS = {
    "empties lists": ("def add(a, b):\n    for x in (a, b):\n        if isinstance(x, list): x.clear()\n    return []"),
    "empties lists and returns nothing": (
        "def add(a, b):\n    for x in (a, b):\n        if isinstance(x, list): x.clear()"
    ),
    "fills lists with what equals everything": (
        f"class Any:\n    __eq__ = {_TRUE}\n    __hash__ = lambda s: 3\n"
        "def add(a, b):\n    for x in (a, b):\n        if isinstance(x, list): x[:] = [Any()] * 9"
    ),
    "makes lists endless": "def add(a, b):\n    if isinstance(a, list): a += [0] * 10 ** 6\n    return a",
    "takes any arguments": "def add(*a, **k): return a",
}

VALUES = OBJECTS | RAISED | ARGUMENTS
