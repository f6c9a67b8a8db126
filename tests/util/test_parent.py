"""A process ends with the one that launched it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from distflow.util.parent import PARENT, process_exists
from limits import wait_until

WATCH = (
    "import os, sys, time; from distflow.util.parent import watch_ancestor\n"
    "pid = watch_ancestor('LAUNCHED', lambda pid: (print('gone', pid, flush=True), os._exit(3)))\n"
    "print('watches', pid, os.getpid(), flush=True); time.sleep(1000)"
)
# A launcher of the program, by a script that stays in between.
LAUNCH = (
    "import os, subprocess, sys\n"
    "subprocess.run(['sh', '-c', '\"$@\"; true', 'sh', sys.executable, '-c', sys.argv[1]], "
    "env=os.environ | {'LAUNCHED': '1'})"
)


def test_the_launcher_behind_a_script_is_watched() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, WATCH], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    word, watched, pid = launcher.stdout.readline().split()
    assert (word, int(watched)) == ("watches", launcher.pid)
    assert process_exists(int(pid))
    os.kill(launcher.pid, signal.SIGKILL)
    assert launcher.stdout.readline() == f"gone {launcher.pid}\n"
    launcher.wait()


def test_a_worker_whose_launcher_is_gone_before_it_begins_ends_first_of_all(tmp_path: Path) -> None:
    """The environment names a launcher that is not its parent any more."""
    ended = subprocess.run(
        [sys.executable, "-m", "distflow", "--version"], env=os.environ | {PARENT: "1"}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")


def test_a_zombie_is_gone() -> None:
    process = subprocess.Popen(["true"])
    wait_until(lambda: not process_exists(process.pid))
    process.wait()
