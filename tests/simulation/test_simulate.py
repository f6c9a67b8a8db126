"""Whole steps: one move by hand, thousands of workers, comparisons, and the command line."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.errors import ConfigError
from distflow.flow import Flow, Node
from distflow.plan import Place, Placement, Plan, Workload, plan
from distflow.plan.topology import Topology
from distflow.run.program import Program
from distflow.simulate import Costs, FieldBytes, Hardware, load_hardware, load_model, simulate
from distflow.simulate.binding import Assumptions
from distflow.simulate.controller import simulate_controller
from distflow.simulate.report import make_report
from test_cli import distflow

SLOW = load_hardware(  # 1,000 bytes a second, and nothing else that takes time
    "namespaces",
    network={"rate": 1000.0, "latency_s": 0.0},
    local={"rate": 1e15, "latency_s": 0.0},
    cpu={"message_s": 0.0, "byte_s": 0.0, "pack_rate": 1e15, "sample_s": 0.0},
    efficiency={"network": 1.0},
)
CONFIG = """
flow: grpo
model: {arch: qwen2, hidden: 1024, layers: 8}
data: {files: prompts.jsonl, batch: 64}
reward: reward.py:score
rollout: {n: 8, max_tokens: 512}
train: {dtype: bfloat16}
algo: {kl: 0.01}
workers: 16
"""


def split_plan(workers: int, samples: int, size: int = 1000) -> Plan:
    nodes = (
        Node("generate", role="actor", type="inference", writes=("x",), generates=True, method=True),
        Node("update", role="actor", type="train", reads=("x",), balance="x", method=True),
    )
    places = {"generate": Place("rollout"), "update": Place("train")}
    placement = Placement(workers, {"rollout": "0%-50%", "train": "50%-"}, nodes=places)
    return plan(Flow("split", (), nodes), placement, Workload(samples, 1, {"x": size}))


def test_one_move_over_one_link_by_hand() -> None:
    planned = split_plan(2, 4)
    result = simulate(planned, SLOW, Costs(seconds={"generate": 5.0, "update": 7.0}), Topology((0, 1)))
    move = result.task("move m0 (x)")
    # A header of 4 × 12 bytes from each rank, then 4 samples of 1,000 bytes with 4 × (8 + 4) bytes of schema.
    header, payload = 4 * 12, 4 * 1000 + 4 * (8 + 4)
    assert move.bytes == 4000
    assert move.network_bytes == 2 * header + payload
    assert move.elapsed_s == pytest.approx((header + payload) / 1000)
    vote = 2 * 4096 / 1000  # up and down
    assert result.step_s == pytest.approx(5 + (header + payload) / 1000 + 7 + vote)


def test_a_rank_set_is_idle_while_the_other_computes() -> None:
    fast = SLOW.model_copy(update={"network": SLOW.network.model_copy(update={"rate": 1e15})})
    result = simulate(split_plan(4, 8), fast, Costs(seconds={"generate": 30.0, "update": 10.0}), Topology((0, 0, 1, 1)))
    assert result.step_s == pytest.approx(40.0)
    assert [(r.ranks, round(r.compute, 3), round(r.idle, 3)) for r in result.rank_sets] == [
        ((0, 1), 0.75, 0.25),
        ((2, 3), 0.25, 0.75),
    ]
    assert result.pipelined_s(0) == result.step_s
    assert result.pipelined_s(0.25) == pytest.approx(32.0)  # what goes round takes 40 s and may be 1.25 steps old
    assert result.pipelined_s(1) == pytest.approx(30.0)  # the busier rank set


def test_thousands_of_workers_are_a_few_events() -> None:
    planned = split_plan(4096, 4096 * 4)
    costs = Costs(seconds={"generate": 1.0, "update": 1.0}, weight_bytes={"actor": 15e9})
    small, large = (simulate(p, load_hardware("h100"), costs) for p in (split_plan(64, 256), planned))
    assert large.events <= small.events + 2 * 6 * 3  # rounds are log N
    assert large.messages <= 4 * small.messages
    assert large.links.busiest <= 1.2 * small.links.busiest


def test_moves_among_many_workers_cost_what_they_cost_in_a_domain() -> None:
    costs = Costs(seconds={"generate": 0.0, "update": 0.0})
    small, large = (simulate(split_plan(n, 4 * n), load_hardware("h100"), costs) for n in (128, 4096))
    seconds = [[t.elapsed_s for t in step.tasks if t.kind == "move"] for step in (small, large)]
    assert seconds[1] == pytest.approx(seconds[0])


def test_topology_must_have_all_ranks() -> None:
    with pytest.raises(ConfigError, match="it has 3 ranks, and the plan 4"):
        simulate(split_plan(4, 8), SLOW, Costs(), Topology((0, 0, 1)))
    with pytest.raises(ConfigError, match="there are 3, and the plan has 8 samples"):
        simulate(split_plan(4, 8), SLOW, Costs(lengths=[1, 2, 3]))
    with pytest.raises(ConfigError, match="no node 'updat'; did you mean 'update'"):
        simulate(split_plan(4, 8), SLOW, Costs(seconds={"updat": 1.0}))


def with_link(rate: float, latency: float) -> Hardware:
    return load_hardware("namespaces", network={"rate": rate, "latency_s": latency})


@given(st.floats(1e3, 1e9), st.floats(0, 0.1), st.integers(1, 4), st.floats(0, 10))
@settings(max_examples=25, deadline=None)
def test_worse_hardware_never_makes_a_step_faster(rate: float, latency: float, hosts: int, seconds: float) -> None:
    planned = split_plan(8, 32)
    topology = Topology(tuple(r * hosts // 8 for r in range(8)))
    costs = Costs(seconds={"generate": seconds, "update": 1.0}, fields={"x": FieldBytes(sample=1e4)})

    def step(hardware: Hardware, costs: Costs = costs) -> float:
        return simulate(planned, hardware, costs, topology).step_s

    base = step(with_link(rate, latency))
    assert base >= seconds + 1.0
    assert step(with_link(rate / 2, latency)) >= base - 1e-9
    assert step(with_link(rate, latency + 0.01)) >= base - 1e-9
    assert (
        step(with_link(rate, latency), Costs(seconds=costs.seconds, fields={"x": FieldBytes(sample=2e4)}))
        >= base - 1e-9
    )


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (tmp_path / "reward.py").write_text("def score(completions, **rest):\n    return [1.0 for _ in completions]\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return str(tmp_path / "config.yaml")


Output = pytest.CaptureFixture[str]


def test_one_controller_needs_more_time_and_all_the_memory(config: str) -> None:
    report = make_report(Program.load(config), 16, load_hardware("h100"), Assumptions(response_tokens=128))
    assert report.speedup > 1
    assert report.controller.memory > 64 * 8 * 512 * 8  # all samples, padded
    assert sum(report.controller.node_s.values()) == pytest.approx(
        report.controller.data_plane_s - report.result.task("actor weights").elapsed_s
    )
    assert {a.rollout for a in report.alternatives} == {None, 25, 50, 75}


def test_a_controller_sends_the_whole_batch_so_far_with_every_call() -> None:
    nodes = (
        Node("generate", role="actor", type="inference", writes=("x",), generates=True, method=True),
        Node("score", role="reward", type="inference", reads=("x",), writes=("s",), method=True),
        Node("update", role="actor", type="train", reads=("s",), method=True),
    )
    planned = plan(Flow("f", ("p",), nodes), Placement(2), Workload(10, 1, {"p": 1, "x": 1000, "s": 10}))
    hardware = load_hardware("h100", controller={"serialise_rate": 1.0, "rate": 1e15, "call_s": 0.0})
    costs = Costs(seconds={"generate": 1.0, "update": 2.0})
    found = simulate_controller(planned, hardware, costs, simulate(planned, hardware, costs))
    assert found.node_s == pytest.approx({"generate": 10 * 1001, "score": 0.0, "update": 10 * 1011})
    assert found.step_s == pytest.approx(3.0 + 10 * 2012)


def test_a_controller_pads_prompts_too() -> None:
    planned = split_plan(2, 4)
    fields = {"x": FieldBytes(prompt_token=1.0)}

    def size(**limits: float) -> float:
        costs = Costs(fields=fields, prompt_tokens=100, **limits)  # type: ignore[arg-type]
        return simulate_controller(planned, SLOW, costs, simulate(planned, SLOW, costs)).bytes

    assert size(max_prompt=2048.0) == pytest.approx(20.48 * size())


def test_a_mixture_of_experts_is_called_a_guess(config: str) -> None:
    for overrides, said in ((["model.arch=qwen3_moe", "model.ffn=512"], True), ([], False)):
        report = make_report(Program.load(config, overrides), 16, load_hardware("h100"), Assumptions())
        assert any("quote no seconds" in line for line in report.assumptions) == said


def test_search_sorts_by_step_and_keeps_to_the_memory(config: str) -> None:
    program, h100 = Program.load(config), load_hardware("h100")
    found = make_report(program, 16, h100, Assumptions(), wide=True).candidates
    steps = [c.result.step_s for c in found]
    assert len(steps) == 12
    assert steps == sorted(steps)
    assert all(r.memory.peak <= h100.device.memory for c in found for r in c.result.rank_sets)
    own = max(r.memory.peak for r in make_report(program, 16, h100, Assumptions()).result.rank_sets)
    tight = load_hardware("h100", device={"memory": own})  # its own placement just fits, some others do not
    fit = make_report(program, 16, tight, Assumptions(), wide=True)
    assert all(r.memory.peak <= own for c in (*fit.candidates, *fit.alternatives) for r in c.result.rank_sets)
    assert {a.rollout for a in fit.alternatives} != {None, 25, 50, 75}


def test_a_search_says_why(config: str) -> None:
    report = make_report(Program.load(config), 16, load_hardware("h100"), Assumptions(), wide=True)
    best, reasons = report.candidates[0], report.reasons
    assert best.rollout is None
    beside = [r for r in reasons if r.startswith("beside ")]
    assert any(r.startswith("beside split") for r in beside)
    assert all(best.name not in r for r in beside)
    free = [r for r in reasons if r.startswith("rollout.kv_cache_gb")]
    tight = load_hardware("h100", device={"memory": best.memory * 1.001})
    less = make_report(Program.load(config), 16, tight, Assumptions(), wide=True)
    assert less.candidates[0].name == best.name
    assert not [r for r in less.reasons if r.startswith("rollout.kv_cache_gb")]
    assert len(free) <= 1
    assert any("need more than" in r for r in less.reasons)


def test_a_search_names_what_fits_where_the_config_does_not(config: str, capsys: Output) -> None:
    less = ("train.gradient_checkpointing=true", "train.micro_tokens=4096", "rollout.kv_cache_gb=1", "data.batch=128")
    large = ("--model", "qwen2.5-72b", "--workers", "128", *less)
    assert distflow("simulate", config, "--hardware", "h100", *large) == 2
    assert "is the fastest" not in capsys.readouterr().err
    assert distflow("simulate", config, "--hardware", "h100", *large, "--search") == 2
    message = capsys.readouterr().err
    assert "needs" in message
    assert "of the placements that fit, " in message
    assert "'generate': {'ranks'" in message


def test_sequences_are_divided_where_nothing_else_fits(config: str) -> None:
    long = Program.load(config, ["rollout.max_tokens=65536", "train.gradient_checkpointing=true"])
    found = make_report(long, 16, load_hardware("h100"), Assumptions(), wide=True)
    assert any(c.train_sp > 1 for c in found.candidates)
    divided = next(c for c in found.candidates if c.train_sp > 1)
    assert divided.placement["train"]["sp"] == divided.train_sp  # type: ignore[index]
    assert "sp 2" in " ".join(c.name for c in found.candidates)


def test_steps_are_drawn_and_more_hosts_wait_longer_for_the_slowest() -> None:
    h100 = load_hardware("h100", device={"spread": 0.05})
    costs = Costs(models={"actor": load_model("qwen2.5-7b")}, response_tokens=500, max_tokens=500)

    def update(workers: int, seed: int, hardware: Hardware = h100) -> float:
        result = simulate(split_plan(workers, 4 * workers), hardware, replace(costs, seed=seed))
        return result.task("update").elapsed_s

    few, many = ([update(n, seed) for seed in range(5)] for n in (16, 512))
    assert len(set(few)) == 5
    assert min(many) > max(few)
    even = load_hardware("h100", device={"spread": 0.0})
    assert update(512, 0, even) == pytest.approx(update(16, 0, even), rel=0.05)


def test_the_percentiles_and_the_failures_of_the_command_line(config: str, capsys: Output) -> None:
    assert distflow("simulate", config, "--hardware", "h100", "--draws", "4", "--failures", "10", "--json") == 0
    out = json.loads(capsys.readouterr().out)
    drawn = out["drawn"]
    assert drawn["p5"] < drawn["p50"] < drawn["p95"]
    assert drawn["steps"] == 4
    assert [g["workers"] for g in out["failures"]] == [16, 1024, 10_000]
    assert out["failures"][2]["goodput"] < out["failures"][1]["goodput"] < out["failures"][0]["goodput"]
    assert distflow("simulate", config, "--hardware", "h100", "--draws", "4", "--failures") == 0
    text = capsys.readouterr().out
    assert "drawn anew" in text
    assert "Young" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_table(config: str, capsys: Output) -> None:
    assert distflow("simulate", config, "--hardware", "h100", "--workers", "32", "--overlap", "1") == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in (
        "grpo on h100",
        "32 workers",
        "actor.generate",
        "actor weights",
        "one controller",
        "split 50:50",
        "idle",
    ):
        assert word in out
    assert "assumed: no cost is known for reward.score, group_advantage: 0 s is assumed; give --node-seconds" in out
    assert "(forecast)" in out
    assert max(map(len, out.splitlines())) <= 120


def test_json_says_the_same_as_the_python_interface(config: str, capsys: Output) -> None:
    assert distflow("simulate", config, "--hardware", "h100", "--json", "--node-seconds", "actor.update=81") == 0
    out = json.loads(capsys.readouterr().out)
    given = Assumptions(node_seconds={"actor.update": 81.0})
    report = make_report(Program.load(config), 16, load_hardware("h100"), given)
    assert out == json.loads(json.dumps(report.to_json()))
    assert next(t for t in out["tasks"] if t["name"] == "actor.update")["elapsed_s"] == 81.0


def test_the_timeline(config: str, capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "new" / "step.svg"
    placement = "placement={ranks: {a: 0%-50%, b: 50%-}, default: {ranks: b}, nodes: {actor.generate: {ranks: a}}}"
    assert distflow("simulate", config, "--hardware", "h100", "--svg", str(file), placement) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    root = ElementTree.parse(file).getroot()
    assert len([e for e in root if e.get("class") == "lane"]) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--hardware", "h10"], "--hardware: there is neither 'h10' nor a file of that name; did you mean 'h100'?"),
        (["--hardware", "no.yaml"], "--hardware: no.yaml cannot be read: No such file or directory"),
        (["--hardware", "h100", "--model", "qwen2.5-8b"], "did you mean 'qwen2.5-7b'?"),
        (["--hardware", "h100", "--node-seconds", "update"], "--node-seconds 'update': write it as NODE=SECONDS"),
        (["--hardware", "h100", "--node-seconds", "update=1"], "the flow has no node 'update'"),
        (["--hardware", "h100", "--response-tokens", "600"], "the config allows 1 to 512 (rollout.max_tokens)"),
        (["--hardware", "h100", "--overlap", "-1"], "--overlap: -1; give the steps"),
        (["--hardware", "h100", "--spread", "-1"], "--spread: -1"),
        (["--hardware", "h100", "--draws", "-1"], "--draws: -1"),
        (["--hardware", "h100", "--failures", "-1"], "--failures: -1; give a number, 0 or more"),
        (["--hardware", "h100", "placement.default.tp=3"], "tp 3 does not fit rank set 'all' of 16 ranks"),
        (["--hardware", "h100", "--model", "qwen2.5-72b"], "a worker of h100 has 74.5 GiB, and rank 0 needs"),
    ],
)
def test_bad_input(config: str, capsys: Output, args: list[str], message: str) -> None:
    assert distflow("simulate", config, *args) == 2
    assert message in capsys.readouterr().err


def test_hardware_from_a_file_with_a_mistake(config: str, capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nabout: mine\nworkers_per_host: 0\n")
    assert distflow("simulate", config, "--hardware", str(file)) == 2
    assert "'workers_per_host': input should be greater than 0" in capsys.readouterr().err
