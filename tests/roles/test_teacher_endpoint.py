"""A teacher at an endpoint: what it is asked, what is read from its answers, and what is refused."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from distflow.batch.batch import Batch, Ragged
from distflow.errors import ConfigError, NodeError
from distflow.plan import Layout
from distflow.roles.context import RoleContext
from distflow.roles.teacher_endpoint import TeacherEndpoint

VOCABULARY = 9


def truth(tokens: list[int]) -> list[list[float]]:
    """The teacher's log-probs at each place of a prompt, from the second token on."""
    noise = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
    return [(noise[t] - np.log(np.exp(noise[t]).sum())).tolist() for t in tokens[:-1]]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = cast(Any, self.server)
        server.asked.append((self.path, self.headers["Authorization"], body))
        status, answer = server.answer(self.path, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None: ...


def as_vllm(path: str, body: dict[str, Any], most: int = 20) -> tuple[int, Any]:
    if path == "/tokenize":
        return 200, {"tokens": [len(word) for word in body["prompt"].split()], "count": 0}
    tokens, entries = body["prompt"], list[Any]([None])
    for token, row in zip(tokens[1:], truth(tokens), strict=True):
        order = np.argsort(row)[::-1].tolist()
        chosen = {*order[: min(most, body["prompt_logprobs"])], token}
        entries.append({str(i): {"logprob": row[i], "rank": order.index(i) + 1, "decoded_token": "?"} for i in chosen})
    return 200, {"choices": [{"text": "", "prompt_logprobs": entries}]}


@contextmanager
def server(answer: Any = as_vllm) -> Iterator[Any]:
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


def make(url: str, tp: int = 1, temperature: float = 1.0, lengths: int = 0) -> TeacherEndpoint:
    def tokenizer(text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[len(word) + lengths for word in text.split()])

    role = SimpleNamespace(
        name="teacher",
        layout=lambda *_: Layout(tuple(range(tp)), 1, tp),
        rollout=SimpleNamespace(temperature=temperature),
        model=SimpleNamespace(tokenizer=tokenizer, name="student"),
    )
    return TeacherEndpoint(cast(RoleContext, role), url, "big", "TEACHER_KEY")


PROMPTS, RESPONSES = [[1, 2], [3]], [[4, 5, 6], [7, 8]]


def batch(**more: Any) -> Batch:
    columns = {f: Ragged.of([torch.tensor(r) for r in v]) for f, v in zip(TOKENS, (PROMPTS, RESPONSES), strict=True)}
    return Batch(np.array([40, 41]), np.array([0, 1]), columns | more)


TOKENS = ("prompt_tokens", "response_tokens")


def test_it_reads_log_probs_and_the_likeliest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    with server() as vllm:
        teacher = make(vllm.url)
        own, top = teacher.logprobs(batch()), teacher.top_logprobs(batch(), k=3)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        rows = truth([*prompt, *response])[len(prompt) - 1 :]
        assert own[i].tolist() == pytest.approx([row[t] for row, t in zip(rows, response, strict=True)])
        best = [np.argsort(row)[::-1][:3].tolist() for row in rows]
        assert top["teacher_top_ids"][i].tolist() == best
        expected = [[row[t] for t in ids] for row, ids in zip(rows, best, strict=True)]
        torch.testing.assert_close(top["teacher_top_logprobs"][i], torch.tensor(expected))
    assert {key for _, key, _ in vllm.asked} == {"Bearer secret"}
    path, _, body = next(a for a in vllm.asked if a[0] != "/tokenize")
    assert (path, body["model"], body["prompt_logprobs"], body["max_tokens"]) == ("/v1/completions", "big", 0, 1)


def test_a_server_that_returns_fewer_log_probs_is_told_how_to_be_started() -> None:
    with (
        server(lambda path, body: as_vllm(path, body, most=2)) as vllm,
        pytest.raises(NodeError, match="gave 3 log-probs for a token, not 5; start it with --max-logprobs 5"),
    ):
        make(vllm.url).top_logprobs(batch(), k=5)


def test_an_answer_without_log_probs_ends_the_run() -> None:
    def plain(path: str, body: Any) -> Any:
        return as_vllm(path, body) if path == "/tokenize" else (200, {"choices": [{"text": "hi"}]})

    with server(plain) as other, pytest.raises(NodeError, match=r"no log-probs of sample 40: .* not one of this API"):
        make(other.url).logprobs(batch())


def test_what_cannot_be_a_teacher_is_refused_before_training() -> None:
    with server() as vllm:
        with pytest.raises(ConfigError, match="has another tokenizer than 'student', and reads its tokens"):
            make(vllm.url, lengths=1)
        with pytest.raises(ConfigError, match=r"computes at temperature 1, and rollout.temperature is 0.7"):
            make(vllm.url, temperature=0.7)
        with pytest.raises(ConfigError, match="give it tp: 1"):
            make(vllm.url, tp=2)
        branches = Ragged.of([torch.zeros(0, 3, dtype=torch.int64)] * 2)
        with pytest.raises(NodeError, match="samples with several histories"):
            make(vllm.url).logprobs(batch(response_branches=branches))
    with server(lambda path, body: (404, {})) as none, pytest.raises(ConfigError, match="cannot compare its tokenizer"):
        make(none.url)
