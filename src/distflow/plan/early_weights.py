"""Where in the shared order of tasks the weights of a step are synced, if they are of some steps before."""

from distflow.plan.tasks import Move, Plan, Split, Weights, chunk_of


def weights_after(plan: Plan) -> int | None:
    """Returns after how many tasks of a step the weights of the next step are synced; None: at their own place.

    With a delay they are trained long before. At their own place those that generate would wait for all moves of the
    step before, and so for nodes between others, such as scores; here they wait only for moves of their own.
    """
    own = [i for i, t in enumerate(plan.tasks) if isinstance(t, Move) and plan.ahead.intersection(t.ranks)]
    weights = [i for i, t in enumerate(plan.tasks) if isinstance(t, Weights)]
    if not plan.staleness or (own and own[0] < weights[-1]):  # they receive something before they generate
        return None
    chunks = [i for i, t in enumerate(plan.tasks) if isinstance(t, Split) or chunk_of(t) is not None]
    return max([*own, *weights, *chunks]) + 1
