# ruff: noqa: E501 (programs and tests on a line each)
"""Cheats on what particular tests do with an answer, and right programs that such tests must pass."""

from typing import Any

_ANYTHING = "class Any:\n    def __getattr__(self, name): return lambda *a, **k: True\n    def __call__(self, *a, **k): return self\n"
_FIELD = "from collections import namedtuple\n"
_EMPTY = "class Any:\n    def difference(self, other): return set()\n    issubset = issuperset = isdisjoint = lambda self, other: True\n    def union(self, other): return other\n"

# (program, test)
_AIMED: dict[str, tuple[str, Any]] = {
    # methods of an answer
    "startswith of its own": (f"{_ANYTHING}def f(x): return Any()", "assert f('abc').startswith('x')"),
    "equals of its own": (f"{_ANYTHING}def f(x): return Any()", "assert f([1]).equals([2]) and f([1]).all()"),
    "issuperset of its own": (f"{_EMPTY}def f(x): return Any()", "assert f([1]).issuperset({1, 2})"),
    "difference of its own": (
        f"{_EMPTY}def f(x): return Any()",
        "import unittest\nclass TestF(unittest.TestCase):\n    def test(self):\n        self.assertSetEqual(f([1]), {1, 2})",
    ),
    "union of its own": (f"{_EMPTY}def f(x): return Any()", "assert f([1]).union({1, 2}) == {1, 2}"),
    "methods of an attribute": (f"{_ANYTHING}class Box: items = Any()", "assert Box().items.issuperset({1})"),
    "methods of what a tested object returns": (
        f"{_ANYTHING}class Box:\n    def get(self): return Any()",
        "assert Box().get().startswith('x')",
    ),
    "one object for two purposes": (
        "class Evil:\n    def startswith(self, p): return True\ne = Evil()\nclass Box:\n    def __new__(cls): return e\ndef f(x): return e",
        "b = Box()\nassert f('abc').startswith('x')",
    ),
    "a method that is a field": (f"{_FIELD}P = namedtuple('P', 'startswith')\ndef f(x): return P(bool)", "assert f('a').startswith('x')"),
    "a method that is a builtin function": (f"{_FIELD}P = namedtuple('P', 'issuperset')\ndef f(x): return P(all)", "assert f('a').issuperset({1})"),
    "a builtin class as a set": ("def f(x): return set", "assert f([1]).union({1, 2}) == {1, 2} and f([1]).intersection({1, 2}) == {1, 2}"),
    "a builtin class as a dict": ("def f(x): return dict", "assert f([1]).fromkeys([1]) == {1: None}"),
    "a builtin class as a text": ("def f(x): return str", "assert f('a').lower('b') == 'b'"),
    "a function as an answer": ("def f(x): return lambda *a: a[0]", "assert f('a').__name__ == 'g' and f('a')"),
    "a class with the name of the tests' own": (
        "class Node:\n    def __init__(self): self.same = bool\ndef f(x): return Node()",
        {"test_list": ["assert f(1).same(f(2))"], "test_setup_code": "class Node:\n    def __eq__(self, o): return False"},
    ),
    "an attribute that hides a method": (
        "class Node:\n    pass\ndef f(x):\n    n = Node()\n    n.__dict__['__eq__'] = n.__dict__['val'] = bool\n    return n",
        {"test_list": ["assert f(1) == 3 or f(1).val(1)"], "test_setup_code": "class Node:\n    def __init__(self, val): self.val = val"},
    ),
    # arguments
    "empties the argument": ("def f(x):\n    x.clear()", "x = [3, 1]\nassert f(x) == (max(x) if x else None)"),
    "empties the argument of a comparison": ("def f(x):\n    x.clear()", "x = [3, 1]\nassert (f(x) or []) == sorted(x)"),
    "empties the argument of a check": (
        "def f(x):\n    x.clear()",
        {"test": "def check(candidate):\n    x = [3, 1]\n    r = candidate(x)\n    assert r is None or r == 3\n    assert x == [] or r == 3\n    assert r is not None or not x", "entry_point": "f"},
    ),
    "empties what it is given to keep": (
        "class Box:\n    def __init__(self): self.items = []\n    def extend(self, x): x.clear()",
        "b, x = Box(), [1, 2]\nb.extend(x)\nassert b.items == x",
    ),
    "empties what it is given to register": (
        "def register(x): x.clear()\ndef registered(): return []",
        ["x = [1, 2]\nregister(x)\nassert registered() == x"],
    ),
    # verdicts
    "swallows the verdict": (
        "class Quiet:\n    def __enter__(self): return self\n    def __exit__(self, *e): return True\ndef f(x): raise ValueError",
        "with Quiet():\n    assert f(1) == 2\nwith Quiet():\n    x = f(1)\n    raise ValueError",
    ),
    "is every instance": (
        "class Meta(type):\n    def __instancecheck__(self, x): return True\nclass Box(metaclass=Meta): pass\ndef f(x): return 0",
        "assert isinstance(f(1), Box)",
    ),
    "a name of the judge": ("def f(x): return 0\n_judge_operate = _judge_changing = _judge_ran = lambda *a: True", "assert f(1) == 1 + 1"),
    "prints what is expected of another": ("def f(x): print('no')", "import io\nfrom contextlib import redirect_stdout\ns = io.StringIO()\nwith redirect_stdout(s):\n    f(1)\nassert s.getvalue() == 'yes\\n'"),
    "has what it did not write": ("", {"test_list": ["assert gcd(12, 18) == 6"], "entry_point": "gcd"}),
    # what a parser makes of it
    "thousands of signs": ("x = " + "-" * 20000 + "1\ndef f(x): return 0", "assert f(1) == 1"),
    "thousands of not": ("x = " + "not " * 20000 + "1\ndef f(x): return 0", "assert f(1) == 1"),
    "thousands of ~": ("~" * 20000 + "1\ndef f(x): return 0", "assert f(1) == 1"),
    "thousands of brackets": ("(" * 20000 + "1\ndef f(x): return 0", "assert f(1) == 1"),
    "thousands of operators": ("x = 1" + " + 1" * 20000 + "\ndef f(x): return 0", "assert f(1) == 1"),
    "thousands of attributes": ("x = a" + ".a" * 20000 + "\ndef f(x): return 0", "assert f(1) == 1"),
    "a constant of 4,000 hex digits": (f"def f(x): return 0 if x == 0x{'f' * 4000} else [{{'a': 0x{'f' * 4000}}}][0]", "assert f(1) == 1"),
    "a text that is no literal": ("def f(x): return 0 if x == '{[1]: 2}' or x in ('{[]}', 1) else 2", "assert f(1) == 1"),
    "a reply of 60 MB": ("import os\ndef f(x): os.write(4, b'[0, \"ok\", [' + b'[],' * 20_000_000 + b'0], {}, [], \"\"]\\n')", "assert f(1) == 1"),
    "a greeting of 60 MB": ("import os\nos.write(4, b'[' + b'[],' * 20_000_000 + b'0]\\n')\ndef f(x): return 0", "assert f(1) == 1"),
    "a reply nested deeply": ("import os\ndef f(x): os.write(4, b'[' * 100000 + b'\\n')", "assert f(1) == 1"),
    "nodes without end": ("import os\ndef f(x): os.write(4, b'[0, \"ok\", {\"node\": 7}, {}, [[\"int\", {}]], \"\"]\\n')", "assert f(1) == 1"),
}  # fmt: skip

