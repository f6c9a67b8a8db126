"""Text to tokens and back: nothing is lost, and a prompt that cannot be used is an error with a way out."""

import json
import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, PreTrainedTokenizerFast

from distflow.errors import ConfigError, DataError
from distflow.model.source import Source
from distflow.model.text import Prompt, Text, ragged
from distflow.model.time_limit import OutOfTimeError, time_limit
from distflow.model.tokenizer import SMALLEST, train_tokenizer

CORPUS = ["the cat sat on the mat", "what is 12 + 34? the answer is 46", "naïve — 日本語", "a\n\n  b\t c"] * 3
BYTES = train_tokenizer(iter([]), 0)
PAIRS = train_tokenizer(iter(CORPUS), 290)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def text_of(limit: int = 1000, template: str | None = "", folder: Path | None = None) -> Text:
    """`template`: None takes it away."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder) if folder else train_tokenizer(iter(CORPUS), 290)
    tokenizer.chat_template = template or (None if template is None else tokenizer.chat_template)
    return Text(Source("tiny/model", AutoConfig.for_model("qwen2"), tokenizer, folder), limit)


TEXT = text_of()


@pytest.mark.parametrize("tokenizer", [BYTES, PAIRS], ids=["bytes", "pairs"])
@settings(deadline=None, max_examples=200)
@given(text=ANY_TEXT)
@example(text="a , b . c ! don 't  \n")
@example(text="\x00\x7f\ufeff\U0001f600 12345")
@example(text="say <eos> and <pad>")
def test_any_text_is_decoded_to_itself(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert all(0 <= t < len(tokenizer) for t in tokens)


def test_what_is_too_long_in_any_tokens_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(limit=10)
    longest = max(map(len, text.tokenizer.get_vocab()))
    message = "has 1,000 characters, which are more than 10 tokens, the longest allowed"
    with pytest.raises(DataError, match="has 11 tokens, the longest allowed is 10"):
        text.encode("!" * 11)
    assert len(text.encode("!" * 10)) == 10
    monkeypatch.setattr(Text, "_encode", None)
    for prompt in ("x" * 1000, [{"role": "user", "content": "x" * 400}, {"role": "user", "content": "x" * 600}]):
        with pytest.raises(DataError, match=message):
            text.encode(prompt)
    assert 1000 // longest > 10


def test_a_vocabulary_holds_every_byte_and_no_more_than_asked() -> None:
    assert len(BYTES) == SMALLEST == 258
    assert len(train_tokenizer(iter(CORPUS), 100)) == 258
    assert len(PAIRS) == 290
    assert len(BYTES("the cat")["input_ids"]) == 7
    assert len(PAIRS("the cat")["input_ids"]) < 7


def test_digits_are_single_tokens() -> None:
    tokenizer = train_tokenizer(iter(["1234 1234 1234 12"] * 50), 290)
    assert len(tokenizer("12341234")["input_ids"]) == 8


def test_the_same_texts_give_the_same_vocabulary() -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefg ", k=40)) for _ in range(60)]
    first = json.loads(train_tokenizer(iter(texts), 300).backend_tokenizer.to_str())
    for _ in range(3):
        assert json.loads(train_tokenizer(iter(texts), 300).backend_tokenizer.to_str()) == first
    assert train_tokenizer(iter(CORPUS), 300).get_vocab() != first["model"]["vocab"]


def test_a_response_can_end_and_padding_is_another_token() -> None:
    assert BYTES.eos_token_id is not None
    assert BYTES.eos_token_id != BYTES.pad_token_id


def test_chat_messages_go_through_the_template() -> None:
    chat: Prompt = [{"role": "system", "content": "count"}, {"role": "user", "content": "to 3"}]
    assert TEXT.encode(chat) == TEXT.encode("countto 3")
    marked = text_of(
        template="{% for m in messages %}[{{ m.role }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert marked.encode(chat) == TEXT.encode("[system][user]>")


def test_chat_messages_without_a_template_are_an_error_with_a_way_out() -> None:
    with pytest.raises(
        DataError, match=r"'tiny/model' has no chat template; give a model that has one .* or prompts as"
    ):
        text_of(template=None).encode([{"role": "user", "content": "hi"}])


def test_a_prompt_that_the_template_refuses_is_an_error() -> None:
    picky = text_of(template="{{ raise_exception('no system role here') }}")
    with pytest.raises(DataError, match="template of 'tiny/model' does not accept the prompt: no system role here"):
        picky.encode([{"role": "system", "content": "hi"}])


def test_a_prompt_that_is_too_long_is_an_error_with_both_numbers() -> None:
    tokens = len(TEXT.encode("x y z"))
    assert text_of(limit=tokens).encode("x y z") == TEXT.encode("x y z")
    with pytest.raises(DataError, match=f"the prompt has {tokens} tokens, the longest allowed is {tokens - 1} "):
        text_of(limit=tokens - 1).encode("x y z")


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user", "content": ""}]], ids=["text", "chat", "message"])
def test_an_empty_prompt_is_an_error(prompt: Prompt) -> None:
    with pytest.raises(DataError, match="the prompt is empty; it needs at least one token"):
        TEXT.encode(prompt)


@pytest.mark.parametrize("prompt", [None, 5, {"role": "user"}, ["hi"], [{"role": "user"}]])
def test_anything_but_text_or_messages_is_an_error(prompt: Prompt) -> None:
    with pytest.raises(DataError, match=r"it is text or a list of chat messages \{role, content\}"):
        TEXT.encode(prompt)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(ANY_TEXT.filter(bool), ANY_TEXT), min_size=1, max_size=4))
def test_pairs_are_encoded_separately_and_end_with_eos(pairs: list[tuple[str, str]]) -> None:
    prompts, responses = (list(side) for side in zip(*pairs, strict=True))
    got = TEXT.encode_pairs(prompts, responses)
    assert [t.tolist() for t in got["prompt_tokens"]] == [TEXT.encode(p) for p in prompts]
    for tokens, response in zip(got["response_tokens"], responses, strict=True):
        assert tokens.dtype == torch.int64
        assert tokens[-1] == TEXT.tokenizer.eos_token_id
        assert TEXT.tokenizer.decode(tokens[:-1]) == response


def test_eos_is_not_part_of_the_decoded_text() -> None:
    end = TEXT.tokenizer.eos_token_id
    assert TEXT.decode(ragged([[*TEXT.encode("a b"), end], [end], TEXT.encode("c")])) == ["a b", "", "c"]


def test_stop_tokens_are_those_of_tokenizer_model_and_user(tmp_path: Path) -> None:
    PAIRS.save_pretrained(tmp_path)
    text = text_of(folder=tmp_path)
    source = Source("tiny/model", AutoConfig.for_model("qwen2"), PAIRS, tmp_path)
    eos, newline = PAIRS.eos_token_id, TEXT.encode("\n")
    assert text.stop_tokens(source, []) == {eos}
    assert text.stop_tokens(source, ["\n"]) == {eos, *newline}
    for eos_token_id, more in ((7, {7}), ([7, 9], {7, 9}), (None, set())):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
        assert text.stop_tokens(source, []) == {eos, *more}
    with pytest.raises(ConfigError, match=r"rollout\.stop: 'xyz' is 3 tokens; a text that is one token"):
        text.stop_tokens(source, ["xyz"])


def test_a_chat_template_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.model.text._TEMPLATE_S", 0.3)
    loop = "".join(f"{{% for i{n} in range(99999) %}}" for n in range(4))
    text = text_of(template=loop + "{% endfor %}" * 4 + "{{ messages[0].content }}")
    with pytest.raises(
        ConfigError, match=r"the chat template of 'tiny/model' takes longer than 0\.3 s for a prompt; give"
    ):
        text.encode([{"role": "user", "content": "hi"}])
    assert text_of().encode([{"role": "user", "content": "hi"}])  # the next one is not late


def test_a_time_limit_that_is_kept_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.model.time_limit._CHECK_S", 0.01)
    for _ in range(20):
        with time_limit(0.02):
            pass
    time.sleep(0.1)
    with pytest.raises(OutOfTimeError), time_limit(0.02):
        sum(1 for _ in iter(int, 1))  # for ever
    time.sleep(0.1)
