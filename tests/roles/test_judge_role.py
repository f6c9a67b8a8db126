"""A model scores responses: at an endpoint, or in an engine of the worker."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from distflow.batch.batch import Batch
from distflow.batch.context import Context
from distflow.errors import ConfigError, NodeError
from distflow.observe.metrics import StepMetrics
from distflow.plan import Layout
from distflow.roles import judge_endpoint
from distflow.roles.context import RoleContext
from distflow.roles.judge import Judge
from warm import distflow_run

QUESTION = "Is {response} the answer to {prompt}? From 0 to 10."


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = cast(Any, self.server)
        server.asked.append((self.path, self.headers["Authorization"], body))
        status, content = server.answer(body["messages"][0]["content"])
        data = json.dumps({"choices": [{"message": {"content": content}}]} if status == 200 else {"error": content})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def endpoint(answer: Any) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked, server.answer, server.url = [], answer, f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def make(question: str = QUESTION, tp: int = 1, **args: Any) -> Judge:
    layout = Layout(tuple(range(tp)), 1, tp)
    return Judge(cast(RoleContext, SimpleNamespace(name="reward", rank=0, layout=lambda _: layout)), question, **args)


def batch(*responses: str) -> Batch:
    count = np.arange(len(responses))
    return Batch(count + 40, count, {"prompt": ["2 + 2?"] * len(responses), "response": list(responses)})


def context() -> Context:
    return Context(0, 0, 1, Layout((0,), 1), 0, StepMetrics(), Path(), np.arange(9))


def test_an_endpoint_is_asked_about_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    verdicts = {"4": "10", "5": "I'd say 2.5/10", "6": "no idea", "7": "<think>9?</think> 11"}
    with endpoint(lambda q: (200, next(v for r, v in verdicts.items() if f"Is {r} the" in q))) as server:
        score = make(base_url=server.url, name="m", api_key_env="JUDGE_KEY").score(batch("4", "5", "6", "7"), context())
    assert score.tolist() == [1.0, 0.25, 0.0, 0.0]
    path, key, body = min(server.asked, key=lambda a: a[2]["messages"][0]["content"])
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer secret", "m", 0)
    assert body["messages"] == [{"role": "user", "content": "Is 4 the answer to 2 + 2?? From 0 to 10."}]


def test_a_server_that_is_overloaded_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_endpoint, "_RETRY_S", 0)
    answers = iter([(429, "slow down"), (503, "one moment"), (200, "5")])
    with endpoint(lambda _: next(answers)) as server:
        assert make(base_url=server.url, name="m").score(batch("4"), context()).tolist() == [0.5]


def test_a_server_that_answers_nobody_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_endpoint, "_RETRY_S", 0)
    with endpoint(lambda _: (401, "wrong key")) as server:
        judge = make(base_url=server.url, name="m")
        with pytest.raises(NodeError, match=r"none of 2 questions was answered; .* 401: .*wrong key"):
            judge.score(batch("4", "5"), context())
        assert len(server.asked) == 2  # a wrong key does not become right
    with pytest.raises(NodeError, match="cannot be reached"):
        judge.score(batch("4"), context())


def test_a_verdict_without_a_number_may_be_an_error() -> None:
    with endpoint(lambda _: (200, "splendid")) as server:
        judge = make(base_url=server.url, name="m", on_failure="error")
        with pytest.raises(NodeError, match="sample 40 got no number from 0 to 10, but 'splendid'; ask another"):
            judge.score(batch("4"), context())


def test_messages_are_shown_with_their_roles() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    chat = [{"role": "user", "content": "hi {x}"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    judge = make("Judge {conversation}, {n}", base_url="http://x", name="m")
    row = {"conversation": chat, "n": torch.tensor(3)}
    assert judge.ask_about(row) == 'Judge user: hi {x}\nassistant: add({"a": 1}), 3'


@pytest.mark.parametrize(
    ("question", "args", "error"),
    [
        ("Is it good?", {}, "`question` names columns in braces"),
        ("{prompt.x}", {}, "`question` names columns in braces"),
        (QUESTION, {"range": [1]}, "`range` is"),
        (QUESTION, {"range": [2, 1]}, "`range` is"),
        (QUESTION, {"base_url": "http://x"}, "`base_url` and `name`"),
        (QUESTION, {"base_url": "http://x", "name": "m", "model": "x"}, "or `model`"),
        (QUESTION, {"base_url": "http://x", "name": "m", "tp": 2}, "give it tp: 1"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(question: str, args: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make(question, **args)


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no column 'respons'; did you mean 'response'"):
        make("{respons}", base_url="http://x", name="m").check_fields(["prompt", "response"])


OWN_SCORES = """
from distflow.roles.judge import Judge


class Reader(Judge):
    def read(self, verdict):
        return sum(verdict.encode()) % 7 / 6
"""
SPLIT = {
    "ranks": {"rollout": "0", "train": "1"},
    "default": {"ranks": "train"},
    "nodes": {"actor.generate": {"ranks": "rollout"}},
}


def judged(folder: Path, name: str, workers: int = 2, **changes: Any) -> dict[tuple[int, int], str]:
    """What the model of a run says of its samples in two steps, by step and sample."""
    args = {"question": "{prompt}{response}", "max_tokens": 3, **changes.pop("args", {})}
    config = {
        "flow": "grpo",
        "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
        "data": {"files": "train.jsonl", "batch": 4},
        "rollout": {"n": 2, "max_tokens": 4},
        "train": {"lr": 0.05},
        "roles": {"reward": {"call": "scores.py:Reader", "args": args}},
        "steps": 2,
        "run_dir": name,
        **changes,
    }
    (folder / "scores.py").write_text(OWN_SCORES)
    (folder / "train.jsonl").write_text("".join(f'{{"prompt": "{i} + 1 = "}}\n' for i in range(8)))
    (folder / "c.yaml").write_text(json.dumps(config))
    ended = distflow_run(folder / "c.yaml", workers=workers, folder=folder)
    assert not any(ended.codes), ended.err
    assert all("judge/unread" in row for row in map(json.loads, (folder / name / "metrics.jsonl").open()))
    rows = [json.loads(r) for p in (folder / name / "samples").iterdir() for r in p.read_text().splitlines()]
    verdicts = {(r["step"], r["id"]): r["fields"]["verdict"] for r in rows if "verdict" in r["fields"]}
    assert len(verdicts) == 16
    assert all(verdicts.values())
    return verdicts


def test_the_model_of_the_run_judges_as_it_was_or_as_it_is(tmp_path: Path) -> None:
    """As it was, in an engine of its own; as it is, in that of the actor, wherever this generates."""
    frozen = judged(tmp_path, "frozen")
    current = judged(tmp_path, "current", args={"model": "actor"})
    first = {key: verdict for key, verdict in frozen.items() if key[0] == 1}
    assert first == {key: verdict for key, verdict in current.items() if key[0] == 1}
    assert frozen != current  # after a step of training
    placement = SPLIT | {"roles": {"reward": {"ranks": "rollout"}}}
    assert judged(tmp_path, "split", args={"model": "actor"}, placement=placement) == current


def test_a_judge_that_asks_the_actor_is_where_that_generates(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"engine of 'actor', which is dp1 on ranks 0, and itself is dp1 on 1; give"
    ):
        judged(tmp_path, "split", args={"model": "actor"}, placement=SPLIT)
