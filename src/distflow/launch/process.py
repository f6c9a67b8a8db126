"""One worker process, from its environment to its exit code. Needs only the standard rendezvous variables."""

import ctypes
import hashlib
import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distflow.config import Config
from distflow.data.comm import Comm
from distflow.data.coordinator import Coordinator
from distflow.data.exchange import AllGather
from distflow.data.loader import Loader
from distflow.data.rows import Rows
from distflow.errors import ConfigError, DistflowError, PeerLostError, StuckError
from distflow.observe.board import Board
from distflow.observe.metrics import Metrics, Tally
from distflow.observe.progress import Progress
from distflow.observe.report import Kind, Report
from distflow.observe.watch import PACKAGE, Watch
from distflow.plan import Load, Plan, format_ranks
from distflow.worker import Worker

LAUNCHED = "DISTFLOW_LAUNCHED"  # set by `distflow run`: it tells the cause of a failure, once, so that workers need not


def run_worker(config: Config) -> int:
    """Be worker RANK of WORLD_SIZE until the run is over."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _prepare_process(workers)
    folder = config.run_folder / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / f"{rank}.error", folder / f"{rank}.stack", folder / "alarm"):
        old.unlink(missing_ok=True)

    def fail(error: BaseException) -> None:
        kind: Kind = (
            "echo" if isinstance(error, PeerLostError) else "stuck" if isinstance(error, StuckError) else "cause"
        )
        message = explain(error, rank)
        Report(rank, kind, message).save(folder)
        if LAUNCHED not in os.environ:
            print(f"distflow: {message}", file=sys.stderr, flush=True)

    def end_stuck(error: StuckError) -> NoReturn:
        fail(error)
        os._exit(1)  # the main thread is inside a collective that will never return

    board = Board(folder, rank)
    try:
        if config.workers not in (None, workers):
            raise ConfigError(f"workers: {config.workers}, but {workers} were started; set workers={workers}")
        plan = config.plan(workers)
        watch = Watch(board, workers, config.wait_limit_s, end_stuck)
        watch.start()
        _run(config, plan, rank, board)
        watch.stop()
        return 0
    except Exception as e:
        fail(e)
        # No clean-up: it would wait for peers. The exit itself tells them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _run(config: Config, plan: Plan, rank: int, board: Board) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # The watchdog is to speak first: a collective gives up by itself only much later.
    timeout = timedelta(seconds=2 * config.wait_limit_s + 60)
    everybody = tuple(range(plan.workers))
    board.doing(-1, "meet")
    with board.waiting(everybody):
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        comm = Comm([everybody, *(m.ranks for m in plan.moves)], device, board.waiting)
    _agree(config, plan, comm, everybody)

    fields = next(t.fields for t in plan.tasks if isinstance(t, Load))
    rows = Rows(config.files, fields, config.data.on_bad_row)
    data = Coordinator(rank, plan, Loader(rows, config.data.batch, config.data.repeat, config.seed), device)
    progress = Progress(config.run_folder, config.steps, rows.skipped, rows.skipped_count) if rank == 0 else None
    group = dist.new_group(backend="gloo", timeout=timeout) if plan.workers > 1 else None
    metrics = Metrics(group, progress)

    def end_of_step(step: int, tally: Tally) -> None:
        metrics.submit(step, tally)
        with board.waiting(everybody):
            metrics.wait()

    worker = Worker(rank, plan, data, _players(config, plan, rank), config.seed, board.doing, end_of_step)
    board.doing(-1, "start together")  # loading models takes some longer than others
    with board.waiting(everybody):
        dist.barrier()
    comm.drive(worker.steps(0, config.steps))
    board.doing(config.steps, "finish")
    with board.waiting(everybody):
        metrics.wait(0)
        dist.barrier()
    metrics.close()
    data.close()
    if progress:
        progress.close()
    dist.destroy_process_group()


def _agree(config: Config, plan: Plan, comm: Comm, everybody: tuple[int, ...]) -> None:
    """All workers have derived the same plan from the same config, or none of them starts."""
    told = config.model_dump_json(exclude={"run_dir"})
    mine = hashlib.sha256(plan.hash.encode() + told.encode()).digest()
    gathered = comm.perform(AllGather(everybody, torch.frombuffer(bytearray(mine), dtype=torch.uint8)))
    hashes = [bytes(h).hex()[:12] for h in gathered.cpu().tolist()]
    if len(set(hashes)) > 1:
        camps = {h: format_ranks(tuple(r for r in everybody if hashes[r] == h)) for h in hashes}
        raise DistflowError(
            f"the workers derived different plans: {', '.join(f'ranks {r} have {h}' for h, r in camps.items())};"
            " their config, code or data files differ: compare `distflow plan CONFIG --json` on those hosts"
        )


def _players(config: Config, plan: Plan, rank: int) -> dict[str, Any]:
    """The objects whose methods this rank's chain calls."""
    mine = {t.name for t in plan.chain(rank)}
    roles = dict.fromkeys(n.role for n in plan.flow.nodes if n.method and n.id in mine)
    return {r: config.players[r](**config.roles[r].args) for r in roles}


def _prepare_process(workers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, without N tracebacks
    if LAUNCHED in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the launcher
    if "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))


def explain(error: BaseException, rank: int) -> str:
    """The message; with the user's own frames where their code raised, and with all where ours is to blame."""
    cause = error.__cause__ if isinstance(error, DistflowError) else error
    text = str(error) if isinstance(error, DistflowError) else f"rank {rank}: {type(error).__name__}: {error}"
    if cause is None or isinstance(error, PeerLostError) or isinstance(cause, DistflowError):
        return text
    frames = traceback.extract_tb(cause.__traceback__)
    if isinstance(error, DistflowError):
        frames = traceback.StackSummary.from_list([f for f in frames if not f.filename.startswith(PACKAGE)])
    return text + "\n" + "".join(frames.format()).rstrip()
