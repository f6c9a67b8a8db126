"""Dockerfiles, as far as a box can follow them: files, variables, and commands that need no network."""

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from distflow.agents.spec import EnvironmentSetupError

# What a box is in any case: this machine's programs, with this Python.
BASES = ("python", "debian", "ubuntu", "bash", "busybox", "buildpack-deps", "scratch")
_IGNORED = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME", "HEALTHCHECK")
_KNOWN = ("FROM", "RUN", "COPY", "ADD", "WORKDIR", "ENV", "ARG", "USER", "SHELL", *_IGNORED)
_NETWORK = ("curl", "wget", "git", "npm", "npx", "yarn", "cargo", "go", "gem", "uv", "uvx", "pipx", "conda", "mamba")
_PACKAGERS = ("apt-get", "apt", "apk", "yum", "dnf")
_SPLIT = re.compile(r"\s*(?:&&|;|\n)\s*")
_ASSIGNMENT = re.compile(r"\w+=\S*")
_REDIRECTION = re.compile(r"\d*[<>]\S*|&>\S*")
# Mirrors of the library, and Terminal-Bench's images, which are one of the library's and a recorder of the terminal.
_REGISTRY = re.compile(
    r"docker\.io/(?:library/)?|(?:.+/)?library/|ghcr\.io/laude-institute/t-bench/(?=(ubuntu|python)-)"
)
_OF_GIT = ("clone", "fetch", "pull", "push", "submodule")  # commands of git that need the network


@dataclass(frozen=True)
class Step:
    instruction: str
    rest: str
    line: int

    def __str__(self) -> str:
        return f"line {self.line} of its Dockerfile, {self.instruction} {self.rest[:80]}"


def read_steps(text: str) -> list[Step]:
    """Splits a Dockerfile into its instructions; raises for one that a box cannot follow."""
    steps: list[Step] = []
    for number, line in commands(text):
        name, _, rest = line.partition(" ")
        steps.append(Step(name.upper(), rest.strip(), number))
        _check(steps[-1])
    if sum(s.instruction == "FROM" for s in steps) != 1:
        raise EnvironmentSetupError("its Dockerfile has not one FROM: several stages are not supported")
    return steps


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Yields what is no comment, with the number of its line; lines that end with a backslash go on in the next."""
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("#") or (not line.strip() and not pending):
            continue
        first = first or number
        pending += line
        if line.rstrip().endswith("\\"):
            pending = pending.rstrip()[:-1]
            continue
        yield first, pending.strip()
        pending, first = "", 0


def _check(step: Step) -> None:
    if step.instruction not in _KNOWN:
        raise EnvironmentSetupError(f"{step}: is not supported")
    if "<<" in step.rest and step.instruction in ("RUN", "COPY", "ADD"):
        raise EnvironmentSetupError(f"{step}: text within a Dockerfile is not supported; write it to a file")
    if step.instruction in ("COPY", "ADD") and re.search(r"--from=|\bhttps?://", step.rest):
        raise EnvironmentSetupError(f"{step}: needs another image, or the network")
    if step.instruction == "USER" and step.rest not in ("root", "0"):
        raise EnvironmentSetupError(f"{step}: in a box there is root alone")
    if step.instruction == "FROM":
        check_base(step.rest.split(" ")[0], str(step))


def check_base(image: str, where: str) -> None:
    name = image.split("@")[0].split(":")[0]
    if registry := _REGISTRY.match(name):
        name = registry[1] or name[registry.end() :]
    if name not in BASES:
        raise EnvironmentSetupError(
            f"{where}: the image '{image}' is none that a box can stand for: {', '.join(BASES)}"
        )


def command_of(step: Step) -> str:
    """Returns what RUN runs, as a shell has it; its options are dropped."""
    rest = re.sub(r"^(--\w+=\S+\s+)+", "", step.rest)
    if rest.startswith("["):
        return shlex.join(json.loads(rest))
    return rest


def without_installs(command: str, where: str) -> str:
    """Returns the parts of a command that are to be run. Parts that install what is here already are not.

    Raises for what is not here, and for other parts that need the network.
    """
    if not any(_words(part)[:1] and _needs(part) is not None for part in _SPLIT.split(command)):
        return command
    kept = []
    for part in _SPLIT.split(command):
        missing = _needs(part)
        if missing is None:
            kept.append(part)
        elif missing:
            raise EnvironmentSetupError(
                f"{where}: needs {', '.join(missing)}, and boxes have no network; install it here, or use Docker"
            )
    return " && ".join(p for p in kept if p)


def _needs(part: str) -> list[str] | None:
    """Returns what a command would install or fetch and is not here; None if it does nothing of the kind.

    What may fail (`… || true`) is not needed.
    """
    if "||" in part:
        return None
    words = _words(part)
    program = words[0] if words else ""
    if program in ("python", "python3") and words[1:3] == ["-m", "pip"]:
        words, program = words[2:], "pip"
    if program in _PACKAGERS:
        if (words[1:2] and words[1] in ("install", "add")) or "install" in words:
            names = [w.split("=")[0] for w in words[1:] if not w.startswith("-") and w not in ("install", "add")]
            return [f"the package {n}" for n in names if not _has_package(n)]
        return []
    if program in ("pip", "pip3"):
        return list(_missing_python(words[1:])) if "install" in words else []
    if program in _NETWORK and (program != "git" or any(w in _OF_GIT for w in words[1:2])):
        return [f"`{part.strip()[:60]}`"]
    return None


def _words(part: str) -> list[str]:
    try:
        words = shlex.split(part, comments=True)
    except ValueError:  # a quote that the split has cut through
        return []
    while words and (words[0] in ("sudo", "env", "exec") or _ASSIGNMENT.fullmatch(words[0])):
        words = words[1:]
    return [w for w in words if not _REDIRECTION.fullmatch(w)]


def _missing_python(words: list[str]) -> Iterator[str]:
    skip = False
    for word in words:
        if skip or word == "install":
            skip = False
        elif word in ("-r", "--requirement", "-e", "--editable", "-c", "--constraint"):
            yield f"`pip install {word}`"
        elif word.startswith("-"):
            skip = word in ("-i", "--index-url", "--extra-index-url", "--root-user-action")
        elif found := re.match(r"([\w.-]+)(?:\[[^\]]*\])?(?:==([\w.]+))?", word):
            try:
                here = importlib.metadata.version(found[1])
            except importlib.metadata.PackageNotFoundError:
                yield f"the Python package {word}"
                continue
            if found[2] and here != found[2]:
                yield f"the Python package {word} (here is {here})"


def _has_package(name: str) -> bool:
    if shutil.which(name):
        return True
    if not shutil.which("dpkg-query"):
        return False
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", name]
    return subprocess.run(query, capture_output=True, check=False).stdout == b"installed"
