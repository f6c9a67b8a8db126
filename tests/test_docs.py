"""docs/algorithms.md tells of every algorithm, and what it shows runs; links lead somewhere."""

import inspect
import json
import re
from pathlib import Path

import pytest

from distflow.flows import BUILT_IN
from distflow.flows.learn import learn
from page import blocks, done

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "algorithms.md"
FLOWS = ROOT / "src" / "distflow" / "flows"
_ROW = re.compile(r"^\| `(\w+)` \| \[(\w+\.py)\]\(([^)]*)\) \| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.M)


def test_every_flow_is_in_the_table_with_its_length_and_paper() -> None:
    found = {name: rest for name, *rest in _ROW.findall(PAGE.read_text())}
    assert sorted(found) == sorted(set(BUILT_IN) - {"evaluate"})
    for name, (file, link, lines, _, paper) in found.items():
        path = PAGE.parent / link
        assert path.resolve() == FLOWS / f"{BUILT_IN[name].partition(':')[0].rpartition('.')[2]}.py"
        assert path.name == file
        text = path.read_text()
        assert int(lines) == len(text.splitlines()), name
        named = re.search(r"arXiv (\d+\.\d+)", text)
        assert paper == (f"[{named[1]}](https://arxiv.org/abs/{named[1]})" if named else "–"), name


def test_the_readme_says_how_long_they_are() -> None:
    lengths = [int(row[3]) for row in _ROW.findall(PAGE.read_text())]
    assert f"{min(lengths)} to {max(lengths)} lines each" in (ROOT / "README.md").read_text()


def test_every_option_of_the_family_is_told() -> None:
    part = PAGE.read_text().partition("## Options of all")[2].partition("\n## ")[0]
    told = {option for row in re.findall(r"^\| (`[^|]*) \|", part, re.M) for option in re.findall(r"`(\w+)`", row)}
    assert told == {p.name for p in inspect.signature(learn).parameters.values() if p.default is not p.empty}


def test_a_reward_model_is_trained_exported_and_asked(tmp_path: Path) -> None:
    rows = [{"prompt": f"after {i}: ", "chosen": str(i + 1), "rejected": "no"} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for block in blocks(PAGE):
        if block.file:
            block.write(tmp_path)
        elif block.kind == "sh":
            said = [done(tmp_path, command) for command in block.text.splitlines()]
    assert not any("Warning" in ended.err for ended in said)
    learned, used = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("reward_model", "grpo")
    )
    assert [learned[0]["reward_model/accuracy"], learned[-1]["reward_model/accuracy"]] == [0.0, 1.0]
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
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert heading in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, heading
