"""Conversations in which an environment shows images: engine and trainer see each where it was shown, and no other."""

import json
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agents.fake_env_pool import FakeEnvPool
from distflow.agents.conversation import Sample
from distflow.agents.conversations import Conversations
from distflow.agents.image_parts import as_text, value_of, with_references
from distflow.agents.protocols.call import Api, parse_body
from distflow.agents.protocols.chat import CHAT
from distflow.agents.protocols.messages import MESSAGES
from distflow.agents.protocols.responses import RESPONSES
from distflow.agents.record import columns, make_record
from distflow.agents.rendering import Renderer
from distflow.agents.runtime import EnvironmentRuntime
from distflow.agents.session import Branch, ConversationLimits, Session, TurnRequest
from distflow.batch.batch import Batch
from distflow.errors import DataError
from distflow.rollout.builtin import generator
from distflow.rollout.builtin.generator import CacheLimits
from distflow.rollout.engine import Completion, Request, SamplingParams
from distflow.train.heads import LogprobHead
from distflow.train.packing import Rows, pack
from distflow.train.vision import Vision
from distflow.util import data_url
from vision import ARCHITECTURES, QUESTION, TWO, Model, model, picture, png

LIMITS = ConversationLimits(max_turns=20, max_tokens=600)
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-4}
SHOTS = [data_url.encode(png((24, 16), seed), "image/png") for seed in range(50, 54)]
KNOWN = [picture(i, k) for i in range(4) for k in range(2)]  # references to the images of the row
PARAMS = SamplingParams(max_tokens=600, stop=frozenset())


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest) -> Model:
    return model(request.param)


