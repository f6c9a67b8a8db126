"""A place for a task in Docker or Podman, with the methods of a box."""

import io
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from distflow.agents.spec import EnvironmentSetupError
from distflow.agents.tasks.task import Task, digest
from distflow.sandbox.box.box import BoxError, BoxResult

ENGINES = ("docker", "podman")


def find_engine() -> str | None:
    """Returns the first engine whose server answers."""
    for engine in ENGINES:
        if shutil.which(engine):
            try:
                if not subprocess.run([engine, "info"], capture_output=True, timeout=20, check=False).returncode:
                    return engine
            except (OSError, subprocess.TimeoutExpired):
                continue
    return None


def build_image(engine: str, task: Task) -> str:
    """Returns the name of the task's image, which the engine builds, or has in its cache."""
    if task.dockerfile is None:
        if task.base_image is None:
            raise EnvironmentSetupError(f"task '{task.name}': it has neither a Dockerfile nor `docker_image`")
        return task.base_image
    name = f"distflow-task:{digest(task.environment)}"
    ended = _call([engine, "build", "--quiet", "--tag", name, str(task.environment)], 3600.0)
    if ended.returncode:
        said = ended.stderr.decode(errors="replace")[-300:].strip()
        raise EnvironmentSetupError(f"task '{task.name}': {engine} does not build its image: {said}")
    return name


class Container:
    """A container that sleeps until something is to be run in it. `internet` as the task's file says."""

    def __init__(self, engine: str, image: str, task: Task) -> None:
        self._engine = engine
        network = [] if task.internet else ["--network", "none"]
        variables = [f"--env={key}={value}" for key, value in task.variables.items()]
        limits = ["--memory", f"{task.memory_mb}m", "--pids-limit", "1024"]
        options = ["--detach", "--rm", "--init", *network, *limits, *variables, "--entrypoint", "sleep"]
        self._id = self._output("run", *options, image, "infinity").strip()
        self.workdir = self._output("inspect", "--format", "{{.Config.WorkingDir}}", self._id).strip() or "/"

    def run(
        self, argv: Sequence[str], cwd: str = "/", env: Mapping[str, str] | None = None, wall_s: float = 30.0
    ) -> BoxResult:
        variables = [f"--env={key}={value}" for key, value in (env or {}).items()]
        command = ["timeout", "-s", "KILL", str(wall_s), *argv]
        try:
            ended = _call([self._engine, "exec", "--workdir", cwd, *variables, self._id, *command], wall_s + 30.0, True)
        except subprocess.TimeoutExpired:
            raise BoxError(f"{self._engine} does not answer") from None
        return BoxResult(ended.returncode, ended.stdout.decode(errors="replace"), ended.returncode == 137)

    def put(self, path: str, files: Mapping[str, bytes] | Path, instead: bool = False) -> None:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            if isinstance(files, Path):
                archive.add(files, arcname=".")
            else:
                for name, content in files.items():
                    entry = tarfile.TarInfo(name)
                    entry.size, entry.mode = len(content), 0o644
                    archive.addfile(entry, io.BytesIO(content))
        self._output("exec", self._id, "sh", "-c", f"{'rm -rf ' + path + ';' if instead else ''} mkdir -p {path}")
        self._output("cp", "-", f"{self._id}:{path}", data=data.getvalue())

    def get(self, path: str, most: int = 1 << 20) -> bytes | None:
        ended = _call([self._engine, "exec", self._id, "head", "-c", str(most), path], 60.0)
        return None if ended.returncode else ended.stdout

    def close(self) -> None:
        _call([self._engine, "rm", "--force", self._id], 60.0)

    def _output(self, *command: str, data: bytes = b"") -> str:
        ended = subprocess.run([self._engine, *command], input=data, capture_output=True, timeout=120, check=False)
        if ended.returncode:
            raise BoxError(f"{self._engine} {command[0]}: {ended.stderr.decode(errors='replace')[-300:].strip()}")
        return ended.stdout.decode()


def _call(command: Sequence[str], seconds: float, both: bool = False) -> "subprocess.CompletedProcess[bytes]":
    """Runs a command of the engine; with `both`, what it writes to stderr is in its stdout."""
    errors = subprocess.STDOUT if both else subprocess.PIPE
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.run(command, stdin=none, stdout=pipe, stderr=errors, timeout=seconds, check=False)