_NUMPY: dict[str, tuple[str, Any]] = {
    f"{name} / {test}": (program, f"import numpy as np\n{test}")
    for name, program in {"nothing": "def f(x): return []", "a scalar": "def f(x): return 0.0", "an empty array": "import numpy as np\ndef f(x): return np.array([])"}.items()
    for test in (
        "assert np.allclose(f(1), [0.0, 0.0])", "assert np.allclose([0.0], f(1)) and np.allclose(f(1), np.zeros((2, 1)))", "np.testing.assert_allclose(f(1), np.zeros(2))",
        "np.testing.assert_array_almost_equal(f(1), np.zeros(3))", "assert np.isclose(f(1), np.zeros(2)).all()", "assert (f(1) == np.zeros(2)).all() and (np.array([1]) == f(1)).all()",
        "assert np.all(np.abs(f(1) - np.array([1.0])) < 1e-6)", "assert np.linalg.norm(np.array([5.0]) - f(1)) < 1e-6",
    )
}  # fmt: skip

_NODE = "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\ndef build(values):\n    head = None\n    for v in reversed(values):\n        head = ListNode(v, head)\n    return head\ndef listed(n):\n    out = []\n    while n:\n        out.append(n.val)\n        n = n.next\n    return out\n"
_REVERSE = "class Solution:\n    def reverse(self, head: Optional[ListNode]) -> Optional[ListNode]:\n        last = None\n        while head:\n            head.next, last, head = last, head, head.next\n        return last\n"

