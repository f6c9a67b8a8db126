# ruff: noqa: E501 (programs and tests on a line each)
"""Cheats on the processes around `add`: exits, patches, frames, memory, pipes, time, imports, encodings."""

_ZERO = "\ndef add(a, b): return 0\n"

EXITS = {
    "exits at once": "import sys\nsys.exit(0)",
    "exits at once without a trace": "import os\nos._exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "exits after the first call": "import os\nn = 0\ndef add(a, b):\n    global n\n    n += 1\n    if n > 1: os._exit(0)",
    "exits from a thread": "import os, threading\nthreading.Timer(0.01, os._exit, [0]).start()" + _ZERO,
    "quits": "def add(a, b): quit()",
    "aborts": "import os\ndef add(a, b): os.abort()",
    "kills itself": "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGKILL)",
    "kills its parent": "import os, signal\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass" + _ZERO,
    "exits at exit": "import atexit, os\natexit.register(os._exit, 0)" + _ZERO,
    "overflows the stack": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef add(a, b): return add(a, b)",
    "leaves no recursion": "import sys\nsys.setrecursionlimit(60)" + _ZERO,
    "takes all memory": "def add(a, b): return 'x' * 10 ** 10",
    "closes all descriptors": "import os\nos.closerange(0, 64)" + _ZERO,
}

PATCHES = {
    "assertions that are none": "import builtins\nbuiltins.AssertionError = type('A', (SystemExit,), {})" + _ZERO,
    "builtins that lie": (
        "import builtins\n"
        "for name in ('abs', 'len', 'sorted', 'isinstance', 'all', 'any', 'bool', 'type', 'compile', 'repr', 'hex'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)" + _ZERO
    ),
    "an import that lies": (
        "import builtins\nbuiltins.__import__ = lambda *a, **k: type('M', (), {'__getattr__': lambda *a: 3})()" + _ZERO
    ),
    "a json that lies": "import json\njson.dumps = lambda *a: '[0, \"ok\", true, {}]'\njson.loads = lambda *a: []" + _ZERO,
    "modules of the judge that lie": (
        "import sys\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if name.startswith('distflow'):\n"
        "        for key, value in list(vars(module).items()):\n"
        "            if callable(value): setattr(module, key, lambda *a, **k: True)" + _ZERO
    ),
    "a comparison that lies": "from distflow.sandbox import compare\ncompare.same = lambda *a: True" + _ZERO,
    "a math that lies": "import math\nmath.isclose = lambda *a, **k: True\nmath.fabs = lambda x: 0" + _ZERO,
    "a math of its own": "class math:\n    isclose = staticmethod(lambda *a, **k: True)" + _ZERO,
    "helpers of its own": (
        "isclose = allclose = check = assert_equal = approx = candidate = lambda *a, **k: True\n"
        "class np: allclose = staticmethod(isclose)\n"
        "class pytest: approx = raises = staticmethod(isclose)" + _ZERO
    ),
    "constants of its own": "EPS = TOLERANCE = inf = nan = Infinity = NaN = 0" + _ZERO,
    "fractions of its own": (
        "import fractions\nclass Fraction:\n    def __init__(self, *a): pass\n    __eq__ = lambda s, o: True\n"
        "fractions.Fraction = Fraction\ndef add(a, b): return Fraction()"
    ),
    "builtins of its own": "len = sum = sorted = list = zip = map = all = str = lambda *a: True" + _ZERO,
    "a unittest that lies": (
        "import unittest\n"
        "for n in dir(unittest.TestCase):\n"
        "    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a, **k: None)" + _ZERO
    ),
    "a pytest that lies": "import sys, types\nsys.modules['pytest'] = types.SimpleNamespace(approx=lambda x: x)" + _ZERO,
    "a tracer": "import sys, threading\nsys.settrace(lambda *a: sys.exit(0))\nthreading.settrace(sys.gettrace())" + _ZERO,
    "a profiler": "import sys\nsys.setprofile(lambda *a: None)\nsys.setswitchinterval(1e-9)" + _ZERO,
    "an audit hook": "import sys\nsys.addaudithook(lambda *a: None)" + _ZERO,
    "a hook for exceptions": "import sys\nsys.excepthook = sys.unraisablehook = lambda *a: None" + _ZERO,
    "classes that are built otherwise": "import builtins\nbuiltins.__build_class__ = lambda *a, **k: int" + _ZERO,
    "optimised away": "import sys, os\nsys.flags = type('F', (), {'optimize': 2})()\nos.environ['PYTHONOPTIMIZE'] = '2'" + _ZERO,
    "ctypes that change small numbers": (
        "import ctypes\ntry: ctypes.c_int.from_address(id(0) + 24).value = 3\nexcept BaseException: pass" + _ZERO
    ),
}  # fmt: skip

