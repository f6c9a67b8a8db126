# ruff: noqa: E501 (programs and tests on a line each)
"""Tasks with right programs, written in the forms of MBPP, HumanEval and competitions."""

# (program, setup, tests)
MBPP: list[tuple[str, str, list[str]]] = [
    (
        "def similar(a, b):\n    return tuple(sorted(set(a) & set(b)))",
        "",
        ["assert similar((3, 4, 5, 6), (5, 7, 4, 10)) == (4, 5)", "assert set(similar((1, 2), (2, 3))) == set((2,))"],
    ),
    (
        "import heapq as hq\ndef largest(nums, n):\n    return hq.nlargest(n, nums)",
        "",
        ["assert largest([25, 35, 22, 85, 14], 2) == [85, 35]", "assert largest([1], 3) == [1]"],
    ),
    ("def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a", "", ["assert gcd(12, 17) == 1", "assert gcd(4, 6) == 2"]),
    (
        "class Node:\n    def __init__(self, data):\n        self.data = data\n        self.left = self.right = None\n"
        "def height(n):\n    return 0 if n is None else 1 + max(height(n.left), height(n.right))",
        "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)",
        ["assert height(root) == 3", "assert height(root.right) == 0", "assert height(root.left) == 2"],
    ),
    (
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n"
        "def widest(pairs):\n    return max(p.b - p.a for p in pairs)",
        "",
        ["assert widest([Pair(5, 24), Pair(15, 25)]) == 19", "assert widest([Pair(1, 2)]) == 1"],
    ),
    (
        "import re\ndef long_words(text):\n    return re.findall(r'\\b\\w{4,}\\b', text)",
        "",
        ["assert long_words('Please move back to stream') == ['Please', 'move', 'back', 'stream']"],
    ),
    (
        "def test_duplicate(nums):\n    return len(nums) != len(set(nums))",
        "",
        ["assert test_duplicate([1, 2, 3]) == False", "assert test_duplicate([1, 1]) == True"],
    ),
    (
        "def drop(values, kind):\n    return [v for v in values if not isinstance(v, kind)]",
        "",
        ["assert drop([1, 'a', 2.5], int) == ['a', 2.5]", "assert drop([1, 'a'], str) == [1]"],
    ),
    (
        "import math\ndef radius(area):\n    return math.sqrt(area / math.pi)",
        "",
        ["assert math.isclose(radius(math.pi), 1.0, rel_tol=0.001)", "assert isclose(radius(0), 0)"],
    ),
    (
        "from collections import Counter\ndef common(words):\n    return Counter(words).most_common(1)",
        "",
        ["assert common(['a', 'b', 'a']) == [('a', 2)]"],
    ),
    ("def is_woodall(x):\n    return x in (1, 7, 23, 63, 159, 383)", "", ["assert is_woodall(383)", "assert not is_woodall(254)"]),
    ("def empty(d):\n    return {}", "", ["import copy", "assert empty({'a': 1}) == {}", "x = empty({})", "assert x == {}"]),
    (
        "def encode(s):\n    return ''.join(chr(ord(c) + 1) for c in s)\ndef decode(s):\n    return ''.join(chr(ord(c) - 1) for c in s)",
        "",
        ["assert decode(encode('abc')) == 'abc'", "assert encode('abc') == 'bcd'"],
    ),
]  # fmt: skip

