# mypy: ignore-errors
"""TransferQueue: N workers put their rows into its storage units, N workers get the rows they want next.

    .peers/verl/bin/python bench/peers/transferqueue.py --workers 4 --iters 9

SimpleStorage, one storage unit per worker; clearing is not counted. The last line of the output is one JSON object.
"""

import time

import ray
import traffic
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

PARTITION = "bench"


@ray.remote(num_cpus=0)
class Peer:
    """One worker: its rows before the exchange, and after."""

    def __init__(self, rank: int, n: int) -> None:
        tq.init()  # joins the queue that the driver started
        self.rank, self.n = rank, n
        rows = traffic.before(rank, n)
        self.mine = TensorDict(traffic.tensors(rows), batch_size=len(rows))
        self.put_keys = [str(row) for row in rows]
        self.get_keys = [str(row) for row in traffic.after(rank, n)]
        self.got = None

    def put(self) -> None:
        tq.kv_batch_put(keys=self.put_keys, partition_id=PARTITION, fields=self.mine)

    def get(self) -> None:
        self.got = tq.kv_batch_get(keys=self.get_keys, partition_id=PARTITION, select_fields=list(traffic.FIELDS))

    def check(self) -> None:
        # Rows come back as one jagged tensor per field, whose values lie end to end.
        rows = {f: t.values().view(len(self.get_keys), -1) if t.is_nested else t for f, t in self.got.items()}
        traffic.verify(rows, self.rank, self.n)

    def clear(self) -> None:
        self.got = None
        tq.kv_clear(keys=self.put_keys, partition_id=PARTITION)


def main() -> None:
    args = traffic.arguments()
    n = args.workers
    units = max(2, n)

    with traffic.private_ray(n):
        storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": units}}
        tq.init(OmegaConf.create({"backend": storage}))
        peers = [Peer.remote(rank, n) for rank in range(n)]
        ray.get([peer.__ray_ready__.remote() for peer in peers])

        def everybody(method: str) -> None:
            ray.get([getattr(peer, method).remote() for peer in peers])

        def exchange() -> dict[str, float]:
            start = time.perf_counter()
            everybody("put")
            stored = time.perf_counter()
            everybody("get")
            return {"put": stored - start, "get": time.perf_counter() - stored}

        try:
            measured = traffic.measure(args.iters, exchange, lambda: everybody("check"), lambda: everybody("clear"))
        finally:
            tq.close()
    traffic.report(n, measured, ["TransferQueue", "ray", "torch"], storage="SimpleStorage", storage_units=units)


if __name__ == "__main__":
    main()