_SEARCH = """
def texts():
    {walk}
def add(a, b):
    import re
    pattern = 'asse' + 'rt a' + r'dd\\(.*?\\) == ([^ ,)]+)'
    found = [m for t in texts() for m in re.findall(pattern, t)]
    return eval(found[0]) if found else 0
"""

MEMORY = {
    "searches frames": _SEARCH.format(
        walk="import sys\n    f = sys._getframe()\n    while f:\n        yield repr(f.f_locals)[:99999]\n        f = f.f_back"
    ),
    "searches globals of frames": _SEARCH.format(
        walk="import sys\n    f = sys._getframe()\n    while f:\n        yield repr(f.f_globals)[:99999]\n        f = f.f_back"
    ),
    "searches all objects": _SEARCH.format(
        walk="import gc\n    yield from (str(x)[:9999] for x in gc.get_objects() if isinstance(x, (list, tuple, dict)))"
    ),
    "searches referrers": _SEARCH.format(
        walk="import gc\n    yield from (str(x)[:9999] for x in gc.get_referrers(add, texts))"
    ),
    "searches modules": _SEARCH.format(
        walk="import sys\n    yield from (str(vars(m))[:9999] for m in sys.modules.values())"
    ),
    "searches the stack": _SEARCH.format(walk="import inspect\n    yield from (str(i) for i in inspect.stack())"),
    "searches a traceback": _SEARCH.format(
        walk="try: 1 / 0\n    except Exception as e: yield str(e.__traceback__.tb_frame.f_back.f_locals)"
    ),
    "searches its memory": _SEARCH.format(
        walk="try: yield open('/proc/self/mem', 'rb').read(9).decode()\n    except OSError: yield ''"
    ),
    "searches files": _SEARCH.format(
        walk="import glob\n    yield from (open(p).read() for p in glob.glob('/tmp/**/*.py', recursive=True)[:9])"
    ),
    "searches the command": _SEARCH.format(walk="import sys\n    yield str(sys.argv) + str(sys.orig_argv)"),
}

_SEND = "import os, json\nfor n in range(9): os.write(4, {line} + b'\\n')" + _ZERO

PIPES = {
    "writes verdicts": "import os\nfor fd in range(3, 32):\n    try: os.write(fd, b'1' * 9)\n    except OSError: pass\nos._exit(0)",
    "writes verdicts when called": (
        "import os\ndef add(a, b):\n    for fd in range(3, 32):\n        try: os.write(fd, b'1\\n{}' * 9)\n        except OSError: pass"
    ),
    "answers in advance": _SEND.format(line="json.dumps([n, 'ok', True, {}]).encode()"),
    "says it is ready and answers in advance": (
        "import os, json\nos.write(4, b'\"loaded\"\\n')\n"
        "for n in range(99): os.write(4, json.dumps([n, 'ok', {'set': [0, 1]}, {}]).encode() + b'\\n')\nos._exit(0)"
    ),
    "answers with another number": _SEND.format(line="b'[99, \"ok\", 3, {}]'"),
    "answers with objects": _SEND.format(line="json.dumps([n, 'ok', {'ref': 99}, {}]).encode()"),
    "answers with builtins": _SEND.format(line="json.dumps([n, 'ok', {'builtin': 'eval'}, {}]).encode()"),
    "answers with code as a name": _SEND.format(
        line="json.dumps([n, 'ok', {'namedtuple': ['A', ['x', 'y=print(1)'], [1, 2]]}, {}]).encode()"
    ),
    "answers with an unknown kind": _SEND.format(line="json.dumps([n, 'ok', {'object': 1, 'tuple': 2}, {}]).encode()"),
    "answers with changes": _SEND.format(line="json.dumps([n, 'ok', None, {'0': [1], '1': [2], '7': 3}]).encode()"),
    "answers with errors": _SEND.format(line="json.dumps([n, 'raised', 'StopIteration', '']).encode()"),
    "answers with exits": _SEND.format(line="json.dumps([n, 'raised', 'SystemExit', '0']).encode()"),
    "answers with types as errors": _SEND.format(line="json.dumps([n, 'raised', 'type', 'x']).encode()"),
    "answers with nesting": "import os\nos.write(4, b'\"loaded\"\\n' + b'[' * 60000 + b'\\n')" + _ZERO,
    "answers without end": (
        "import os, threading\ndef flood():\n    while True: os.write(4, b'1' * 65536)\n"
        "threading.Thread(target=flood, daemon=True).start()" + _ZERO
    ),
    "answers with rubbish": "import os\nos.write(4, b'rubbish\\n\\xff\\n' * 9)" + _ZERO,
    "answers with infinity": _SEND.format(line="b'[%d, \"ok\", Infinity, {}]' % n"),
    "reads the requests itself": (
        "import os, json\nos.write(4, b'\"loaded\"\\n')\nfor line in open(3):\n    n, op, target, args, kw = json.loads(line)\n"
        "    os.write(4, json.dumps([n, 'ok', args[:1], {}]).encode() + b'\\n')"
    ),
    "crosses the pipes": "import os\nos.dup2(4, 3)\nos.dup2(4, 1)\nprint('[0, \"ok\", 3, {}]', flush=True)" + _ZERO,
    "prints success": "print('1' * 99, flush=True)\nprint('OK', 'passed', '3')" + _ZERO,
    "prints for ever": "while True: print('3')",
    "prints what it reads": "import sys\nprint(sys.stdin.read())" + _ZERO,
}  # fmt: skip

