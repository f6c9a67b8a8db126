"""The page in a real Chromium. Skipped where there is none."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from page.serving import TOKEN, serving
from recorded import START, metrics_row, sample_of, spans_of, write_run
from vision import png

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=2</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def wait(page: Any, condition: str, argument: Any = None) -> None:
    """Waits until an expression is true; not by `wait_for_function`, which the page's security policy forbids."""
    for _ in range(200):
        if page.evaluate(condition, argument):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never: {condition}")


class Page:
    """A page that fails the test if a script fails or anything but the server is asked."""

    def __init__(self, browser: Any, url: str) -> None:
        self.page = browser.new_page(viewport={"width": 1400, "height": 900})
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.asked: list[str] = []
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.url = url
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")

    def open(self, place: str) -> Any:
        self.page.evaluate("(hash) => { location.hash = hash; }", place)
        view = place.partition("?")[0]
        self.page.wait_for_selector(f"#view[data-view={view}]:not(.loading)")
        return self.page

    def close(self) -> None:
        self.page.close()
        assert self.errors == []
        assert [url for url in self.asked if not url.startswith((self.url.rpartition("/")[0], "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    write_run(folder / "one", steps=12, workers=4, samples_per_step=8)
    write_run(folder / "two", steps=9, workers=2)
    with serving(folder / "one", folder / "two") as port:
        yield f"http://localhost:{port}/{TOKEN}/"


def test_every_view_shows_the_run(browser: Any, site: str) -> None:
    page = Page(browser, site)
    text = page.open("overview").inner_text("#view")
    assert "62% of groups had no signal in the last 10 steps" in text
    assert "12 of 12" in text
    assert "flow: grpo" in text
    plan = page.open("plan?step=5")
    names = plan.locator("svg.plan .node .name").all_text_contents()
    assert names == ["data", "actor.generate", "reward.score", "group_advantage", "actor.update"]
    assert plan.locator("svg.plan .node.critical").count() >= 2
    assert plan.locator("svg.plan .arc.move").count() >= 1
    page.open("timeline?step=5")
    assert page.page.locator(".lanes canvas").bounding_box()["height"] > 4 * 30
    page.page.hover(".lanes canvas", position={"x": 300, "y": 60})
    assert "rank 0" in page.page.inner_text("#tip")
    assert "stayed local" in page.open("traffic").inner_text("#view")
    page.close()


def test_curves_are_searched_and_of_several_runs(browser: Any, site: str) -> None:
    page = Page(browser, site)
    page.open("curves").fill("#search", "reward mean")
    wait(page.page, "document.querySelectorAll('.curve').length === 1")
    card = page.page.locator(".curve")
    assert card.get_attribute("data-metric") == "reward/mean"
    assert "if it does not rise, nothing is learned" in card.inner_text()
    assert card.locator("canvas").count() == 1
    assert page.page.locator(".legend .key").all_inner_texts() == ["one", "two"]
    assert card.locator(".readout b").count() == 2
    page.page.select_option("select[aria-label='x axis']", "time")
    page.page.wait_for_selector(".curve canvas")
    page.page.click("#runs button[data-run='1']")
    page.open("overview?run=1")
    assert "9 of 9" in page.page.inner_text("#view")
    page.close()


def test_curves_are_in_groups_pinned_and_logarithmic(browser: Any, site: str) -> None:
    page = Page(browser, site)
    p = page.open("curves")
    assert p.locator(".group summary").all_inner_texts()[:2] == ["held-out 1", "reward 2"]
    p.click("[aria-label='pin data/bytes_sent']")
    assert p.locator(".group").first.locator(".curve").get_attribute("data-metric") == "data/bytes_sent"
    assert p.locator(".group summary").first.inner_text() == "pinned 1"
    assert "pins=data%2Fbytes_sent" in p.evaluate("location.hash")
    p.check("[aria-label='log scale']")
    p.select_option("select[aria-label='x axis']", "clock")
    p.wait_for_selector(".curve canvas")
    page.close()


def test_runs_are_listed_and_compared(browser: Any, site: str, folder: Path) -> None:
    (folder / "two" / "config.yaml").write_text("flow: grpo\nseed: 0\ncritic: null\ntrain:\n  lr: 0.5\n")
    page = Page(browser, site)
    p = page.open("runs")
    assert p.locator("table.runs tbody tr").count() == 2
    assert "What differs" in p.inner_text("#view")
    assert p.locator("section:has(h2:text('What differs')) tbody tr").all_inner_texts() == ["train.lr\tnot set\t0.5"]
    p.uncheck("[aria-label$='one']")
    wait(p, "!document.querySelector('#view').innerText.includes('What differs')")
    page.open("curves?compare=1")
    assert p.locator(".legend .key").count() == 0
    page.close()


def test_every_view_fits_on_a_phone(browser: Any, site: str) -> None:
    page = Page(browser, site)
    page.page.set_viewport_size({"width": 390, "height": 844})
    for view in ("overview", "plan", "timeline", "traffic", "curves", "samples", "runs"):
        p = page.open(view)
        assert p.evaluate("document.documentElement.scrollWidth") == 390, view
        box = p.locator(f"#tabs [data-view={view}]").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 390, view
    assert page.open("samples").locator(".row.head .cell:visible").all_inner_texts() == ["step", "reward", "response"]
    page.close()


def test_a_heat_map_of_many_workers(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, workers=80)
    with serving(run) as port:
        page = Page(browser, f"http://localhost:{port}/{TOKEN}/")
        assert "80 workers" in page.open("timeline").inner_text("#view")
        page.page.click(".lanes.fleet canvas", position={"x": 300, "y": 60})
        wait(page.page, "location.hash.includes('ranks=')")
        page.close()


def test_samples_are_filtered_sorted_and_shown(browser: Any, site: str) -> None:
    page = Page(browser, site)
    p = page.open("samples")
    assert "96 of 96 samples" in p.inner_text(".toolbar")
    p.select_option("[data-filter=source]", "digits")
    p.fill("[data-filter=from]", "10")
    wait(p, "document.querySelector('.toolbar').innerText.includes('12 of 96')")
    p.click("[data-column=score]")
    scores = [float(t) for t in p.locator(".space .cell.score").all_inner_texts()]
    assert scores == sorted(scores, reverse=True)
    p.click("[data-column=score]")
    scores = [float(t) for t in p.locator(".space .cell.score").all_inner_texts()]
    assert scores == sorted(scores)
    p.check("[data-filter=zero]")
    wait(p, "!document.querySelector('.space .row:not(.zero)')")
    p.click(".space .row")
    p.wait_for_selector(".message.assistant")
    assert "right answer" in p.inner_text(".pane")
    p.click("[data-show=tokens]")
    p.wait_for_selector(".tokens .token")
    assert p.locator(".tokens .token:not(.masked)").count() == 12
    p.select_option("select[aria-label='colour tokens by']", "entropy")
    p.hover(".tokens .token:not(.masked)")
    assert "entropy" in p.inner_text("#tip")
    p.click("[data-show='this prompt']")
    assert "The same prompt in other steps" in p.inner_text(".pane")
    assert p.locator(".answer-row").count() > 4
    page.close()


def test_masks_and_tool_calls_of_a_conversation_are_shown(browser: Any, folder: Path) -> None:
    run = write_run(folder / "tools", steps=1, samples_per_step=0)
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    fields = {"messages": messages, "response_tokens": ["call", "4", "It"], "response_mask": [1, 0, 1], "score": 1.0}
    row = {"step": 1, "id": 0, "group": 0, "split": "train", "fields": fields | {"rollout_logprobs": [-1.0, 0.0, -2.0]}}
    (run / "samples" / "0.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    with serving(run) as port:
        page = Page(browser, f"http://localhost:{port}/{TOKEN}/")
        p = page.open("samples?show=conversation")
        p.wait_for_selector(".toolcall")
        assert p.inner_text(".toolcall") == 'add({"a": 2})'
        assert p.locator(".message.tool").inner_text().endswith("4")
        p.keyboard.press("t")
        p.wait_for_selector(".tokens .token")
        assert p.locator(".tokens .token.masked").all_inner_texts() == ["4"]
        page.close()


def test_the_images_of_a_sample_are_shown_where_its_prompt_has_them(browser: Any, folder: Path) -> None:
    run = write_run(folder / "images", steps=1, samples_per_step=0)
    text = {"type": "text", "text": "Which is red?"}
    pictures = [f"data:image/png;base64,{base64.b64encode(png((20 + i, 10))).decode()}" for i in range(2)]
    prompt = [{"role": "user", "content": [{"type": "image"}, text, {"type": "image"}, {"type": "image"}]}]
    fields = {"prompt": prompt, "images": [*pictures, "https://example.com/spy.png"], "response": "The first."}
    row = {"step": 1, "id": 0, "group": 0, "split": "train", "fields": fields}
    (run / "samples" / "0.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    with serving(run) as port:
        page = Page(browser, f"http://localhost:{port}/{TOKEN}/")
        p = page.open("samples?show=conversation")
        p.wait_for_selector(".message img.picture")
        wait(p, "[...document.querySelectorAll('.picture')].every((i) => i.complete)")
        assert p.evaluate("[...document.querySelectorAll('.picture')].map((i) => i.naturalWidth)") == [20, 21]
        assert "[image]" in p.inner_text(".message.user"), "what is no data URL is not asked for"
        assert "[image]Which is red?" in p.inner_text(".cell.prompt >> nth=1")
        page.close()


def test_a_conversation_of_an_agent_is_shown_with_tokens_and_rewards(browser: Any, folder: Path) -> None:
    run = write_run(folder / "agent", steps=1, samples_per_step=0)
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    conversation = [
        {"role": "user", "content": "2+2?", "tokens": 7},
        {"role": "assistant", "content": "", "tool_calls": [call], "tokens": 5, "reward": 0.5},
        {"role": "tool", "name": "add", "content": "4", "tokens": 3},
        {"role": "assistant", "content": "It is", "tokens": 2, "cut": True},
    ]
    fields = {"prompt": "2+2?", "conversation": conversation, "environment_name": "calculator", "env_reward": 1.5}
    fields |= {"response": "add 4 It", "response_tokens": ["call", "4", "It"], "response_mask": [1, 0, 1]}
    row = {"step": 1, "id": 0, "group": 0, "split": "held-out", "fields": fields}
    (run / "samples" / "0.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    with serving(run) as port:
        page = Page(browser, f"http://localhost:{port}/{TOKEN}/")
        p = page.open("samples?show=conversation")
        p.wait_for_selector(".toolcall")
        facts = [t for t in p.locator(".message .facts").all_inner_texts() if t]
        assert facts == ["7 tokens", "5 tokens, reward 0.5", "3 tokens", "2 tokens, cut off"]
        assert "add(…) ⏎ It is" in p.inner_text(".space .row .response")
        assert "calculator" in p.inner_text(".pane h2")
        chips = p.locator(".chips .chip").all_inner_texts()
        assert chips == ["reward 1.5", "tokens 3", "turns 2", "sampled 2"]
        page.close()


def test_the_histories_of_a_sample_are_shown_as_a_tree(browser: Any, folder: Path) -> None:
    run = write_run(folder / "histories", steps=1, samples_per_step=0)

    def said(*texts: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]

    histories = [said("task", "ask", "more", "one"), said("task", "ask", "other", "two"), said("summary", "three")]
    fields: dict[str, Any] = {"prompt": "task", "conversation": histories[-1], "histories": histories}
    fields |= {"response_branches": [[3, 0, 4], [7, 0, 1]]}
    row = {"step": 1, "id": 0, "group": 0, "split": "train", "fields": fields}
    (run / "samples" / "0.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    with serving(run) as port:
        page = Page(browser, f"http://localhost:{port}/{TOKEN}/")
        p = page.open("samples?show=conversation")
        p.wait_for_selector(".history")
        assert p.locator(".history h3").all_inner_texts() == [
            "history 1",
            "history 2 goes on from history 1 after 2 messages",
            "history 3 begins anew",
        ]
        assert p.locator(".history.depth1 .message .text").all_inner_texts() == ["other", "two"]
        assert p.locator(".history .message").count() == 8
        page.close()


def test_keys_are_enough(browser: Any, site: str) -> None:
    page = Page(browser, site)
    p = page.page
    for key, view in (("6", "samples"), ("3", "timeline"), ("2", "plan")):
        p.keyboard.press(key)
        p.wait_for_selector(f"#view[data-view={view}]:not(.loading)")
    p.keyboard.press("ArrowLeft")
    wait(p, "document.querySelector('.stepbar output').textContent === 'step 11'")
    p.keyboard.press("6")
    p.wait_for_selector(".space .row.chosen")
    first = p.get_attribute(".space .row.chosen", "data-sample")
    p.keyboard.press("j")
    wait(p, "(first) => document.querySelector('.row.chosen').dataset.sample !== first", first)
    p.keyboard.press("k")
    wait(p, "(first) => document.querySelector('.row.chosen').dataset.sample === first", first)
    p.keyboard.press("/")
    p.keyboard.type("nothing has this")
    wait(p, "document.querySelector('.pane').innerText.includes('No sample matches')")
    p.keyboard.press("Escape")
    p.keyboard.press("?")
    assert "follow the run" in p.inner_text("dialog[open]")
    page.close()


def test_a_run_that_goes_on_is_followed(browser: Any, folder: Path) -> None:
    import random

    run = write_run(folder / "going", steps=2, workers=2, state="running")
    with serving(run, follow=True) as port:
        page = Page(browser, f"http://localhost:{port}/{TOKEN}/")
        p = page.open("samples")
        assert "8 of 8 samples" in p.inner_text(".toolbar")
        for rank in range(2):
            with open(run / "spans" / f"{rank}.jsonl", "ab") as file:
                file.write(b"".join(spans_of(rank, 2, 3, random.Random(1))))
        with open(run / "samples" / "0.jsonl", "a") as file:
            file.write(json.dumps(sample_of(3, 77, 1, 5, random.Random(1)), separators=(",", ":")) + "\n")
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics_row(3, 3) | {"time": START / 1e6}) + "\n")
        wait(p, "document.querySelector('.toolbar').innerText.includes('9 of 9')")
        page.open("timeline")
        wait(p, "document.querySelector('.stepbar output').textContent === 'step 3'")
        page.close()


def test_what_a_model_said_is_never_a_script(browser: Any, folder: Path) -> None:
    run = write_run(folder / "hostile", steps=2, workers=2)
    fields: dict[str, Any] = {
        "prompt": HOSTILE,
        "response": HOSTILE,
        "score": 1.0,
        "response_tokens": [HOSTILE] * 2,
        HOSTILE: HOSTILE,
    }
    fields |= {"messages": [{"role": HOSTILE, "content": HOSTILE, "tool_calls": [{"name": HOSTILE}]}]}
    turn = {"role": "assistant", "content": "", "tokens": HOSTILE, "tool_calls": [{"function": HOSTILE}]}
    fields |= {"conversation": [*fields["messages"], turn], "environment_name": HOSTILE}
    fields |= {"data_source": HOSTILE, "rollout_logprobs": [-1, -2]}
    row = {"step": 2, "id": 1, "group": 0, "split": HOSTILE, "fields": fields}
    (run / "samples" / "1.jsonl").write_text(json.dumps(row).replace('{"step": ', '{"step":') + "\n")
    (run / "config.yaml").write_text(HOSTILE)
    (run / "versions.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "time": 1, HOSTILE: 1.0}) + "\n")
    with open(run / "spans" / "0.jsonl", "a") as file:
        file.write(json.dumps([START + 5_000_000, 5, 2, "train", HOSTILE], separators=(",", ":")) + "\n")
    out = folder / "hostile.html"
    with pytest.raises(SystemExit, match="0"):
        main(["show", str(run), "--html", str(out)])
    with serving(run) as port:
        for url in (f"http://localhost:{port}/{TOKEN}/", out.as_uri()):
            page = Page(browser, url)
            for place in ("overview", "plan", "timeline", "traffic", "curves", "samples?split=" + "x"):
                page.open(place)
            p = page.open("samples")
            for show in ("conversation", "tokens", "fields", "this prompt"):
                p.click(f"[data-show='{show}']")
            assert p.evaluate("window.hacked") is None
            assert p.locator("#view img, #view script").count() == 0
            assert HOSTILE in p.inner_text("body")
            page.close()


def test_one_file_shows_the_same_without_a_server(browser: Any, folder: Path) -> None:
    run = write_run(folder / "exported", steps=60, workers=3)
    out = folder / "run.html"
    with pytest.raises(SystemExit, match="0"):
        main(["show", str(run), "--html", str(out)])
    page = Page(browser, out.as_uri())
    assert "60 of 60" in page.open("overview").inner_text("#view")
    for view in ("plan", "timeline", "traffic", "curves"):
        assert "could not be shown" not in page.open(view).inner_text("#view")
    p = page.open("samples")
    p.click(".space .row")
    p.wait_for_selector(".message.assistant")
    page.close()
