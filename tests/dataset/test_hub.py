"""Data sets by their names on the hub, which is a folder here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distflow.dataset import hub
from distflow.dataset.dataset import Dataset
from distflow.errors import ConfigError
from distflow.run.program import Program

COMMIT = "0123abcd"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What the hub was asked for; it has one data set."""
    snapshot = tmp_path / "snapshots" / COMMIT
    for split, rows in (("train", 6), ("test", 2)):
        folder = snapshot / "main" / split
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"prompt": [f"{split} {i}" for i in range(rows)]}), folder / "0000.parquet")
    calls: list[tuple[Any, ...]] = []

    def give(repo: str, repo_type: str, revision: str, allow_patterns: str) -> str:
        calls.append((repo, repo_type, revision, allow_patterns))
        if repo != "us/sums":
            raise RuntimeError("404: not found.\nAdvice")
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", give)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.list_repo_files",
        lambda self, repo, **_: ["README.md", "main/train/0000.parquet", "main/test/0000.parquet"],
    )
    hub.download.cache_clear()
    yield calls
    hub.download.cache_clear()


def test_a_split_of_the_hub_is_read_and_its_commit_known(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "{flow: grpo, model: a/b, reward: r.py:f, data: 'hub:us/sums/main/train',"
        " eval: 'hub:us/sums/main/test@0123abcd'}"
    )
    program = Program.load(config)
    assert [Dataset(files)[1] for files in (program.files, program.eval_files)] == [
        {"prompt": "train 1"},
        {"prompt": "test 1"},
    ]
    assert program.data_commits == {"hub:us/sums/main/train": COMMIT, "hub:us/sums/main/test@0123abcd": COMMIT}
    assert asked == [  # once each
        ("us/sums", "dataset", "refs/convert/parquet", "main/train/*.parquet"),
        ("us/sums", "dataset", COMMIT, "main/test/*.parquet"),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:sums", r"data\.files: 'hub:sums' is no data set of the hub; write hub:OWNER/NAME/CONFIG/SPLIT"),
        ("hub:us/sums", r"which config and split\? Write .*; known: main/test, main/train"),
        ("hub:us/sums/main/trian", r"'us/sums' has no Parquet files of 'main/trian'; did you mean 'main/train'\?"),
        ("hub:us/none/main/train", r"the hub does not give us .*: 404: not found; check .*HF_HUB_OFFLINE=1"),
    ],
)
def test_a_name_that_the_hub_does_not_have_is_refused(asked: list[tuple[Any, ...]], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hub.download(name, "data.files")
