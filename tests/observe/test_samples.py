"""Which samples are recorded, and what of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from distflow.batch.batch import Batch, Ragged
from distflow.observe.samples import (
    MAX_MESSAGE,
    MAX_OBJECT,
    MAX_TEXT,
    MAX_TOKENS,
    SampleRecorder,
    as_columns,
    choose,
    step_of,
)


@given(st.integers(0, 40), st.integers(1, 10), st.integers(0, 40))
def test_whole_groups_are_chosen_and_never_more_than_asked_for(prompts: int, repeat: int, per_step: int) -> None:
    groups = np.arange(100, 100 + prompts, dtype=np.int64)
    chosen = choose(groups, repeat, per_step).tolist()
    assert len(chosen) <= per_step
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= {g * repeat + k for g in groups.tolist() for k in range(repeat)}
    if chosen and repeat <= per_step:
        assert all({g * repeat + k for k in range(repeat)} <= set(chosen) for g in {c // repeat for c in chosen})
    assert bool(chosen) == bool(prompts and per_step)


def record(folder: Path, *columns: dict[str, Any], ids: Any = (0, 1), chosen: Any = (0, 1)) -> list[dict[str, Any]]:
    recorder = SampleRecorder(folder, 0, 32, lambda tokens: [chr(97 + t % 26) for t in tokens])
    recorder.log.open(0)
    for c in columns:
        recorder.add(3, "train", np.array(chosen), np.array(ids), 2, c)
    recorder.flush()
    return [json.loads(line) for line in (folder / "samples" / "0.jsonl").read_text().splitlines()]


def test_fields_of_a_sample_come_together_from_several_nodes(tmp_path: Path) -> None:
    tokens = Ragged.of([torch.tensor([0, 1]), torch.tensor([2])])
    logprobs = Ragged.of([torch.tensor([-0.123456, float("-inf")]), torch.tensor([-1.0])])
    messages = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    rows = record(
        tmp_path,
        {"prompt": messages, "response_tokens": tokens, "rollout_logprobs": logprobs},
        {"score": torch.tensor([1.0, float("nan")]), "keep": torch.tensor([True, False])},
    )
    assert rows == [
        {
            "step": 3,
            "id": 0,
            "group": 0,
            "split": "train",
            "fields": {
                "prompt": messages[0],
                "response_tokens": ["a", "b"],
                "rollout_logprobs": [-0.1235, None],
                "score": 1.0,
                "keep": True,
            },
        },
        {
            "step": 3,
            "id": 1,
            "group": 0,
            "split": "train",
            "fields": {
                "prompt": messages[1],
                "response_tokens": ["c"],
                "rollout_logprobs": [-1.0],
                "score": None,
                "keep": False,
            },
        },
    ]


def test_only_chosen_samples_are_recorded(tmp_path: Path) -> None:
    rows = record(tmp_path, {"response": ["a", "b", "c"]}, ids=(4, 5, 6), chosen=(5, 9))
    assert [(row["id"], row["group"], row["fields"]) for row in rows] == [(5, 2, {"response": "b"})]


def test_what_is_long_is_cut_and_what_is_no_text_and_no_number_per_token_is_left_out(tmp_path: Path) -> None:
    long = torch.arange(3 * MAX_TOKENS)
    rows = record(
        tmp_path,
        {
            "prompt": ["x" * (MAX_TEXT + 9)] * 2,
            "prompt_tokens": Ragged.of([long, long]),
            "response_tokens": Ragged.of([long, long]),
            "images": Ragged.of([torch.zeros(2, 5), torch.zeros(1, 5)]),
            "lone": ["\ud800", "ok"],
        },
    )
    fields = rows[0]["fields"]
    assert fields["prompt"] == "x" * MAX_TEXT + " …"
    assert [len(fields[f]) for f in ("prompt_tokens", "response_tokens")] == [MAX_TOKENS] * 2
    assert fields["prompt_tokens"][-1] == chr(97 + (3 * MAX_TOKENS - 1) % 26)
    assert fields["response_tokens"][0] == "a"
    assert "images" not in fields
    assert fields["lone"] == "?"


def test_whatever_a_node_returns_can_be_written(tmp_path: Path) -> None:
    rows = record(
        tmp_path, {"a": [np.float32(0.5), torch.ones(2)], "b": [np.arange(2), Path("x")], "c": [{1, 2}, b"x"]}
    )
    assert [row["fields"]["a"] for row in rows] == [0.5, [1.0, 1.0]]
    assert [row["fields"]["b"] for row in rows] == [[0, 1], "x"]


def test_nothing_is_written_for_nothing(tmp_path: Path) -> None:
    assert record(tmp_path, {"response": ["a", "b"]}, chosen=()) == []


def test_the_step_of_a_line_is_read_without_parsing_it_and_only_if_it_is_whole(tmp_path: Path) -> None:
    record(tmp_path, {"response": ["a", "b"]})
    line = (tmp_path / "samples" / "0.jsonl").read_bytes().splitlines(keepends=True)[0]
    assert step_of(line) == 3
    assert {step_of(line[:n]) for n in range(len(line))} == {None}


def test_columns_of_whatever_a_node_may_return() -> None:
    tensor, ids = torch.ones(2), np.arange(2)
    assert as_columns(tensor, ["score"]) == {"score": tensor}
    assert as_columns({"a": [1, 2], "b": 3}, ["a", "b"]) == {"a": [1, 2]}
    assert as_columns(Batch(ids, ids, {"a": [1, 2]}), ["a"]) == {"a": [1, 2]}
    assert as_columns(np.array([True, False]), ["keep"])["keep"].tolist() == [True, False]  # type: ignore[union-attr]
    assert as_columns(None, ["a"]) == {}


def test_a_long_conversation_stays_one(tmp_path: Path) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call], "tokens": 9, "reward": 0.5}
    short = [{"role": "user", "content": "hi", "tokens": 4}, turn]
    result = {"role": "tool", "content": "x" * 50_000, "tokens": 12_000}
    rows = record(tmp_path, {"conversation": [short, [*short, result, turn] * 30]})
    assert rows[0]["fields"]["conversation"] == short
    long = rows[1]["fields"]["conversation"]
    assert len(json.dumps(long)) < MAX_OBJECT
    assert long[:2] == short
    assert long[2] == {**result, "content": "x" * MAX_MESSAGE + " …"}
    assert long[-1] == turn
    assert [m["content"] for m in long if m["role"] == "…"] == ["104 messages are left out here"]


def test_references_to_images_become_small_copies(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path, 0, 32, None, lambda references: [f"data:{r}" for r in references])
    recorder.log.open(0)
    recorder.add(3, "train", np.array([0]), np.array([0, 1]), 2, {"images": [["a.png", "b.png"], ["c.png"]]})
    recorder.flush()
    (row,) = [json.loads(line) for line in (tmp_path / "samples" / "0.jsonl").read_text().splitlines()]
    assert row["fields"]["images"] == ["data:a.png", "data:b.png"]
