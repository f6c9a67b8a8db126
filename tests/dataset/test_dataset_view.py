"""Renamed columns and selected rows: values and locations stay those of the file."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.dataset.dataset import Dataset
from distflow.dataset.view import DatasetView


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": i}) + "\n" for i in range(10))
    )
    return Dataset([folder / "data.jsonl"], cache=folder / "cache")


def test_columns_have_their_new_names(dataset: Dataset) -> None:
    view = DatasetView(dataset, {"question": "prompt"})
    assert view.column_names == ("prompt", "answer")
    assert view[3] == {"prompt": "q3", "answer": 3}
    assert len(view) == 10


def test_without_renaming_and_selection_nothing_changes(dataset: Dataset) -> None:
    view = DatasetView(dataset, {})
    assert view.column_names == dataset.column_names
    assert [view[i] for i in range(len(view))] == [dataset[i] for i in range(len(dataset))]


def test_names_may_be_swapped(dataset: Dataset) -> None:
    view = DatasetView(dataset, {"question": "answer", "answer": "question"})
    assert view.column_names == ("answer", "question")
    assert view[1] == {"answer": "q1", "question": 1}


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=10, max_size=10), max_size=4))
def test_a_selection_of_a_selection_is_that_of_a_list(dataset: Dataset, choices: list[list[bool]]) -> None:
    view, left = DatasetView(dataset, {"question": "prompt"}), list(range(10))
    for choice in choices:
        indices = np.flatnonzero(choice[: len(left)])
        before = len(view)
        smaller = view.select(indices)
        assert len(view) == before  # unchanged
        view, left = smaller, [left[i] for i in indices]
    assert len(view) == len(left)
    assert view.column_names == ("prompt", "answer")
    assert [view[i]["answer"] for i in range(len(view))] == left


def test_the_location_of_a_row_is_that_in_the_file(dataset: Dataset) -> None:
    view = DatasetView(dataset, {}).select(np.array([2, 5, 9])).select(np.array([1, 2]))
    assert view.location(0).endswith("data.jsonl:6")
    assert view.location(1).endswith("data.jsonl:10")
