"""docs/algorithms.md lists every algorithm and option, and its blocks run; links in all pages are valid."""

import inspect
import json
import re
from pathlib import Path

import pytest

from distflow.flows import BUILT_IN
from distflow.flows.policy_update import update_policy
from page import blocks, done

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "algorithms.md"
FLOWS = ROOT / "src" / "distflow" / "flows"
_ROW = re.compile(r"^\| `(\w+)` \| \[(\w+\.py)\]\(([^)]*)\) \| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.M)


def test_every_flow_is_in_the_table_with_its_length_and_paper() -> None:
    rows = {name: rest for name, *rest in _ROW.findall(PAGE.read_text())}
    assert sorted(rows) == sorted(set(BUILT_IN) - {"evaluate"})
    for name, (file, link, lines, _, paper) in rows.items():
        path = PAGE.parent / link
        assert path.resolve() == FLOWS / f"{BUILT_IN[name].partition(':')[0].rpartition('.')[2]}.py"
        assert path.name == file
        text = path.read_text()
        assert int(lines) == len(text.splitlines()), name
        named = re.search(r"arXiv (\d+\.\d+)", text)
        assert paper == (f"[{named[1]}](https://arxiv.org/abs/{named[1]})" if named else "–"), name


def test_the_readme_has_their_length() -> None:
    lengths = [int(row[3]) for row in _ROW.findall(PAGE.read_text())]
    assert f"{min(lengths)} to {max(lengths)} lines each" in (ROOT / "README.md").read_text()


def test_every_shared_option_is_listed() -> None:
    part = PAGE.read_text().partition("## Shared options")[2].partition("\n## ")[0]
    listed = {option for row in re.findall(r"^\| (`[^|]*) \|", part, re.M) for option in re.findall(r"`(\w+)`", row)}
    assert listed == {p.name for p in inspect.signature(update_policy).parameters.values() if p.default is not p.empty}


def test_a_reward_model_is_trained_exported_and_used(tmp_path: Path) -> None:
    rows = [{"prompt": f"after {i}: ", "chosen": str(i + 1), "rejected": "no"} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for block in blocks(PAGE):
        if block.file:
            block.write(tmp_path)
        elif block.kind == "sh":
            ended = [done(tmp_path, command) for command in block.text.splitlines()]
    assert not any("Warning" in e.err for e in ended)
    trained, used = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("reward_model", "grpo")
    )
    assert [trained[0]["reward_model/accuracy"], trained[-1]["reward_model/accuracy"]] == [0.0, 1.0]
    assert all(m["reward/max"] > m["reward/min"] for m in used)


@pytest.mark.parametrize("name", ["flows.md", "placement.md"])
def test_the_commands_of_a_page_work(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"{i} + 1 = ", "answer": str(i + 1)} for i in range(64)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for block in blocks(ROOT / "docs" / name):
        if block.file:
            block.write(tmp_path)
        elif block.kind == "sh":
            for command in block.text.splitlines():
                done(tmp_path, command)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_are_valid(page: Path) -> None:
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert heading in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, heading
