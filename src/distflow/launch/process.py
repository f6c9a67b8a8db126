"""One worker process, from its environment to its exit code. Needs only the standard rendezvous variables."""

import ctypes
import hashlib
import inspect
import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distflow.config import Config
from distflow.data.comm import Comm
from distflow.data.coordinator import Coordinator
from distflow.data.exchange import AllGather
from distflow.data.loader import Loader
from distflow.data.rows import Rows
from distflow.data.view import View
from distflow.engine.setup import Setup
from distflow.errors import ConfigError, DistflowError, PeerLostError, StuckError
from distflow.evaluation import Evaluation
from distflow.observe.board import Board
from distflow.observe.metrics import Metrics, Tally
from distflow.observe.progress import Progress
from distflow.observe.report import Kind, Report
from distflow.observe.watch import PACKAGE, Watch
from distflow.plan import Layout, Plan, Run, Weights, format_ranks
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
    rows = config.rows(plan)
    held_out = None
    if config.eval:
        held_out = View(Rows(config.eval_files), config.data.rename)
        held_out = held_out.keep(np.arange(min(len(held_out), config.eval.limit or len(held_out))))
    eval_plan = config.eval_plan(plan.workers, len(held_out)) if held_out else None
    if config.steps == 0 and not eval_plan:
        raise ConfigError("steps: 0 only evaluates, and there is no `eval` section; add one, or give steps")
    plans = [p for p in (plan if config.steps != 0 else None, eval_plan) if p]
    board.doing(-1, "meet")
    with board.waiting(everybody):
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        sets = [t.ranks for p in plans for t in p.tasks if isinstance(t, Weights)]
        comm = Comm([everybody, *(m.ranks for p in plans for m in p.moves), *sets], device, board.waiting)
        meshes = _meshes(config, plans, device)
        groups = {layout: dist.new_group(list(layout.ranks), backend="gloo", timeout=timeout) for layout in meshes}
    _agree(config, plan, comm, everybody)

    source = None
    skipped, skipped_count = rows.rows.skipped, rows.rows.skipped_count
    if config.model:
        from distflow.engine.model import open_model
        from distflow.engine.policy import prompt_limit
        from distflow.engine.screen import screen, texts
        from distflow.engine.text import Text

        board.doing(-1, "look at the prompts")
        source = open_model(config.model, lambda: texts(rows), config.base, config.seed)
        text = Text(source, prompt_limit(config, source))
        with board.waiting(everybody):
            seen = screen(rows, text, config.data.on_bad_row == "skip", rank, plan.workers)
            if held_out:
                screen(held_out, text, False, rank, plan.workers)
        rows, skipped, skipped_count = seen.rows, [*skipped, *seen.skipped], skipped_count + seen.count
    steps = max(1, len(rows) // config.data.batch) if config.steps is None else config.steps
    board.doing(-1, "load models")
    players = {}
    for role in _roles(plans, rank):
        extra: dict[str, Any] = {}
        if takes_setup(config.player(role)):
            layouts = _layouts(plans, role)
            extra["setup"] = Setup(role, rank, config, steps, layouts, meshes, groups, device, source)
        players[role] = config.player(role)(**config.cast[role].args, **extra)

    data = Coordinator(rank, plan, Loader(rows, config.data.batch, config.repeat, config.seed), device)
    progress = Progress(config.run_folder, steps, skipped, skipped_count) if rank == 0 else None
    group = dist.new_group(backend="gloo", timeout=timeout) if plan.workers > 1 else None
    metrics = Metrics(group, progress)

    def end_of_step(step: int, tally: Tally) -> None:
        metrics.submit(step, tally)
        with board.waiting(everybody):
            metrics.wait()

    after = None
    if config.eval and held_out and eval_plan:
        loader = Loader(held_out, eval_plan.samples // eval_plan.repeat, eval_plan.repeat, 0)
        judge = Worker(
            rank,
            eval_plan,
            Coordinator(rank, eval_plan, loader, device),
            players,
            config.seed,
            config.run_folder,
            board.doing,
        )
        after = Evaluation(judge, config.eval.every, steps)
    board.doing(-1, "start together")  # loading models takes some longer than others
    with board.waiting(everybody):
        dist.barrier()
    if after:
        before = Tally()
        comm.drive(after(-1, before))
        end_of_step(-1, before)
    if steps:
        worker = Worker(rank, plan, data, players, config.seed, config.run_folder, board.doing)
        comm.drive(worker.steps(0, steps, end_of_step, *([after] if after else [])))
    board.doing(steps, "finish")
    for player in players.values():
        if steps and hasattr(player, "save"):
            player.save(config.run_folder / "checkpoints", steps)
    with board.waiting(everybody):
        metrics.wait(0)
        dist.barrier()
    metrics.close()
    data.close()
    for player in players.values():
        if hasattr(player, "close"):
            player.close()
    if progress:
        progress.close()
    dist.destroy_process_group()


def _roles(plans: list[Plan], rank: int) -> list[str]:
    """Roles that are played by an object, and of which this rank's chains call a method or hand over weights."""
    found: dict[str, None] = {}
    for plan in plans:
        for t in plan.chain(rank):
            if isinstance(t, Weights):
                found[t.role] = None
            elif isinstance(t, Run) and plan.flow.node(t.node).method:
                found[plan.flow.node(t.node).role] = None
    return list(found)


def _layouts(plans: list[Plan], role: str) -> dict[str, Layout]:
    """Method → where the role's nodes of that name run."""
    return {
        n.call.rpartition(".")[2]: p.partition_of(n.id).layout
        for p in plans
        for n in p.flow.nodes
        if n.role == role and n.method
    }


def _meshes(config: Config, plans: list[Plan], device: torch.device) -> dict[Layout, DeviceMesh]:
    """One for each layout of a role that asks for them. Everybody takes part in making them."""
    roles = {n.role for p in plans for n in p.flow.nodes if n.method}
    wanted = [r for r in sorted(roles) if takes_setup(config.player(r))]
    layouts = dict.fromkeys(layout for r in wanted for layout in _layouts(plans, r).values())
    return {
        layout: DeviceMesh(
            device.type, torch.tensor(layout.ranks).view(layout.dp, layout.tp), mesh_dim_names=("dp", "tp")
        )
        for layout in layouts
    }


def takes_setup(player: Any) -> bool:
    return "setup" in inspect.signature(player).parameters


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


def _prepare_process(workers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, without N tracebacks
    if LAUNCHED in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the launcher
    if "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # Large tensors come and go with every layer. By default their pages go back to the system each time, and
        # coming back they have to be cleared: some percent of a step.
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the highest there is
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


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