# (entry point, prompt, completion, test)
HUMAN_EVAL: list[tuple[str, str, str, str]] = [
    (
        "near_pair",
        "from typing import List\n\n\ndef near_pair(numbers: List[float], limit: float) -> bool:\n    \"\"\" Two within limit? \"\"\"\n",
        "    s = sorted(numbers)\n    return any(b - a < limit for a, b in zip(s, s[1:]))\n",
        "\n\nMETADATA = {'author': 'x', 'dataset': 'test'}\n\n\ndef check(candidate):\n"
        "    assert candidate([1.0, 2.0, 2.1], 0.3) == True\n    assert candidate([1.0, 2.0], 0.5) == False\n",
    ),
    (
        "root",
        "import math\n\n\ndef poly(xs: list, x: float):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\n"
        "def root(xs: list):\n    \"\"\" A zero of the polynomial. \"\"\"\n",
        "    a, b = -1.0, 1.0\n    while poly(xs, a) * poly(xs, b) > 0:\n        a, b = 2 * a, 2 * b\n"
        "    while b - a > 1e-10:\n        m = (a + b) / 2\n        a, b = (m, b) if poly(xs, m) * poly(xs, a) > 0 else (a, m)\n"
        "    return a\n",
        "\n\ndef check(candidate):\n    import copy\n    for xs in ([1, 2], [-6, 11, -6, 1], [3, -7, 0, 1]):\n"
        "        assert math.fabs(poly(xs, candidate(copy.deepcopy(xs)))) < 1e-4\n",
    ),
    (
        "decode_shift",
        "def encode_shift(s: str):\n    return ''.join([chr(((ord(c) + 5 - ord('a')) % 26) + ord('a')) for c in s])\n\n\n"
        "def decode_shift(s: str):\n    \"\"\" Reverses encode_shift. \"\"\"\n",
        "```python\ndef decode_shift(s):\n    return ''.join(chr((ord(c) - 5 - ord('a')) % 26 + ord('a')) for c in s)\n```",
        "\n\ndef check(candidate):\n    from random import randint\n    for _ in range(20):\n"
        "        text = ''.join(chr(randint(97, 122)) for _ in range(9))\n        assert candidate(encode_shift(text)) == text\n",
    ),
    (
        "by_length",
        "def by_length(arr):\n    \"\"\" Names of digits, largest first. \"\"\"\n",
        "    names = {1: 'One', 2: 'Two', 3: 'Three'}\n    return [names[x] for x in sorted(arr, reverse=True) if x in names]\n",
        "def check(candidate):\n\n    # Check some simple cases\n    assert True, 'This prints if this assert fails 1'\n"
        "    assert candidate([2, 1, 3, 55]) == ['Three', 'Two', 'One'], 'Error'\n    assert candidate([]) == []\n",
    ),
    (
        "raises_for_negative",
        "def raises_for_negative(n):\n    \"\"\" The root. \"\"\"\n",
        "    if n < 0:\n        raise ValueError('negative')\n    return n ** 0.5\n",
        "def check(candidate):\n    assert abs(candidate(2) - 1.4142) < 1e-3\n    try:\n        candidate(-1)\n        assert False\n"
        "    except ValueError as e:\n        assert 'neg' in str(e)\n",
    ),
]  # fmt: skip

