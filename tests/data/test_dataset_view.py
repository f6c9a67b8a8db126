"""Rows under other names, or some of them only: values and places stay those of the file."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.dataset import Dataset
from distflow.data.dataset_view import DatasetView


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": i}) + "\n" for i in range(10))
    )
    return Dataset([folder / "data.jsonl"], cache=folder / "cache")


def test_columns_go_by_their_new_names(rows: Dataset) -> None:
    view = DatasetView(rows, {"question": "prompt"})
    assert view.names == ("prompt", "answer")
    assert view[3] == {"prompt": "q3", "answer": 3}
    assert len(view) == 10


def test_without_names_and_choice_nothing_changes(rows: Dataset) -> None:
    view = DatasetView(rows, {})
    assert view.names == rows.names
    assert [view[i] for i in range(len(view))] == [rows[i] for i in range(len(rows))]


def test_names_may_be_exchanged(rows: Dataset) -> None:
    view = DatasetView(rows, {"question": "answer", "answer": "question"})
    assert view.names == ("answer", "question")
    assert view[1] == {"answer": "q1", "question": 1}


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=10, max_size=10), max_size=4))
def test_what_is_kept_of_what_was_kept_is_what_a_list_would_be(rows: Dataset, choices: list[list[bool]]) -> None:
    view, left = DatasetView(rows, {"question": "prompt"}), list(range(10))
    for choice in choices:
        kept = np.flatnonzero(choice[: len(left)])
        before = len(view)
        smaller = view.keep(kept)
        assert len(view) == before  # the old one is as it was
        view, left = smaller, [left[i] for i in kept]
    assert len(view) == len(left)
    assert view.names == ("prompt", "answer")
    assert [view[i]["answer"] for i in range(len(view))] == left


def test_a_row_is_described_by_its_place_in_the_file(rows: Dataset) -> None:
    view = DatasetView(rows, {}).keep(np.array([2, 5, 9])).keep(np.array([1, 2]))
    assert view.describe(0).endswith("data.jsonl:6")
    assert view.describe(1).endswith("data.jsonl:10")
