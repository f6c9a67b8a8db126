# mypy: ignore-errors
"""TransferQueue: N workers put their rows into its storage units, N workers get the rows they want next.

    .peers/verl/bin/python bench/peers/transferqueue.py --workers 4 --iters 9

SimpleStorage, two storage units; clearing is not counted. The last line of the output is one JSON object.
"""

import ray
import traffic
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

PARTITION = "bench"
UNITS, THREADS = 2, 2  # of units (2 is its default), N or 2, and threads, 8 or 2: apart by less than the noise here


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

    with traffic.private_ray(n, TQ_NUM_THREADS=str(THREADS), TQ_CLIENT_ZMQ_IO_THREADS=str(THREADS)):
        storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": UNITS}}
        tq.init(OmegaConf.create({"backend": storage}))
        peers = [Peer.remote(rank, n) for rank in range(n)]
        ray.get([peer.__ray_ready__.remote() for peer in peers])

        def everybody(method: str) -> None:
            ray.get([getattr(peer, method).remote() for peer in peers])

        phases = {"put": lambda _: everybody("put"), "get": lambda _: everybody("get")}
        try:
            measured = traffic.measure(args.iters, phases, lambda: everybody("check"), lambda: everybody("clear"))
        finally:
            tq.close()
    setting = {"workers": n, "storage": "SimpleStorage", "storage_units": UNITS, "threads": THREADS}
    traffic.report(setting | measured, "TransferQueue", "ray", "torch")


if __name__ == "__main__":
    main()
