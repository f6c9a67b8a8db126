"""A page of documentation as its parts: files, commands, and their output."""

import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warm import Ended, cli_main, distflow_run, in_fork

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
_NAME = re.compile(r"# (\w+\.\w+)(, continued)?\n")


@dataclass(frozen=True)
class Block:
    kind: str  # python, yaml, sh; empty for the output of the commands before it
    text: str
    file: str = ""
    continued: bool = False

    def write(self, folder: Path) -> None:
        path = folder / self.file
        before = path.read_text() + ("\n\n" if path.suffix == ".py" else "") if self.continued else ""
        path.write_text(before + self.text)


def blocks(page: Path) -> Iterator[Block]:
    """Yields the blocks of a page in order; the first line of a file has its name. A command is one line."""
    for kind, text in _BLOCK.findall(page.read_text()):
        text = re.sub(r" \\\n\s*", " ", text) if kind == "sh" else text
        name = _NAME.match(text) if kind in ("python", "yaml") else None
        yield Block(kind, text[name.end() :], name[1], bool(name[2])) if name else Block(kind, text)


def _python(words: list[str]) -> None:
    sys.path.insert(0, ".")
    runpy.run_path(words[0], run_name="__main__")


def done(folder: Path, command: str, *more: str) -> Ended:
    """Runs a command of a page in `folder`, `run` with two workers. It has to succeed."""
    program, *words = command.split()
    if program == "python":
        ended = in_fork(_python, *words, folder=folder)
    elif words[0] == "run":
        ended = distflow_run(folder / words[1], *words[2:], *more, workers=2, folder=folder)
    else:
        ended = in_fork(cli_main, *words, folder=folder)
    assert not any(ended.codes), f"{command}\n{ended.out}\n{ended.err}"
    return ended
