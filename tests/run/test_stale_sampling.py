"""Dynamic sampling while generation is ahead: each step has the first prompts that pass, with weights of its delay."""

import random
from functools import partial

import pytest

from cases import KINDS, Source, check_and_write, chosen_prompts
from distflow.flow import Flow, Node
from distflow.plan import Place, Placement, Plan, Workload, plan
from run.test_overlap import STEPS, Actor, Team, collect, make_worker
from simulate import simulate


def sampling_loop(rng: random.Random, workers: int, delay: int) -> Plan:
    """Generates, scores and filters on ranks that do not train, on some of them each; other nodes are anywhere."""
    ranks = rng.sample(range(workers), workers)
    cut = rng.randint(1, workers - 1)
    sets = {"rollout": sorted(ranks[:cut]), "train": sorted(ranks[cut:])}
    sets["scores"] = sorted(rng.sample(sets["rollout"], rng.randint(1, cut)))
    sets["some"] = sorted(rng.sample(range(workers), rng.randint(1, workers)))
    repeat, prompts, rounds = rng.choice([1, 2]), rng.randint(1, 6), rng.randint(1, 4)
    chosen = chosen_prompts("k.flag", repeat, prompts, rounds, STEPS)
    fields, nodes = list(Source.column_names), list[Node]()

    def params(name: str, writes: tuple[str, ...], filtered: bool) -> dict[str, object]:
        own = {"node": name, "writes": list(writes), "whole": False, "repeat": repeat}
        return own | ({"chosen": chosen} if filtered else {})

    tokens = (f"g.{rng.choice(KINDS).replace(' ', '_')}",)
    nodes.append(
        Node(
            "generate",
            "actor",
            "inference",
            tuple(rng.sample(fields, 2)),
            tokens,
            fn=Actor.generate,
            params={"writes": list(tokens)},
            generates=True,
            method=True,
        )
    )
    score = (f"s.{rng.choice(KINDS).replace(' ', '_')}",)
    nodes.append(Node("score", reads=tokens, writes=score, fn=check_and_write, params=params("score", score, False)))
    keep = ("k.flag",)
    nodes.append(
        Node(
            "keep",
            reads=score,
            writes=keep,
            fn=check_and_write,
            params=params("keep", keep, False),
            whole_groups=True,
            dynamic_sampling=rounds,
        )
    )
    fields += [*tokens, *score]
    for i in range(rng.randint(0, 3)):
        reads = tuple(rng.sample(fields, rng.randint(1, 3)))
        writes = (f"f{i}.{rng.choice(KINDS).replace(' ', '_')}",)
        balance = rng.choice(reads) if rng.random() < 0.3 else None
        made = params(f"n{i}", writes, True)
        nodes.append(
            Node(f"n{i}", reads=reads, writes=writes, fn=check_and_write, params=made, balance=balance, after=("keep",))
        )
        fields += writes
    last = tuple(dict.fromkeys((*tokens, rng.choice(fields))))
    nodes.append(Node("seen", reads=last, fn=check_and_write, params=params("seen", (), True), after=("keep",)))
    nodes.append(Node("update", "actor", "train", last, method=True, fn=Actor.update, after=("keep",)))
    places = {n.id: Place(rng.choice(list(sets))) for n in nodes}
    places |= {"generate": Place("rollout"), "score": Place("scores"), "keep": Place(rng.choice(["scores", "rollout"]))}
    places |= {"update": Place("train"), "seen": Place("train")}
    rank_sets = {name: ",".join(map(str, r)) for name, r in sets.items()}
    flow, placement = Flow("loop", Source.column_names, tuple(nodes)), Placement(workers, rank_sets, nodes=places)
    return plan(flow, placement, Workload(prompts, repeat), staleness=delay)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_in_one_order_of_all_ranks_nothing_deadlocks(delay: int) -> None:
    several = 0
    for seed in range(20):
        p = sampling_loop(random.Random(seed), 2 + seed % 4, delay)
        progress = dict.fromkeys(p.partition_of("update").layout.ranks, 0)
        workers = {r: make_worker(r, p, progress) for r in range(p.workers)}
        logged: dict[int, list] = {r: [] for r in workers}
        simulate({r: w.steps(partial(collect, logged[r])) for r, w in workers.items()})
        rounds = [m.totals["sampling/rounds", "mean"] for m in logged[0]]
        several += any(total > count for total, count in rounds)
        positions = {w.data.position for w in workers.values()}
        assert len(positions) == 1
        assert workers[0].data.position_after(STEPS) == positions.pop()
    assert several > 5


@pytest.mark.parametrize("delay", [1, 2])
def test_generation_is_ahead_in_threads_of_its_own(delay: int) -> None:
    for seed in range(12):
        p = sampling_loop(random.Random(100 + seed), 2 + seed % 4, delay)
        team = Team(p, 0)
        team.run()
        assert not team.errors, (seed, team.errors[0])
        assert max(team.copies) <= delay + 1
        assert [row["samples/seen"] for row in team.rows] == [p.samples] * STEPS
