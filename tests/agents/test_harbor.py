"""Folders of tasks: a scripted agent gets the verdict that the tests give by hand, and what cannot work is refused."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.fake_model import Conversation, converse, start_message
from distflow.agents.adapters.harbor import rows
from distflow.agents.env_pool import EnvPool
from distflow.agents.spec import EnvironmentSetupError, EnvironmentSpec
from distflow.agents.tasks.dockerfile import command_of, read_steps, without_installs
from distflow.agents.tasks.image import build
from distflow.agents.tasks.task import read_task, reward_of
from distflow.sandbox.box.box import Box, BoxError

TASKS = Path(__file__).parent / "harbor_tasks"
NAMES = sorted(p.name for p in TASKS.iterdir())
SPEC = EnvironmentSpec("tasks", "harbor:harbor_tasks", args={"engine": "box", "command_s": 300}, time_limit_s=900.0)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    pool = EnvPool([SPEC], TASKS.parent)
    yield pool
    pool.close()


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def solve(messages: list[dict[str, Any]]) -> str:
    """Runs the solution of the task that it is told, whose text names it."""
    if messages[-1]["role"] == "tool":
        return "done"
    [name] = [n for n in NAMES if (TASKS / n / "instruction.md").read_text().strip() == messages[-1]["content"]]
    return call("bash", command=(TASKS / name / "solution" / "solve.sh").read_text())


def starts(names: list[str]) -> list[dict[str, Any]]:
    given = {row["task"]: row["prompt"] for row in rows(TASKS)}
    return [start_message({"task": name}, given[name], i) for i, name in enumerate(names)]


def by_hand(name: str, solved: bool) -> float:
    """Returns the verdict of tests/test.sh, without an agent."""
    task = read_task(TASKS / name, name)
    image = build(task)
    with Box(image.folder) as box:
        if solved:
            box.run(
                ["bash", "-c", (TASKS / name / "solution" / "solve.sh").read_text()], image.workdir, image.variables
            )
        box.put("/tests", task.tests)
        box.put("/logs/verifier", {})
        box.run(["bash", "/tests/test.sh"], image.workdir, image.variables, 300)
        return reward_of(box.get("/logs/verifier/reward.txt"), box.get("/logs/verifier/reward.json"))[0]


def test_the_verdict_is_that_of_the_tests_by_hand(pool: EnvPool) -> None:
    """Of ten tasks of different kinds, for an agent that solves them and for one that does nothing."""
    assert len(NAMES) == 10
    for say, solved in ((solve, True), (lambda messages: "I cannot.", False)):
        played = converse(pool, starts(NAMES), say, seconds=900)
        assert [p.failure for p in played] == [None] * len(NAMES)
        got = {name: (p.result or {})["reward"] for name, p in zip(NAMES, played, strict=True)}
        assert got == {name: by_hand(name, solved) for name in NAMES}
        assert got == {n: 0.75 * solved if n == "partial-credit" else float(solved) for n in NAMES}


def test_the_model_edits_files_in_a_private_copy(pool: EnvPool) -> None:
    turns = [
        call("read_file", path="stats.py"),
        call("edit_file", path="stats.py", old="nothing like this", new=""),
        call(
            "edit_file",
            path="stats.py",
            old="    return ordered[len(ordered) // 2]",
            new="    n = len(ordered)\n    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2",
        ),
        call("write_file", path="/app/more/notes.txt", content="mended"),
        call("bash", command="cat more/notes.txt; false"),
        "done",
    ]
    played: list[Conversation] = converse(pool, starts(["fix-bug"] * 2), turns)
    for p in played:
        assert p.result is not None
        assert p.result["reward"] == 1.0
        said = [m["content"] for m in p.messages if m["role"] == "tool"]
        assert said[0] == (TASKS / "fix-bug/environment/repository/stats.py").read_text()
        assert "0 times in stats.py" in said[1]
        assert said[4] == "mended\n[exit code 1]"
    assert "n = len" not in (TASKS / "fix-bug/environment/repository/stats.py").read_text()
    [untouched] = converse(pool, starts(["fix-bug"]), ["nothing to do"])
    assert (untouched.result or {})["reward"] == 0.0


def test_an_agent_cannot_leave_its_box(pool: EnvPool) -> None:
    secret = TASKS / "hello/tests/test.sh"
    commands = [
        f"cat {shlex.quote(str(secret))}",
        "ls /tests",
        "echo x > /usr/bin/x",
        "exec 3<>/dev/tcp/1.1.1.1/80",
        "cat /proc/1/environ",
        "mount -t tmpfs none /tmp",
        "kill -9 1; test ! -e /proc/1",
        "for i in $(seq 400); do sleep 60 & done; sleep 60",
    ]
    turns = [call("bash", command=f"{c} && echo REACHED") for c in commands]
    [played] = converse(pool, starts(["hello"]), [*turns, call("bash", command="echo alive"), "done"])
    said = [m["content"] for m in played.messages if m["role"] == "tool"]
    assert len(said) == len(commands) + 1
    assert not any("REACHED" in s for s in said)
    assert said[-1] == "alive\n"
    assert played.failure is None


def test_a_command_that_hangs_is_told_and_the_conversation_goes_on(pool: EnvPool) -> None:
    spec = EnvironmentSpec("tasks", "harbor:harbor_tasks", args={"engine": "box", "command_s": 0.5}, time_limit_s=900.0)
    own = EnvPool([spec], TASKS.parent)
    try:
        turns = [
            call("bash", command="echo begun; sleep 99"),
            call("bash", command="echo hello > greeting.txt"),
            "done",
        ]
        [played] = converse(own, starts(["hello"]), turns)
    finally:
        own.close()
    assert "begun\n\n[took longer than 0.5 s and was killed]" in [m["content"] for m in played.messages]
    assert (played.result or {})["reward"] == 1.0


@pytest.mark.parametrize("overlay", [True, False])
def test_boxes_leave_their_image_as_it_is(overlay: bool, tmp_path: Path) -> None:
    (tmp_path / "app/deep").mkdir(parents=True)
    (tmp_path / "app/deep/a.txt").write_text("one")
    for _ in range(2):
        with Box(tmp_path, overlay=overlay) as box:
            assert box.run(["bash", "-c", "cat deep/a.txt; echo two > deep/a.txt; cat deep/a.txt"], "/app").output == (
                "onetwo\n"
            )
            assert box.run(["bash", "-c", "rm -rf deep && mkdir deep && ls deep | wc -l"], "/app").output == "0\n"
    assert (tmp_path / "app/deep/a.txt").read_text() == "one"


def test_files_and_errors_of_boxes(tmp_path: Path) -> None:
    with Box(tmp_path) as box:
        box.put("/a/b", {"c": b"\0binary"})
        assert box.get("/a/b/c") == b"\0binary"
        assert (box.get("/a/b/none"), box.get("/a/b")) == (None, None)
        assert box.run(["no-such-program"]).code == 127
        assert box.run(["sh", "-c", "cd && touch /opt/a /home/b /var/log/c"]).code == 0
        ended = box.run(["bash", "-c", "yes | head -c 1000000"])
        assert "bytes are left out" in ended.output
        box._process.kill()
        box._process.wait()
        with pytest.raises(BoxError, match="the box"):
            box.run(["true"])


def write(folder: Path, **files: str) -> Path:
    whole = {"task.toml": "", "instruction.md": "Do it.", "tests/test.sh": "true"} | files
    for name, text in whole.items():
        (folder / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "t" / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"task.toml": "[environment]\ngpus = 1"}, r"task 't': `environment\.gpus` = 1 is not supported"),
        ({"task.toml": "[[environment.mcp_servers]]\nname = 'x'"}, r"`environment\.mcp_servers`"),
        ({"task.toml": "[environment]\nnetwork_mode = 'allowlist'"}, r"`environment\.network_mode` = 'allowlist'"),
        ({"task.toml": "[verifier]\nenv = {KEY = '${OPENAI_API_KEY}'}"}, "a variable of this machine is not given"),
        ({"task.toml": "[agent]\ntimeout_sec = 'long'"}, r"`agent\.timeout_sec` is 'long'"),
        ({"task.toml": "not toml"}, r"task\.toml cannot be read"),
        ({"steps/one/instruction.md": "x"}, "`steps` is not supported"),
        ({"environment/docker-compose.yaml": "x"}, r"docker-compose\.yaml"),
        ({"environment/Dockerfile": "FROM nvidia/cuda:12"}, "line 1 .* the image 'nvidia/cuda:12' is none that a box"),
        ({"environment/Dockerfile": "FROM a\nFROM b"}, "the image 'a' is none"),
        ({"environment/Dockerfile": "FROM debian\nCOPY --from=x a b"}, "line 2 .* needs another image"),
        (
            {"environment/Dockerfile": "FROM debian\nRUN apt-get update && \\\n  apt-get install -y no-such-thing"},
            "line 2 .* needs the package no-such-thing, and boxes have no network",
        ),
        (
            {"environment/Dockerfile": "FROM python\nRUN pip install nosuchpackage==1"},
            "the Python package nosuchpackage",
        ),
        ({"tests/test.sh": "set -e\nuvx pytest"}, "line 2 of its tests/test.sh, uvx pytest: needs `uvx pytest`"),
    ],
)
def test_what_a_box_cannot_give_is_refused_by_name(files: dict[str, str], words: str, tmp_path: Path) -> None:
    write(tmp_path, **files)
    pool = EnvPool([EnvironmentSpec("x", "harbor:.", args={"engine": "box"})], tmp_path)
    try:
        with pytest.raises(EnvironmentSetupError, match=words):
            pool.describe()
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("args", "folder", "words"),
    [
        ({"engin": "box"}, ".", "`args.engin` is not known"),
        ({"engine": "lxc"}, ".", "`args.engine` is 'lxc'"),
        ({"engine": "box"}, "none", "there is no such folder"),
        ({"engine": "box"}, "t/tests", r"there is no task\.toml"),
    ],
)
def test_bad_settings(args: dict[str, str], folder: str, words: str, tmp_path: Path) -> None:
    write(tmp_path)
    pool = EnvPool([EnvironmentSpec("x", f"harbor:{folder}", args=args)], tmp_path)
    try:
        with pytest.raises(EnvironmentSetupError, match=words):
            pool.describe()
    finally:
        pool.close()


def test_tests_that_write_no_reward_or_hang_fail_the_sample(tmp_path: Path) -> None:
    write(tmp_path / "a", **{"tests/test.sh": "echo broken; exit 3"})
    write(tmp_path / "b", **{"tests/test.sh": "sleep 99", "task.toml": "[verifier]\ntimeout_sec = 0.5"})
    pool = EnvPool([EnvironmentSpec("x", "harbor:.", args={"engine": "box"})], tmp_path)
    try:
        given = [start_message({"task": name}, "go", i) for i, name in enumerate(["a/t", "b/t", "c"])]
        silent, hangs, unknown = converse(pool, given, ["done"])
    finally:
        pool.close()
    assert "got no reward from tests/test.sh of task 'a/t': there is neither" in (silent.failure or "")
    assert "it exited with 3: broken" in (silent.failure or "")
    assert "the tests of task 'b/t' took longer than 0.5 s" in (hangs.failure or "")
    assert "there is no task 'c'" in (unknown.failure or "")


def test_what_is_here_already_is_not_installed() -> None:
    text = """
        FROM {}
        RUN apt-get update && apt-get install -y \\
            # the shell
            bash \\
            tar && echo one \\
            two && pip install -q no-such-thing 2>/dev/null || true
    """
    for image in ("public.ecr.aws/docker/library/buildpack-deps:1", "docker.io/debian@sha256:0", "library/bash"):
        read_steps(text.format(image))
    steps = read_steps(text.format("ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624"))
    optional = "pip install -q no-such-thing 2>/dev/null || true"
    kept = without_installs(command_of(steps[1]), "RUN").split(" && ")
    assert [k.split() for k in kept] == [["echo", "one", "two"], optional.split()]


def test_rewards() -> None:
    assert reward_of(b"0.5\n", None) == (0.5, {})
    assert reward_of(None, b'{"reward": 1, "speed": 2.5}') == (1.0, {"speed": 2.5})
    assert reward_of(None, b'{"score": 0.25}') == (0.25, {})
    for text, data in ((b"", None), (b"nan", None), (None, None), (None, b'{"a": 1, "b": 2}'), (None, b"[1")):
        with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
            reward_of(text, data)


_DOCKER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  run) echo c0ffee ;;
  inspect) echo /work ;;
  exec) case "$*" in *reward.txt) echo 0.5 ;; *reward.json) exit 1 ;; *ls*) echo seen ;; esac ;;
  cp) cat > /dev/null ;;
esac
"""


def test_where_docker_runs_a_task_is_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program in Docker's place: what it is asked to do, in which order."""
    log = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(_DOCKER.format(log=log))
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    write(tmp_path / "tasks", **{"environment/Dockerfile": "FROM nvidia/cuda:12"})
    pool = EnvPool([EnvironmentSpec("x", "harbor:tasks")], tmp_path)
    try:
        [played] = converse(pool, [start_message({"task": "t"}, "go")], [call("bash", command="ls"), "done"])
    finally:
        pool.close()
    assert played.failure is None
    assert (played.result or {})["reward"] == 0.5
    assert "seen\n" in [m["content"] for m in played.messages]
    calls = [line.split()[0] for line in log.read_text().splitlines() if not line.startswith("info")]
    assert calls == ["build", "run", "inspect", *["exec"], *["exec", "cp"] * 2, *["exec"] * 3, "rm"]
