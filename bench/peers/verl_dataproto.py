# mypy: ignore-errors
"""verl's single controller: collect a DataProto from N workers, reorder it on the driver, dispatch it to N workers.

    .peers/verl/bin/python bench/peers/verl_dataproto.py --workers 4 --iters 9

With verl's fastest serialisation. The last line of standard output is one JSON object.
"""

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

        def reorder(batch: DataProto) -> DataProto:
            batch.reorder(order)
            return batch

        phases = {"collect": lambda _: group.produce(), "reorder": reorder, "dispatch": group.consume}
        measured = traffic.measure(args.iters, phases, group.check, group.drop)
    traffic.report({"workers": n, "serialisation": "numpy"} | measured, "verl", "ray", "torch")


if __name__ == "__main__":
    main()
