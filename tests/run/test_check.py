"""`distflow check`, and errors before any worker starts: in one line, with the place and the way out."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from distflow import cli
from distflow.model.memory import kv_budget
from distflow.model.tokenizer import train_tokenizer
from warm import distflow_run

Output = pytest.CaptureFixture[str]
REWARDS = """
import time

def fine(solution_str):
    return 0.25

def truth(solution_str, ground_truth):
    return float(solution_str == ground_truth)

def raises(solution_str):
    raise ValueError("no idea")

def hangs(solution_str):
    time.sleep(10_000)

def nan(solution_str):
    return float("nan")

def text(solution_str):
    return "good"

def ids(prompts, completions, completion_ids, trainer_state, log_metric, **kwargs):
    log_metric("tokens", sum(map(len, completion_ids)))
    return [float(trainer_state.global_step) for _ in completions]

def labelled(completions, answer):
    return [0.5 if a else 0.0 for a in answer]

def many(completions):
    return [1.0] * (len(completions) + 1)
"""
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "data.jsonl", "batch": 4},
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 2, "max_tokens": 8},
    "reward": "rewards.py:fine",
    "workers": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    (folder / "rewards.py").write_text(REWARDS)
    texts = [f"what is {i}?" for i in range(12)]

    def write(name: str, prompts: list[Any], answer: str = "answer") -> None:
        rows = [{"prompt": p, answer: str(i)} for i, p in enumerate(prompts)]
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))

    write("data.jsonl", texts)
    write("pairs.jsonl", texts, "response")
    write("other.jsonl", texts, "truth")
    rows = ({"prompt": t, "chosen": "yes", "rejected": "no"} for t in texts)
    (folder / "preferred.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    write("chat.jsonl", [[{"role": "user", "content": t}] for t in texts])
    write("long.jsonl", [t + "!" * 50 * (i in (0, 7)) for i, t in enumerate(texts)])
    write("empty.jsonl", ["a", "", "b"])
    write("numbers.jsonl", [1, 2])
    tokenizer = train_tokenizer(iter(texts), 0)
    for name, template in (("chatty", tokenizer.chat_template), ("plain", None)):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / name)
        AutoConfig.for_model("qwen2", hidden_size=32, num_attention_heads=4, vocab_size=258).save_pretrained(
            folder / name
        )
    (folder / "hollow").mkdir()
    return folder


def distflow(folder: Path, command: str, *overrides: str, without: str = "") -> int:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in CONFIG.items() if k != without}))
    with pytest.raises(SystemExit) as e:
        cli.main([command, str(path), *overrides])
    assert isinstance(e.value.code, int)
    return e.value.code


def lines(capsys: Output) -> dict[str, str]:
    """Returns the printed lines by their first word."""
    out, err = capsys.readouterr()
    assert err == ""
    return {line[:10].strip(): line[10:] for line in out.splitlines()}


def error(capsys: Output) -> str:
    """Returns an error: one line, and what a reward failed on."""
    err = capsys.readouterr().err
    assert err.startswith("distflow: ")
    _, *rest = err.splitlines()
    assert [line.partition(":")[0] for line in rest] in ([], ["  prompt", "  response"])  # of a reward that failed
    return err.removeprefix("distflow: ").rstrip("\n")


def test_a_good_config_is_described_line_by_line(folder: Path, capsys: Output) -> None:
    assert distflow(folder, "check", "eval={files: long.jsonl, every: 3, limit: 5}") == 0
    assert lines(capsys) == {
        "flow": "grpo: actor.generate, reward.score, group_advantage, actor.update",
        "plan": "2 workers, 8 samples per step (4 prompts × 2)",
        "data": "12 rows, 0 skipped; columns prompt, answer",
        "eval": "5 rows every 3 steps",
        "model": "qwen2 with random weights: qwen2, 39,264 parameters, 258 tokens",
        "prompts": "all 12 have at most 4088 tokens, 0 skipped; the first has 10",
        "kv cache": "2.0 GiB; sequences at once: 256 of 4,096 tokens, the longest allowed (1.0 MiB each)",
        "log-probs": "of rollout and trainer are the same to the bit",
        "reward": "0.25 for an empty response to the first prompt, 0.25 for '0'",
        "held-out": "0.25 for an empty response to the first held-out prompt, 0.25 for '0'",
    }


def test_the_kv_cache_says_how_many_sequences_of_which_length_run_at_once() -> None:
    assert kv_budget(1 << 30, 1 << 10, 1 << 16, 256) == (
        "1.0 GiB; sequences at once: 256 of 4,096 tokens or 64 of 16,384 tokens or 16 of 65,536 tokens, the longest"
        " allowed (64.0 MiB each)"
    )


def test_the_size_of_an_adapter_is_shown(folder: Path, capsys: Output) -> None:
    assert distflow(folder, "check", "train.lora={rank: 2, targets: q_proj}") == 0
    parameters = "39,264 parameters and 256 of an adapter, which alone are trained, 258 tokens"
    assert lines(capsys)["model"] == f"qwen2 with random weights: qwen2, {parameters}"


@pytest.mark.parametrize("section", ["train", "critic"])
def test_an_optimizer_that_is_not_installed(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert distflow(folder, "check", f"{section}.optimizer=adamw8bit") == 2
    message = error(capsys)
    assert message.startswith(
        f"{section}.optimizer: adamw8bit is torchao's, which is not installed; pip install -e '.["
    )


def test_peft_is_needed_only_for_adapters(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert distflow(folder, "check") == 0
    lines(capsys)
    assert distflow(folder, "check", "train.lora={}") == 2
    message = error(capsys)
    assert message.startswith("train.lora: PEFT is not installed (")
    assert message.endswith("; pip install -e '.[lora]' in your clone of DistFlow")


@pytest.mark.parametrize(
    "overrides",
    [
        ["flow=sft", "data.files=pairs.jsonl"],
        ["train.lora={}", "placement.nodes={actor.generate: {tp: 2}}"],
        ["flow=sft", "data.files=pairs.jsonl", "train.lora={targets: [self_attn.o_proj, 0.mlp.up_proj]}"],
        ["flow=sft", "data.rename={answer: response}", "rollout.kv_cache_gb=1e-9"],  # nothing is generated
        ["data.files=chat.jsonl"],
        ["data.files=chat.jsonl", "model=chatty"],
        ["model=plain"],
        ["reward=rewards.py:truth"],
        ["reward=rewards.py:ids"],
        ["placement.roles.reference.tp=2"],  # which there is with algo.kl only
        ["reward.time_limit_s=10", "data=data.jsonl", "data.batch=2", "eval=data.jsonl", "eval.limit=2"],
        ["reward=rewards.py:truth", "eval={files: other.jsonl, rename: {truth: answer}}"],
        ["reward=rewards.py:truth", "eval={files: other.jsonl, reward: rewards.py:fine}"],
        ["algo.kl=1e-3", "workers=4", "placement.roles={actor: {tp: 2}, reference: {tp: 2}}"],
        ["train.lr=1e-6", "algo.mini_batches=2", "algo.epochs=3"],  # PyYAML alone reads 1e-6 as a string
        ["rollout.kv_cache_gb=3e-6", "placement.roles.actor.tp=2"],  # half of the heads, half of the memory
    ],
)
def test_other_good_configs(folder: Path, capsys: Output, overrides: list[str]) -> None:
    assert distflow(folder, "check", *overrides) == 0, error(capsys)


def test_skipped_prompts_are_counted(folder: Path, capsys: Output) -> None:
    """If the first one is skipped, the reward is tried on another one."""
    skip = ["data.files=long.jsonl", "data.max_prompt=20", "data.on_bad_row=skip"]
    assert distflow(folder, "check", "reward=rewards.py:truth", *skip) == 0
    found = lines(capsys)
    assert found["data"].startswith("12 rows, 0 skipped")
    assert found["prompts"] == "all 10 have at most 20 tokens, 2 skipped; the first has 10"


LONG = "long.jsonl:1: the prompt has 60 tokens, the longest allowed is 20 (data.max_prompt"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model=./missing"], ["model: there is no directory ", "/missing"]),
        (["model=./palin"], ["model: there is no directory ", "did you mean 'plain'?"]),
        (["model=hollow"], ["model: 'hollow' cannot be loaded: "]),
        (["model.arch=qwen22"], ["model.arch: 'qwen22' is not one of transformers; did you mean 'qwen2'?"]),
        (["model.path=x"], ["'model' is ", "give one of `path`", "and `arch`"]),
        (["model.heads=5"], ["hidden 32 is not a multiple of heads 5"]),
        (
            ["data.files=chat.jsonl", "model=plain"],
            ["chat.jsonl:1: ", "'plain' has no chat template", "prompts as text"],
        ),
        (["data.files=long.jsonl", "data.max_prompt=20"], [LONG, "fix the row or set `data.on_bad_row: skip`"]),
        (["eval=long.jsonl", "data.max_prompt=20"], [LONG]),
        (
            ["data.max_prompt=2", "data.on_bad_row=skip"],
            ["all 12 rows were skipped: ", "data.jsonl:1: the prompt has 10"],
        ),
        (["data.files=empty.jsonl"], ["empty.jsonl:2: the prompt is empty"]),
        (["data.files=numbers.jsonl"], ["numbers.jsonl:1: the prompt is '1'", "text or a list of chat messages"]),
        (
            ["reward=rewards.py:raises"],
            ["'raises' (rewards.py:raises) raised ValueError: no idea", "rewards.py:11", "fix the function"],
        ),
        (["reward=rewards.py:nan"], ["'nan' (rewards.py:nan) returned nan; return a finite score"]),
        (["reward=rewards.py:text"], ["'text' (rewards.py:text) returned 'good' (str) as a score; return a number"]),
        (
            ["reward=rewards.py:many"],
            ["'many' (rewards.py:many) returned 2 scores for 1 samples; return one per sample"],
        ),
        (["reward=rewards.py:fin"], ["'rewards.py:fin' has no 'fin'; did you mean 'fine'?"]),
        (["reward=rewards.py:truth", "data.fields=[prompt]"], ["needs a ground truth", "`reward.answer`"]),
        (
            ["reward={functions: rewards.py:hangs, time_limit_s: 0.2}"],
            ["'hangs' (rewards.py:hangs) took longer than 0.2 s; raise `reward.time_limit_s` if it needs more time"],
        ),
        (
            ["workers=4", "placement.roles.actor.tp=4"],
            ["placement of actor.generate: tp 4 does not divide", "num_key_value_heads, 2"],
        ),
        (
            ["rollout.kv_cache_gb=1e-6"],
            ["rollout.kv_cache_gb: ", "4.5 KiB", "1.0 KiB; raise it, or lower rollout.max_tokens"],
        ),
        (["rollout.max_tokens=5000"], ["rollout.max_tokens: 5000 leaves no room for a prompt in the model's 4096"]),
        (["rollout.stop=[END]"], ["rollout.stop: 'END' is 3 tokens"]),
        (
            ["train.lora={targets: [q_proj, v_prj]}"],
            ["train.lora.targets: 'v_prj' is no linear layer", "did you mean 'v_proj'?"],
        ),
        (
            ["train.lora.targets=lm_head"],
            ["'lm_head' is no linear layer in the model's blocks; known: all-linear, down"],
        ),
        (["train.lora.targets=[norm]"], ["'norm' is no linear layer in the model's blocks; known: all-linear, down"]),
        (["rollout.kv_cache_gb=100000"], ["rollout.kv_cache_gb: 97.7 TiB of KV cache do not fit on cpu"]),
        (
            ["reward=rewards.py:labelled", "eval=other.jsonl"],
            ["eval: reward 'labelled' (rewards.py:labelled): needs column 'answer', which the data lacks"],
        ),
        (["reward=rewards.py:truth", "eval=other.jsonl"], ["eval: reward 'truth' (rewards.py:truth): needs a ground"]),
        (["eval={files: other.jsonl, reward: rewards.py:raises}"], ["sample of the first row: ", "no idea"]),
        (["eval={files: other.jsonl, rename: {x: y}}"], ["eval.rename: there is no column 'x'"]),
        (
            ["data.rename={answer: truth}", "eval=other.jsonl"],
            ["eval.rename: there is no column 'answer'", "its default is data.rename, set {} for none"],
        ),
        (
            ["algo.dual_clip=0.5"],
            ["node 'actor.update': the policy loss has dual_clip = 0.5; it must be above 1, or 0"],
        ),
        (
            ["algo.rollout_rejection=sum-k1", "algo.rejection_threshold=0.5"],
            ["the rollout rejection sum-k1 has threshold = 0.5; it must be 1 or more"],
        ),
        (["algo.clip=-1"], ["node 'actor.update': loss: constant 'clip': -1: input should be greater than or equal"]),
        (["eval=missing.jsonl"], ["missing.jsonl: no such file"]),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(
    folder: Path, capsys: Output, overrides: list[str], parts: list[str]
) -> None:
    assert distflow(folder, "check", *overrides) == 2
    message = error(capsys)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "without", "message"),
    [
        (
            ["algo.mini_batches=3"],
            "",
            "algo.mini_batches: 3 does not divide the 4 prompts of data.batch; use one of 1, 2, 4",
        ),
        (["algo.mini_batches=0"], "", "algo.mini_batches: 0; set it to 1 or more"),
        (["algo.epochs=many"], "", "algo.epochs: 'many' is not an integer"),
        (["algo.scale=batch"], "", "algo.scale: 'batch' is not one of std, mean, none"),
        (["algo.clip=x"], "", "algo.clip: 'x' is not a number"),
        (["algo.aggregate=tokenmean"], "", "algo.aggregate: 'tokenmean' is not one of token-mean, "),
        (["flow=reinforce_pp", "algo.gamma=hello"], "", "algo.gamma: 'hello' is not a number"),
        (["flow=reinforce_pp", "algo.gamma=2"], "", "constant 'gamma': 2: input should be less than or equal to 1"),
        (["flow=dapo", "algo.max_gen_batches=0"], "", "algo.max_gen_batches: 0: input should be greater than 0"),
        (["algo.cilp=0.1"], "", "algo: flow 'grpo' has no constant 'cilp'; did you mean 'clip'?"),
        (["flow=grpoo"], "", "flow: there is no built-in flow 'grpoo'; did you mean 'grpo'?"),
        ([], "model", "'model' is missing; the flow 'grpo' needs one: `model: "),
        ([], "reward", "'reward' is missing; the flow 'grpo' needs one: `reward: file.py:function`"),
        (["data.rename={prompt: question}"], "", "the data has no column 'prompt'"),
        (["data.files=pairs.jsonl"], "", "give the column another name with `data.rename: {response: "),
        (["flow=sft"], "", "the data has no column 'response'"),
        (["placement.roles.critic.tp=2"], "", "placement.roles: no node has the role 'critic'"),
        (["placement.roles.actor.tp=3"], "", "placement.roles.actor: tp 3 does not fit rank set 'all' of 2 ranks"),
        (["train.optimizer=muon", "train.offload=all"], "", "`offload: all` is for `optimizer: adamw`, not for muon"),
        (["train.optimizer=sgd"], "", "'train.optimizer' is 'sgd'"),
        (["train.router_aux_loss=-1"], "", "'train.router_aux_loss' is -1: input should be greater than or equal to 0"),
        (["train.lora.rank=0"], "", "'train.lora.rank' is 0: input should be greater than 0"),
        (["train.lora.rank=-4"], "", "'train.lora.rank' is -4: input should be greater than 0"),
        (["train.lora.alpha=0"], "", "'train.lora.alpha' is 0: input should be greater than 0"),
        (["train.lora.targets=[]"], "", "'train.lora.targets' is []: "),
        (["train.lora=16"], "", "'train.lora' is 16; it is a section with the keys rank, alpha, targets"),
        (["train.lora.dropout=0.1"], "", "unknown key 'train.lora.dropout'; known: alpha, rank, targets"),
        (["critic.lora={}"], "", "unknown key 'critic.lora'"),
        (
            ["flow=reward_model", "data.files=preferred.jsonl", "train.lora={}"],
            "reward",
            "train.lora: reward_model.update_pairs trains a reward model, but adapters are for actors; remove it",
        ),
    ],
)
def test_every_command_reports_it_before_anything_starts(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, overrides: list[str], without: str, message: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for command in ("plan", "check", "run", "eval"):
        assert distflow(folder, command, *overrides, "eval=data.jsonl", without=without) == 2, command
        assert message in error(capsys), command


FLOW = """
from distflow import flow
from distflow.algo.losses import Loss
from distflow.flows.policy_update import update_policy
from distflow.flows.nodes import group_advantage

