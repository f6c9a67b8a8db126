"""What tests of the sandbox share: limits, ways to attempt something, and a container that refuses a mechanism."""

import functools
import subprocess
import sys
from collections.abc import Sequence

from distflow.sandbox.jail import seccomp, system
from distflow.sandbox.sandbox import ProgramLimits, ProgramResult, Sandbox, SandboxError
from distflow.sandbox.walls import MECHANISMS

LIMITS = ProgramLimits(cpu_s=1.0, wall_s=3.0, memory_mb=128, disk_mb=4, output_kb=64, open_files=32, threads=16)
WITHOUT_NAMESPACES = MECHANISMS[1:]  # as in most containers

# Programs print "OUT" for each attempt that succeeds and "no" for each that is refused.
ATTEMPT = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, f):
    try:
        value = f()
    except (OSError, MemoryError, RuntimeError) as e:
        print("no", name, type(e).__name__)
    else:
        print("OUT", name, value)
def call(number, *args):
    value = libc.syscall(number, *args)
    if value < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return value
"""


@functools.cache
def missing_protection(mechanisms: tuple[str, ...]) -> str:
    """Returns why code cannot be isolated here; empty if it can."""
    try:
        with Sandbox(mechanisms=mechanisms):
            return ""
    except SandboxError as e:
        return str(e)


def assert_refused(result: ProgramResult) -> None:
    assert "OUT" not in result.stdout, result
    assert "no " in result.stdout, result


def run_in_container(refused: dict[str, int], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command where system calls are refused, each with an error number, as profiles of containers do."""
    arguments = [f"{name}={number}" for name, number in refused.items()]
    whole = [sys.executable, __file__, *arguments, "--", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=120)


def _refuse(refused: dict[str, int]) -> None:
    machine = seccomp._machine()
    column, architecture = seccomp._MACHINES[machine]
    calls = {"landlock_create_ruleset": (444, 444), "landlock_restrict_self": (446, 446)}
    calls |= {"seccomp": seccomp._SECCOMP} | seccomp._DENIED
    program = seccomp._check_architecture(architecture)
    for name, number in refused.items():
        program += seccomp._rule(calls[name][column], [seccomp._return(seccomp._ERRNO | number)])
    system.forbid_new_privileges()
    seccomp._install(seccomp._pack([*program, seccomp._return(seccomp._ALLOW)]), 0)


if __name__ == "__main__":
    end = sys.argv.index("--")
    _refuse({name: int(number) for name, number in (word.split("=") for word in sys.argv[1:end])})
    sys.exit(subprocess.run(sys.argv[end + 1 :]).returncode)