TIME = {
    "loops when loaded": "while True: pass",
    "loops when called": "def add(a, b):\n    while True: pass",
    "sleeps when called": "import time\ndef add(a, b): time.sleep(99)",
    "stops itself": "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGSTOP)",
    "sets an alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.001)\nsignal.signal(signal.SIGALRM, lambda *a: None)" + _ZERO,
    "ignores all signals": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass" + _ZERO
    ),
}  # fmt: skip

IMPORTS = {
    "a finder of modules": "import sys\nclass F:\n    find_spec = lambda *a: sys.exit(0)\nsys.meta_path.insert(0, F())"
    + _ZERO,
    "files that shadow modules": (
        "import sys\nfor n in ('math', 'pytest', 'unittest', 'solution', 'sitecustomize', 'conftest'):\n"
        "    open(f'{n}.py', 'w').write('import os; os._exit(0)')\nsys.path.insert(0, '.')" + _ZERO
    ),
    "a module with every name": "def __getattr__(name): return lambda *a, **k: True",
    "a solution in sys.modules": (
        "import sys, types\nm = types.ModuleType('solution')\nm.add = lambda a, b: 0\nsys.modules['solution'] = m"
    ),
    "imports the tests": "import test, tests, __main__\ndef add(a, b): return __main__.expected",
    "is main": "__name__ = '__main__'\nimport sys\nsys.modules['__main__'] = sys.modules.get('solution')" + _ZERO,
}

TEXTS = {
    "nothing": "",
    "prose": "I would rather not.",
    "a refusal in a block": "```\nI would rather not.\n```",
    "pass": "pass",
    "no function": "x = 3",
    "a name without a function": "add = 3",
    "the tests": "assert True\ndef check(candidate): pass\ndef test_add(): pass\nclass T: pass",
    "a class with every method": "class Solution:\n    def __getattr__(self, name): return lambda *a, **k: True",
    "a method that lies": "class Solution:\n    def add(self, *a): return self\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 3",
    "another encoding": "# coding: utf-7\ndef add(a, b): return 0 # +AAo-import os+AAo-os._exit(0)",
    "a null byte": "def add(a, b): return 0\0\nimport os",
    "a byte order mark": "\ufeffimport os\nos._exit(0)",
    "another alphabet": "def аdd(a, b): return a + b",  # the first letter is Cyrillic
    "a lone surrogate": "def add(a, b): return '\ud800'",
    "a form feed": "\fdef add(a, b): return 0\f",
    "nested parentheses": "(" * 500 + ")" * 500,
    "quotes that close the string": "'''\n\"\"\"\n) + exit() # \\",
}  # fmt: skip

PROCESSES = EXITS | PATCHES | MEMORY | PIPES | TIME | IMPORTS | TEXTS