NOTHING = 0

def narrow(tokens, clip=0.2):
    ...

def open_ended(tokens, **rest):
    return Loss(-tokens.logprobs)

def score_of(tokens, **rest):
    return tokens["advantage"] * tokens["score"]

def misspelt(tokens, **rest):
    return tokens["advantages"]

def attribute(tokens, **rest):
    return tokens.advantage

def tensor(tokens, **rest):
    return -tokens.logprobs

@flow(constants_of=update_policy)
def own(prompts, actor, reference, reward, *, loss="policy", **rest):
    said = actor.generate(prompts["prompt"])
    update_policy(actor, reference, said, group_advantage(reward.score(prompts, said)), loss=loss, **rest)
"""


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "flow.py:narrow",
            "'flow.py:narrow' has no parameter 'kl', which the flow passes to it; known: clip; a",
        ),
        ("flow.py:NOTHING", "'flow.py:NOTHING' is a int, not a function of tokens"),
        ("flow.py:narow", "'flow.py:narow' has no 'narow'; did you mean 'narrow'?"),
        ("polcy", "'distflow.algo.losses:polcy' has no 'polcy'; did you mean 'policy'?"),
        ("flow.py:open_ended", ""),
        (
            "flow.py:attribute",
            "the loss 'flow.py:attribute' asks for tokens.advantage; a field of the batch is tokens['advantage']",
        ),
        ("flow.py:tensor", "the loss 'flow.py:tensor' returns a Tensor; return a distflow.Loss"),
        (
            "flow.py:misspelt",
            "the loss 'flow.py:misspelt' needs the field 'advantages', which the node does not read; no node writes it;"
            " did you mean 'advantage'?",
        ),
        (
            "flow.py:score_of",
            "the loss 'flow.py:score_of' needs the field 'score', which the node does not read;"
            " pass the result of 'reward.score' to actor.update (in a list of nodes: add 'score' to its reads)",
        ),
    ],
)
def test_a_loss_has_the_parameters_that_the_flow_passes(folder: Path, capsys: Output, loss: str, message: str) -> None:
    (folder / "flow.py").write_text(FLOW)
    assert distflow(folder, "plan", "flow=flow.py:own", f"algo.loss={loss}") == (2 if message else 0)
    assert not message or message in error(capsys)
    code = distflow(folder, "check", "flow=flow.py:own", f"algo.loss={loss}")
    assert code == (2 if message else 0)
    if message:
        said = error(capsys)
        assert said.startswith("node 'actor.update': ")
        assert message in said


def test_a_run_refuses_before_it_generates_what_a_check_refuses(folder: Path) -> None:
    """The worker itself does: it is not told what a check has found."""
    path = folder / "refused.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"reward": "rewards.py:labelled", "eval": "other.jsonl", "workers": 1}))
    for overrides, message in (
        ([], "eval: reward 'labelled' (rewards.py:labelled): needs column 'answer', which the data lacks"),
        (["rollout.kv_cache_gb=100000"], "rollout.kv_cache_gb: 97.7 TiB of KV cache do not fit on cpu"),
    ):
        ended = distflow_run(path, f"run_dir={folder}/runs", *overrides)
        assert ended.codes == [1]
        assert message in ended.err
        assert "step" not in ended.out


def test_evaluation_needs_a_held_out_set(folder: Path, capsys: Output) -> None:
    assert distflow(folder, "eval") == 2
    assert error(capsys) == "the config has no `eval` section; add one: `eval: held-out.jsonl`"


def test_a_model_that_the_hub_refuses_is_named(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: Any) -> str:
        raise RuntimeError(f"404: there is no {name}.\nLong advice")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    assert distflow(folder, "check", "model=nobody/nothing") == 2
    message = error(capsys)
    assert f"'nobody/nothing' is neither a directory ({folder}/nobody/nothing) nor a model" in message
    assert "404: there is no nobody/nothing; check the name, your access (HF_TOKEN) and the network" in message


def test_an_export_needs_a_checkpoint(tmp_path: Path, capsys: Output) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["export", str(tmp_path), str(tmp_path / "out")])
    assert e.value.code == 2
    assert "has no checkpoint" in error(capsys)