def shown(*shots: str, text: str = "Now?") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": shot}} for shot in shots]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class Played:
    """A session whose turns a real engine generates."""

    def __init__(self, m: Model, sample: int = 0) -> None:
        self.m, self.session = m, Session(sample, Renderer(m.text), LIMITS, KNOWN)
        self.engine = generator.Generator(m.ours, CacheLimits(1, 8000, 8), torch.device("cpu"), images=m.images)
        self.reused = 0

    def turn(self, branch: Branch, tokens: int = 3) -> Completion:
        asked = self.session.next_request(branch)
        assert isinstance(asked, TurnRequest)
        where = PARAMS, 7, asked.position, tokens
        self.engine.add_request(Request(self.session.sample_id, asked.prompt, *where, keep=True, images=asked.images))
        [done] = self.engine.step()
        before = [*branch.prompt, *self.session.renderer.as_read(branch.tokens, branch.mask)]
        read = self.read([*before, *done.tokens.tolist()], len(before))
        logits = self.m.alone(read, asked.images)[len(before) - 1 : -1]
        of = logits.log_softmax(-1).gather(1, torch.from_numpy(done.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(done.logprobs), of, **CLOSE)
        self.reused += done.reused
        self.session.sampled(branch, done)
        return done

    def read(self, tokens: list[int], sampled: int) -> list[int]:
        return [*tokens[:sampled], *(self.m.images.end if t == self.m.images.token else t for t in tokens[sampled:])]

    def logprobs(self) -> torch.Tensor:
        """Returns the log-probs of the sampled tokens that a trainer computes from the record, packed with another."""
        record = make_record(self.session, "e", (), {}, {}, 0, 0.0, 0)
        other = make_record(self.other().session, "e", (), {}, {}, 0, 0.0, 0)
        made = columns([record, other], self.m.text)
        fields = ("prompt_tokens", "response_tokens", "response_mask", "response_branches", "prompt_images")
        batch = Batch(np.arange(2), np.arange(2), {f: made[f] for f in (*fields, "response_images")})
        packed = pack(batch, np.arange(2))
        whole = Vision(self.m.ours, self.m.images).complete(packed, Rows(batch.select(packed.index)))
        parts = packed.model_tokens.spread(LogprobHead(self.m.ours)(whole, 1.0)[0])
        place = packed.index.tolist().index(0)
        mask = batch["response_mask"][0].bool()
        return parts[place][mask]

    def other(self) -> "Played":
        played = Played(self.m, 1)
        played.turn(played.session.begin(QUESTION_OF[3]))
        return played


QUESTION_OF = [with_references(QUESTION, [picture(i)]) for i in range(4)]


def test_what_is_shown_between_turns_is_seen_by_engine_and_trainer(tiny: Model) -> None:
    played = Played(tiny)
    with played.engine.serving(1, 700):
        branch = played.session.begin(with_references(TWO, [picture(0), picture(1, 1)]))
        done = [played.turn(branch)]
        for shots in ((SHOTS[0],), (), (SHOTS[1], picture(2))):
            assert played.session.observe(branch, shown(*shots)) is None
            done.append(played.turn(branch))
    assert played.reused > 2 * len(branch.prompt), "what was seen is not computed again"
    assert [p.reference for p in branch.images] == [picture(0), picture(1, 1), SHOTS[0], SHOTS[1], picture(2)]
    of_engine = np.concatenate([c.logprobs for c in done])
    torch.testing.assert_close(played.logprobs(), torch.from_numpy(of_engine), **CLOSE)


def test_branches_with_other_images_of_the_same_size_share_only_what_is_the_same(tiny: Model) -> None:
    played = Played(tiny)
    with played.engine.serving(1, 700):
        branch = played.session.begin(QUESTION_OF[0])
        done = [played.turn(branch)]
        said = branch.messages[:2]
        histories = [
            [*said, *shown(SHOTS[0], SHOTS[1])],
            [*said, *shown(SHOTS[0], SHOTS[2])],  # another second image
            QUESTION_OF[1],  # another prompt
            [*QUESTION_OF[1], *shown(SHOTS[3])],
        ]
        done += [played.turn(played.session.match(history)) for history in histories]
    assert len(played.session.branches) == 4
    record = make_record(played.session, "e", (), {}, {}, 0, 0.0, 0)
    assert record.prompt_images == [picture(0)]
    first, second, third = SHOTS[:3]
    assert record.response_images == [first, second, third, picture(1), SHOTS[3]]
    of_engine = np.concatenate([c.logprobs for c in done])
    torch.testing.assert_close(played.logprobs(), torch.from_numpy(of_engine), **CLOSE)


def test_an_image_that_is_taken_back_leaves_no_trace() -> None:
    m = model("qwen2_5_vl")
    played = Played(m)
    branch = played.session.begin("What?")
    played.turn(branch)
    assert played.session.observe(branch, shown(SHOTS[0])) is None
    assert played.session.observe(branch, shown(SHOTS[1], text="Or now?")) is None  # rendered anew, both
    assert [p.reference for p in branch.images] == SHOTS[:2]
    assert [m.images.token in branch.tokens[p.start - len(branch.prompt) :] for p in branch.images] == [True, True]
    fork = played.session.match([*branch.messages[:2], {"role": "user", "content": "No picture."}])
    assert fork.images == []
    played.turn(fork)
    assert make_record(played.session, "e", (), {}, {}, 0, 0.0, 0).response_images == []


def test_a_sampled_token_of_an_image_asks_for_none() -> None:
    m = model("qwen2_5_vl")
    session = Session(0, Renderer(m.text), LIMITS, KNOWN)
    branch = session.begin(QUESTION_OF[0])
    session.next_request(branch)
    tokens = np.array([5, m.images.token, 6])
    session.sampled(branch, Completion(0, tokens, np.zeros(3, np.float32), True, 0))
    session.observe(branch, shown(SHOTS[0]))
    asked = session.next_request(branch)
    assert isinstance(asked, TurnRequest)
    assert branch.tokens[:3] == tokens.tolist()
    assert asked.prompt[len(branch.prompt) :][:3] == (5, m.images.end, 6)
    assert len(m.images.places(asked.prompt, asked.images)) == 2


def test_the_record_for_people_has_places_instead_of_pixels() -> None:
    played = Played(model("qwen2_5_vl"))
    branch = played.session.begin(QUESTION_OF[0])
    played.turn(branch)
    [asked, _] = branch.transcript()
    assert asked["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": SHOTS[0]}},
        {"type": "image_url", "image_url": SHOTS[0]},
        {"type": "input_image", "image_url": SHOTS[0]},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": SHOTS[0].partition(",")[2]}},
        {"type": "image", "image": png((24, 16), 50)},
        {"type": "image", "image": {"bytes": png((24, 16), 50)}},
    ],
)
def test_forms_of_an_image(part: dict[str, Any]) -> None:
    [message] = as_text([{"role": "user", "content": [part]}], ())
    assert message["content"] == [{"type": "image", "image": SHOTS[0]}]


