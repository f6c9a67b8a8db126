"""Staleness: generation may use weights of some steps before, and so run ahead of training.

Staleness is the delay of the one edge from step to step: from the node that trains a role to the node that generates
with it. Every rank still runs its own chain, step after step; generating ranks are at most `delay` steps ahead of
training ranks, as they wait for their weights. All communication is ordered by step, then by task, whatever the delay:
every rank takes part in that order, so there is no circular wait.
"""

from distflow.errors import PlacementError
from distflow.flow.graph import SOURCE, Flow, Node
from distflow.plan.layout import format_ranks
from distflow.plan.placement import Placement
from distflow.plan.tasks import Move, Plan, Resample, Split, SyncWeights, chunk_of


def weight_version(step: int, delay: int, first: int) -> int:
    """Returns the weight version that a step generates with: the number of steps that have trained the weights.

    Steps count from 1; `first` is the version at the start of the run.
    """
    return max(first, step - 1 - delay)


def check_apart(flow: Flow, placement: Placement, key: str) -> None:
    """Raises unless the ranks that generate with a role train nothing of it, which the option `key` needs."""
    loops = [(n, _model_nodes(flow, n)) for n in flow.nodes if n.generates and _is_trained(flow, n.role)]
    if not loops:
        raise PlacementError(
            f"{key}: the flow '{flow.name}' has no node that generates with weights that another one trains;"
            " leave it out"
        )
    if flow.sampling_node:
        _check_sampling(flow, placement, key, flow.sampling_node)
    for n, others in loops:
        own = set(placement.layout(n).ranks)
        for other in others:
            shared = own.intersection(placement.layout(other).ranks)
            if shared:
                raise PlacementError(
                    f"{key}: '{n.id}' and '{other.id}' share ranks {format_ranks(tuple(sorted(shared)))}, so one cannot"
                    " run ahead of the other; place them on rank sets that do not overlap, such as"
                    f" placement.nodes.{n.id}: {{ranks: rollout}}, or leave it out"
                )


def _check_sampling(flow: Flow, placement: Placement, key: str, sampling: Node) -> None:
    """Raises unless the rounds of dynamic sampling need no rank that trains."""
    if key != "rollout.staleness":
        raise PlacementError(
            f"{key}: '{sampling.id}' samples dynamically, and how many rounds a step needs is known only at its end;"
            " leave it out, or use a flow without dynamic sampling"
        )
    trains = {r for n in flow.nodes if n.type == "train" for r in placement.layout(n).ranks}
    before = flow.order[: flow.order.index(sampling) + 1]
    layouts = {SOURCE: placement.source_layout(flow), **{n.id: placement.layout(n) for n in before}}
    for name, layout in layouts.items():
        if shared := trains.intersection(layout.ranks):
            raise PlacementError(
                f"{key}: '{name}' runs on ranks {format_ranks(tuple(sorted(shared)))}, which train, and every round of"
                f" '{sampling.id}' needs it; place it on ranks that do not train, such as placement.nodes.{name}:"
                " {ranks: rollout}, or leave it out"
            )


def check_partial(flow: Flow, placement: Placement, staleness: int) -> None:
    """Raises unless responses may be begun in one step and carried on in the next."""
    key = "rollout.partial"
    if not staleness:
        raise PlacementError(
            f"{key}: responses that are carried on have tokens of older weights, and rollout.staleness is 0; make it"
            " 1 or more, or leave out partial"
        )
    check_apart(flow, placement, key)
    generates = [n for n in flow.nodes if n.generates]
    loader = placement.source_layout(flow)
    if len(generates) > 1:
        raise PlacementError(f"{key}: '{generates[0].id}' and '{generates[1].id}' both generate; leave it out")
    n = generates[0]
    written = [f for f in n.reads if flow.writer[f] != SOURCE]
    if written or placement.layout(n) != loader:
        why = (
            f"reads '{written[0]}', which '{flow.writer[written[0]]}' writes"
            if written
            else f"runs on ranks {format_ranks(placement.layout(n).ranks)}, and its prompts are loaded on"
            f" {format_ranks(loader.ranks)}"
        )
        raise PlacementError(f"{key}: '{n.id}' {why}, so it cannot begin prompts of later steps; leave it out")


def weights_after(plan: Plan) -> int | None:
    """Returns the number of tasks of a step before the next step's weights are synced; None: at their own place.

    With a delay, these weights are trained long before. At their own place, generating ranks would wait for all
    moves of the step before, and so for other nodes such as scores; here they wait only for their own moves.
    """
    own = [i for i, t in enumerate(plan.tasks) if isinstance(t, Move) and plan.ahead.intersection(t.ranks)]
    weights = [i for i, t in enumerate(plan.tasks) if isinstance(t, SyncWeights)]
    if not plan.staleness or (own and own[0] < weights[-1]):  # generating ranks first receive fields
        return None
    others = [i for i, t in enumerate(plan.tasks) if isinstance(t, Split | Resample) or chunk_of(t) is not None]
    return max([*own, *weights, *others]) + 1


def _is_trained(flow: Flow, role: str) -> bool:
    return any(n.role == role and n.type == "train" for n in flow.nodes)


def _model_nodes(flow: Flow, generates: Node) -> list[Node]:
    """Returns the other nodes of the role, which run its model on the training ranks."""
    return [n for n in flow.nodes if n.role == generates.role and n.method and not n.generates]
