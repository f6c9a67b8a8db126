# mypy: ignore-errors
"""verl's single controller: collect a DataProto from N workers, reorder it on the driver, dispatch it to N workers.

    .peers/verl/bin/python bench/peers/verl_dataproto.py --workers 4 --iters 9

With verl's fastest serialisation. The last line of standard output is one JSON object.
"""

import time

import ray
import torch
import traffic
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    collect_dp_compute_data_proto,
    dispatch_one_to_all,
    register,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@ray.remote
class Peer(Worker):
    """One worker: its rows before the exchange, and after."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.mine = DataProto.from_dict(tensors=traffic.tensors(traffic.before(self.rank, n)))
        self.got = None

    @register(dispatch_mode={"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_dp_compute_data_proto})
    def produce(self) -> DataProto:
        return self.mine

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def check(self) -> None:
        traffic.verify(self.got.batch, self.rank, self.n)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def drop(self) -> None:
        self.got = None

    # Collected as a plain list: nothing to concatenate on the way back.
    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def consume(self, data: DataProto) -> None:
        self.got = data


def main() -> None:
    args = traffic.arguments()
    n = args.workers
    order = torch.tensor([row for rank in range(n) for row in traffic.after(rank, n)])

    with traffic.private_ray(n, VERL_DATAPROTO_SERIALIZATION_METHOD="numpy"):
        pool = RayResourcePool([n], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Peer, n))
        group.drop()  # once all workers are up

        def exchange() -> dict[str, float]:
            start = time.perf_counter()
            batch = group.produce()
            collected = time.perf_counter()
            batch.reorder(order)
            reordered = time.perf_counter()
            group.consume(batch)
            dispatched = time.perf_counter()
            return {
                "collect": collected - start,
                "reorder": reordered - collected,
                "dispatch": dispatched - reordered,
            }

        measured = traffic.measure(args.iters, exchange, group.check, group.drop)
    traffic.report(n, measured, ["verl", "ray", "torch"], serialisation="numpy")


if __name__ == "__main__":
    main()