# (program, test): what a solution may return, raise and change
VALUES: list[tuple[str, str]] = [
    ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    ("def f():\n    n = 0\n    while True:\n        yield n\n        n += 1", "g = f()\nassert [next(g) for _ in range(3)] == [0, 1, 2]"),
    ("def f(n):\n    yield from range(n)", "g = f(1)\nassert next(g) == 0\ntry:\n    next(g)\n    assert False\nexcept StopIteration:\n    pass"),
    ("def f(x):\n    return map(str, x)", "assert list(f([1, 2])) == ['1', '2']"),
    ("from collections import Counter\ndef f(x):\n    return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1} and f('aab').most_common(1) == [('a', 2)]"),
    ("from collections import deque\ndef f(x):\n    return deque(x)", "from collections import deque\nassert f([1, 2]) == deque([1, 2])"),
    ("from collections import OrderedDict\ndef f(x):\n    return OrderedDict(x)", "assert list(f([('b', 1), ('a', 2)])) == ['b', 'a']"),
    ("from collections import defaultdict\ndef f(x):\n    d = defaultdict(list)\n    d[x].append(1)\n    return d", "assert f('a') == {'a': [1]}"),
    ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f():\n    return P(1, 2)", "assert f() == (1, 2) and f().y == 2"),
    ("from fractions import Fraction\ndef f(a, b):\n    return Fraction(a, b)", "assert f(1, 3) == Fraction(1, 3) and f(2, 4) * 2 == 1"),
    ("from decimal import Decimal\ndef f(x):\n    return Decimal(x)", "from decimal import Decimal\nassert f('0.1') + f('0.2') == Decimal('0.3')"),
    ("import datetime\ndef f(y):\n    return datetime.date(y, 1, 2)", "assert f(2020) == date(2020, 1, 2) and f(2020).month == 1"),
    ("import datetime\ndef f(d):\n    return d + datetime.timedelta(days=1)", "import datetime as dt\nassert f(dt.datetime(2020, 2, 28)) == dt.datetime(2020, 2, 29)"),
    ("def f():\n    return {1: 'a', (2, 3): None}", "assert f() == {1: 'a', (2, 3): None} and f()[2, 3] is None"),
    ("def f(d):\n    return d.keys()", "assert f({'a': 1}) == {'a'} and list(f({'b': 1})) == ['b']"),
    ("def f(d):\n    return d.items()", "assert sorted(f({'a': 1})) == [('a', 1)]"),
    ("def f(n):\n    return range(n)", "assert f(3) == range(3) and 2 in f(3)"),
    ("def f():\n    return float('inf'), -float('inf'), 1e-300, 10 ** 400, -(2 ** 63)", "assert f() == (float('inf'), -float('inf'), 1e-300, 10 ** 400, -(2 ** 63))"),
    ("def f():\n    return [None, True, 1j, b'b', {1}, frozenset([2]), bytearray(b'x')]", "assert f() == [None, True, 1j, b'b', {1}, {2}, b'x']"),
    ("def f():\n    return '\\ud800 é \\0 \\n'", "assert f() == '\\ud800 é \\0 \\n'"),
    ("def f(x):\n    x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"),
    ("def f(x):\n    x.sort()", "x = [3, 1, 2]\nassert f(x) is None and x == [1, 2, 3]"),
    ("def f(d):\n    d['a'] = 1", "d = {}\nf(d=d)\nassert d == {'a': 1}"),
    ("def f(x):\n    x.reverse()\n    return x", "x = [1, 2]\nassert f(x) == [2, 1]"),
    ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)", "s = Stack()\nassert not s\ns.push(1)\ns.push([2])\nassert len(s) == 2 and s.pop() == [2] and s.items == [1] and s"),
    ("class Node:\n    def __init__(self, v, n=None): self.val, self.next = v, n\ndef f(x):\n    head = None\n    for v in reversed(x): head = Node(v, head)\n    return head", "n, out = f([1, 2]), []\nwhile n:\n    out.append(n.val)\n    n = n.next\nassert out == [1, 2]"),
    ("class V:\n    def __init__(self, x): self.x = x\n    def __str__(self): return f'<{self.x}>'\n    def __iter__(self): return iter([self.x])", "v = V(3)\nassert str(v) == '<3>' and list(v) == [3] and 3 in v and v != None"),
    ("class E(ValueError): pass\ndef f(): raise E('no')", "import pytest\nwith pytest.raises(ValueError, match='no'):\n    f()"),
    ("def f(x): return x + 1", "import pytest\nwith pytest.raises(TypeError):\n    f(object())\nassert f(1) == 2"),
    ("def f(x): return {}[x]", "try:\n    f('k')\n    assert False\nexcept KeyError:\n    pass"),
    ("import functools\n@functools.lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)", "assert f(50) == 12586269025"),
    ("import sys\nsys.setrecursionlimit(5000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(2000) == 2000"),
    ("def f(*args, key=None, **kw): return [args, key, kw]", "assert f(1, key=2, z=3) == [(1,), 2, {'z': 3}]"),
    ("def f(x): print('noise'); return sum(x)", "assert f(iter([1, 2])) == 3 and f(range(3)) == 3"),
    ("def f(x): return x", "from solution import f as g\nassert g('a') == 'a'"),
    ("def f(x): return x", "import solution\nassert solution.f((1, [2])) == (1, [2])"),
    ("LIMIT = 7\ndef f(x): return x", "from solution import LIMIT, f\nassert f(LIMIT) == 7"),
    ("if __name__ == '__main__':\n    raise SystemExit('not a script')\ndef f(x): return -x", "assert f(1) == -1"),
]  # fmt: skip

# (program, [(stdin, stdout)])
STDIN: list[tuple[str, list[tuple[str, str]]]] = [
    ("n = int(input())\nprint(*[int(x) ** 2 for x in input().split()][:n])", [("3\n1 2 3\n", "1 4 9"), ("1\n5", "25")]),
    ("import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", [("ab\ncd\n", "ba\ndc\n\n"), ("x", "x")]),
    ("print(input())\nexit()", [("a", "a")]),
    ("def main():\n    print('Hi')\nif __name__ == '__main__':\n    main()", [("", "Hi")]),
    ("print(1 / 3)", [("", "0.333333"), ("", "0.3333333333")]),
    ("print('%.3f' % float(input()))", [("2", "2.0"), ("0.5", "0.5000")]),
    ("import sys\ninput = sys.stdin.readline\nprint(input().count('a'))\nsys.exit(0)", [("banana\n", "3")]),
    ("import os, sys, io\nsys.stdin = io.StringIO(os.read(0, 10 ** 6).decode())\nos.write(1, input().upper().encode())", [("é\n", "É")]),
    ("import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(2 ** 26)\ndef main():\n    print(sum(map(int, sys.stdin.read().split())))\nt = threading.Thread(target=main)\nt.start()\nt.join()", [("1 2 3", "6")]),
]  # fmt: skip