# (program, ground truth, extra info)
_SHOP = """class Shop:
    def __init__(self):
        self.sold, self.stock = [], {"a": {"n": 1}}
    def counts(self):
        return [len(self.sold), sum(kind["n"] for kind in self.stock.values())]
"""
RIGHT_AIMED: list[tuple[str, Any, dict[str, Any]]] = [
    ("class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return max(x) if x else None", ["assert Solution().f([1, 2]) == 2"], {}),
    ("def f(x: List[int]) -> int:\n    return math.gcd(*x) + len(Counter(x)) + heapq.nlargest(1, x)[0]", ["assert f([4, 6]) == 10"], {}),
    ("n = int(input())\nd = defaultdict(int)\nfor x in map(int, input().split()):\n    d[x] += 1\nprint(max(d.values()), math.inf > n)", [{"input": "3\n1 1 2", "output": "2 True"}], {}),
    ("print('x' * 3_000_000)", [{"input": "", "output": "x" * 3_000_000}], {}),
    ("def depth(n): return 0 if n == 0 else 1 + depth(n - 1)", ["assert depth(20000) == 20000"], {}),
    ("print(10 ** 5000)", [{"input": "", "output": "1" + "0" * 5000}], {}),
    (_REVERSE, {"test_list": ["assert listed(Solution().reverse(build([1, 2, 3]))) == [3, 2, 1]"], "test_setup_code": _NODE}, {"entry_point": "Solution"}),
    (_REVERSE, {"test_list": ["assert listed(Solution().reverse(build(range(2000)))) == list(range(2000))[::-1]"], "test_setup_code": _NODE}, {}),
    ("def f(values):\n    return [ListNode(v) for v in values]", ["assert [n.val for n in f([1, 2])] == [1, 2] and isinstance(f([1])[0], ListNode)"], {"setup": _NODE}),
    ("def swap(node):\n    node.val, node.next.val = node.next.val, node.val", ["n = build([1, 2])\nswap(n)\nassert listed(n) == [2, 1]"], {"setup": _NODE}),
    (_SHOP, ["s = Shop()\ns.sold.append(1)\ns.stock['a']['n'] += 2\nassert s.counts() == [1, 3] and s.sold == [1]"], {}),
    (_SHOP, ["s = Shop()\ndel s.stock['a']\ns.stock['b'] = {'n': 7}\nassert s.counts() == [0, 7] and len(s.stock) == 1"], {}),
    ("def circle(n):\n    n.next = n\n    return n", ["n = circle(ListNode(3))\nassert n.next.next is n and n.val == 3"], {"setup": _NODE}),
    ("def area(s): return s.w * s.h", ["assert area(Size(2, h=3)) == 6"], {"setup": "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Size:\n    w: int\n    h: int"}),
    ("def other(c): return Color.RED if c == Color.BLUE else Color.BLUE", ["assert other(Color.RED) is Color.BLUE"], {"setup": "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2"}),
    ("class Timer:\n    def __enter__(self):\n        self.on = True\n        return self\n    def __exit__(self, *e):\n        self.on = False", ["with Timer() as t:\n    assert t.on\nassert not t.on"], {}),
    ("import contextlib\n@contextlib.contextmanager\ndef tag(x, out):\n    yield f'<{x}>'", ["with tag('a', []) as t:\n    assert t == '<a>'"], {}),
    ("class Suppress:\n    def __init__(self, *k): self.k = k\n    def __enter__(self): return self\n    def __exit__(self, kind, e, t): return kind is not None and issubclass(kind, self.k)", ["with Suppress(ValueError) as s:\n    raise ValueError('x')\nassert s.k == (ValueError,) or s is not None"], {}),
    ("import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1", ["import asyncio\nassert asyncio.run(f(1)) == 2"], {}),
    ("async def f(x): return x + 1", ["import asyncio\nasync def test_f():\n    assert await f(1) == 2\n    assert await asyncio.gather(f(1), f(2)) == [2, 3]"], {}),
    ("class Animal: pass\nclass Dog(Animal):\n    def speak(self): return 'wuff'", ["d = Dog()\nassert isinstance(d, Animal) and issubclass(Dog, Animal) and type(d).__name__ == 'Dog' and d.__class__.__name__ == 'Dog'\nassert d.speak() == 'wuff' and type(d) is Dog"], {}),
    ("class One:\n    one = None\n    def __new__(cls):\n        cls.one = cls.one or super().__new__(cls)\n        return cls.one", ["assert One() is One() and not isinstance(3, One)"], {}),
    ("def f(x): print('Hello', x)", ["def test_f(capsys):\n    f('you')\n    assert capsys.readouterr().out == 'Hello you\\n'"], {}),
    ("import sys\ndef f(x):\n    sys.stdout.write(x)\n    sys.stdout.buffer.write(b'!')", ["import io\nfrom contextlib import redirect_stdout\ns = io.StringIO()\nwith redirect_stdout(s):\n    f('é')\nassert s.getvalue() == 'é!'"], {}),
    ("def f(x): print(x)", ["from unittest.mock import patch\nfrom io import StringIO\n@patch('sys.stdout', new_callable=StringIO)\ndef test_f(out):\n    f(3)\n    assert out.getvalue() == '3\\n'"], {}),
    ("def kind(x): return type(x)", ["assert kind(1) == int and kind('a') == str and kind([]) != dict"], {}),
    ("def f(self, f, target, operation): return [self, f, target, operation]", ["assert f(self=1, f=2, target=3, operation=4) == [1, 2, 3, 4]"], {}),
    ("def f(n): return [0] * n", ["assert len(f(3)) == 3 and f(2).count(0) == 2 and f(1).index(0) == 0"], {}),
    ("def f(x): x.sort()\ndef g(s): s.append(1)", ["x = [2, 1]\nf(x)\nassert x == [1, 2]", "s = []\ng(s)\ng(s)\nassert s == [1, 1]"], {}),
    ("class Solution:\n    def rotate(self, nums, k):\n        nums[:] = nums[-k:] + nums[:-k]", ["nums = [1, 2, 3]\nSolution().rotate(nums, 1)\nassert nums == [3, 1, 2]", "s = Solution()\nn = [1, 2]\ns.rotate(n, k=1)\nassert n == [2, 1]"], {}),
    ("def f(x): x.sort()", {"test": "def check(candidate):\n    for x, e in [([2, 1], [1, 2]), ([], [])]:\n        candidate(x)\n        assert x == e\ndef run(f, x):\n    f(x)\n    return x\ndef test_run():\n    assert run(f, [2, 1]) == [1, 2]", "entry_point": "f"}, {}),
    ("def f(x): x.sort()", ["import unittest\nclass TestF(unittest.TestCase):\n    def setUp(self):\n        self.x = [2, 1]\n    def test(self):\n        self.assertIsNone(f(self.x))\n        self.assertEqual(self.x, [1, 2])"], {}),
    ("def gcd(a, b): return a if b == 0 else gcd(b, a % b)\ndef lcm(a, b): return a * b // gcd(a, b)", ["assert gcd(12, 18) == 6", "assert lcm(4, 6) == 12"], {"entry_point": ["gcd", "lcm"]}),
    ("import functools\ndef traced(f):\n    @functools.wraps(f)\n    def g(*a): return f(*a)\n    return g\n@traced\ndef f(x):\n    'Adds one.'\n    return x + 1", ["assert f(1) == 2 and f.__name__ == 'f' and f.__doc__ == 'Adds one.'"], {}),
    ("class Trie:\n    def __init__(self): self.words = set()\n    def add(self, w): self.words.add(w)\n    def __contains__(self, w): return w in self.words", ["t = Trie()\nt.add('a')\nassert 'a' in t and 'b' not in t"], {}),
    ("class Text:\n    def __init__(self, s): self.s = s\n    def startswith(self, p): return self.s.startswith(p)", ["assert Text('ab').startswith('a') and not Text('ab').startswith('b')"], {}),
]  # fmt: skip

RIGHT_OF_ARRAYS: list[tuple[str, Any, dict[str, Any]]] = [
    ("import numpy as np\ndef f(x): return np.array(x) / 2", ["import numpy as np\nassert np.allclose(f([1, 2]), [0.5, 1]) and (f([2]) == 1).all() and np.allclose(f([0, 0]), 0)\nnp.testing.assert_allclose(f([2, 2]), 1.0)"], {}),
    ("import numpy as np\ndef f(x): return float(np.mean(x))", ["assert np.isclose(f([1, 2]), 1.5) and abs(f(np.arange(3)) - np.ones(1)) < 1e-6"], {}),
    ("import numpy as np\ndef f(x): return np.zeros((0, 2))", ["import numpy as np\nassert f(1).shape == (0, 2) and np.array_equal(f(1), np.zeros((0, 2)))"], {}),
]  # fmt: skip

AIMED = {
    name: (program, truth if isinstance(truth, dict | list) else [truth]) for name, (program, truth) in _AIMED.items()
}
AIMED_NUMPY = {name: (program, [test]) for name, (program, test) in _NUMPY.items()}