def test_paths_and_pillow_images_travel_as_data(tmp_path: Any) -> None:
    (tmp_path / "a.png").write_bytes(png((24, 16), 50))
    for value in (str(tmp_path / "a.png"), tmp_path / "a.png", f"file://{tmp_path}/a.png"):
        assert as_text([{"role": "user", "content": [{"type": "image", "image": value}]}], ())[0]["content"] == [
            {"type": "image", "image": SHOTS[0]}
        ]
    [message] = as_text([{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (3, 2))}]}], ())
    assert value_of(message["content"][0]).startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("value", "what"),
    [(7, "gave 7 as an image"), ("https://x.org/a.png", "as an image"), ("none.png", "cannot be read"), (None, "None")],
)
def test_what_is_no_image_is_the_environments_fault(value: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        as_text([{"role": "user", "content": [{"type": "image", "image": value}]}], ())


def test_references_of_the_row_stay_as_they_are() -> None:
    message = {"role": "user", "content": [{"type": "image", "image": picture(0)}]}
    assert as_text([message], {picture(0)}) == [message]
    with pytest.raises(ValueError, match="cannot be read"):
        as_text([message], ())


def test_an_image_or_its_tokens_where_none_can_be_read_are_refused() -> None:
    m = model("qwen2_5_vl")
    session = Session(0, Renderer(m.text), LIMITS, KNOWN)
    with pytest.raises(DataError, match="tokens of images cannot be continued; give the conversation as messages"):
        session.match_tokens(m.text.encode(QUESTION, [picture(0)]))
    with pytest.raises(DataError, match="the image data:text/plain,no cannot be decoded"):
        session.begin(shown("data:text/plain,no"))
    for other in ("/etc/passwd", picture(9), "https://x.org/a.png"):  # an agent may not read the worker's files
        with pytest.raises(DataError, match=r"an image of a message is '.*'; give it as a data URL"):
            session.begin(shown(other))
    with pytest.raises(DataError, match="is no data URL"):
        session.begin(shown("data:nothing"))
    m.text.images = None
    try:
        with pytest.raises(DataError, match="a message has an image, and 'qwen2_5_vl with random weights' reads none"):
            session.begin(shown(SHOTS[0]))
    finally:
        m.text.images = m.images


DATA = SHOTS[0].partition(",")[2]
ASKED = "What?"
OPENAI_PARTS = [{"type": "image_url", "image_url": {"url": SHOTS[0]}}, {"type": "text", "text": ASKED}]
OPENAI: dict[str, Any] = {"messages": [{"role": "user", "content": OPENAI_PARTS}]}
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
ANTHROPIC: dict[str, Any] = {
    "max_tokens": 9,
    "messages": [{"role": "user", "content": [ANTHROPIC_IMAGE, {"type": "text", "text": ASKED}]}],
}
RESPONSE_PARTS = [{"type": "input_image", "image_url": SHOTS[0]}, {"type": "input_text", "text": ASKED}]
RESPONSE: dict[str, Any] = {"input": [{"role": "user", "content": RESPONSE_PARTS}]}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [ANTHROPIC_IMAGE]}


@pytest.mark.parametrize(("api", "body"), [(CHAT, OPENAI), (MESSAGES, ANTHROPIC), (RESPONSES, RESPONSE)])
def test_an_agent_shows_images_by_the_api_that_it_speaks(api: Api, body: dict[str, Any]) -> None:
    m = model("qwen2_5_vl")
    call = parse_body(api, json.dumps(body | {"model": "m"}).encode(), 1000)
    assert call.messages
    branch = Session(0, Renderer(m.text), LIMITS).match(call.messages)
    assert branch.prompt == m.text.encode(QUESTION, [SHOTS[0]])
    assert [p.reference for p in branch.images] == [SHOTS[0]]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (MESSAGES, {"role": "user", "content": [RESULT]}),
        (RESPONSES, {"type": "function_call_output", "call_id": "1", "output": RESPONSE_PARTS[:1]}),
    ],
)
def test_results_of_tools_have_images(api: Api, body: dict[str, Any]) -> None:
    asked = {"input" if api is RESPONSES else "messages": [{"role": "user", "content": "go"}, body]}
    call = parse_body(api, json.dumps(asked | {"model": "m", "max_tokens": 9}).encode(), 1000)
    assert call.messages
    message = call.messages[-1]
    assert message["role"] == "tool"
    assert value_of(message["content"][0]) == SHOTS[0]


def test_an_environment_gets_the_prompt_with_references_and_may_never_begin() -> None:
    m, given = model("qwen2_5_vl"), list[dict[str, Any]]()

    def script(start: Mapping[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        given.append(dict(start))
        yield {"op": "done", "rewards": {}, "metrics": {}, "extra": {}}

    runtime = EnvironmentRuntime("e", Renderer(m.text), LIMITS, 1)
    sample = Sample(0, 0, QUESTION, {"prompt": QUESTION, "images": [picture(0)]}, 0, images=[picture(0)])
    conversations = Conversations([sample], [runtime], FakeEnvPool(script), PARAMS, 0, 0)
    [record] = conversations.collect(wait=True).ended
    assert given[0]["prompt"] == given[0]["row"]["prompt"] == QUESTION_OF[0]
    assert (record.prompt, record.prompt_images) == (m.text.encode(QUESTION, [picture(0)]), [picture(0)])
