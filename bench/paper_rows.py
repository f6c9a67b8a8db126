"""The paper's published figures, row by row, and what the simulator predicts for them. Used by bench/paper.py.

The settings are those of the authors' scripts: 512 prompts per host of eight GPUs, 8 responses each, micro-batches of 8
samples (of 1 in log-probs of 72B), mini-batches of 256 prompts per host (128 for 72B), prompts padded to 2,048 tokens
and responses to 4,096 by the controller. They give no mean lengths: prompts of 150 and responses of 800 tokens were
assumed before any row was looked at. What was fitted, and on what:

- the spread of the lengths, on DistFlow's rows of GRPO with 7B and 72B;
- 8 responses also for PPO, whose script says 1 (half of the published throughput), on DistFlow's rows of PPO with 7B;
- the bytes of the images of a sample, on verl's row of 7B on 32 GPUs;
- the mean response of long contexts, half of the limit, on DistFlow's rows of 7B.

All other rows are predictions.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from distflow.simulate import load_hardware
from simulator import Row, Setting, solve

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "paper_figures.json").read_text())
TEXT_SPREAD = 0.4
TP = {"7b": 2, "32b": 4, "72b": 8}  # of generation; 32B's is assumed
HEADS = {"7b": 4, "32b": 8, "72b": 8}  # most ranks over which sequences of long contexts are divided
LIMIT = 4096  # tokens of a response
PER_HOST, HOST = 512, 8  # prompts per host, and its GPUs
OWN, THEIRS = "DistFlow", "verl"
NOT_ITS_DATA = "the driver's bytes per second of compute are few there: what verl loses is something else"
NO_REASON = "what else differs between the two systems there is not published"


def setting(flow: str, model: str, gpus: int) -> Setting:
    """A run of the authors' scripts."""
    return Setting(
        load_hardware("h100"),
        f"qwen2.5-{model}",
        gpus,
        PER_HOST * gpus // HOST,
        8,
        LIMIT,
        800,
        TEXT_SPREAD,
        generate_tp=TP[model],
        mini_batches=4 if model == "72b" else 2,
        kl=True,
        flow=flow,
        kv_cache=30e9,
        micro_samples=8,
        forward_samples=1 if model == "72b" else 8,
        max_prompt=2048,
    )


def tokens(run: Setting) -> float:
    """Returns the tokens of a step, prompts included, as the authors count them."""
    return run.prompts * run.n * (run.prompt_tokens + run.mean)


def throughput(figure: str) -> Iterator[Row]:
    """Thousands of tokens per second of GRPO or PPO."""
    for model, points in PUBLISHED[figure].items():
        for gpus, (theirs, own) in points.items():
            run = setting(figure, model, int(gpus))
            step, controller = run.run()
            size = tokens(run) / 1e3
            fit = model == "7b" or (figure == "grpo" and model == "72b")
            what = f"{model}, {gpus} GPUs"
            yield Row(figure.upper(), f"{what}: {OWN}", own, size / step.step_s, fit)
            if theirs is None:
                continue
            note = ""
            if model == "72b" and figure == "grpo":
                note = f"verl is slower also where its data plane is small; {NO_REASON}"
            elif figure == "ppo" and model == "7b" and int(gpus) > 32:
                note = "less passes through its driver than with GRPO: its calls or its n differ; not published"
            yield Row(figure.upper(), f"{what}: {THEIRS}", theirs, size / controller.step_s, note=note)


def profile() -> Row:
    """Seconds of verl's data plane in the profiled step of 7B on 32 GPUs; its batch is assumed to be that of GRPO."""
    _, controller = setting("grpo", "7b", 32).run()
    moved = sum(controller.node_s.values())
    return Row("Profiled step", f"32 GPUs: data plane of {THEIRS}, s", 83.2, moved, note="nothing of it fitted")


def weak_scaling() -> Iterator[Row]:
    """Models with images: throughput per GPU, relative to the fewest. Lengths of text stand for theirs."""
    for model, points in PUBLISHED["vlm_weak_scaling_distflow"].items():
        first, *others = ((int(g), rate) for g, rate in points.items())
        step = setting("grpo", model, first[0]).run()[0].step_s
        for gpus, rate in others:
            published = rate / gpus / (first[1] / first[0])
            predicted = step / setting("grpo", model, gpus).run()[0].step_s
            yield Row("Images, weak scaling", f"{model}, {first[0]} to {gpus} GPUs: efficiency", published, predicted)


def images_through_a_controller() -> Iterator[Row]:
    """verl's share of DistFlow's throughput where the batch is a full one: DistFlow's rate is that of weak scaling.

    Steps follow from DistFlow's published rate; the images come on top of the text in the calls of the driver.
    """
    points = [("7b", 32), ("7b", 64), ("7b", 128), ("32b", 64), ("32b", 128)]

    def share(model: str, gpus: int, images: float) -> float:
        run = setting("grpo", model, gpus)
        _, own = PUBLISHED["vlm_at_verls_largest_batch"][model][str(gpus)]
        step = tokens(run) / (own * 1e3)
        text = sum(run.run()[1].node_s.values())
        rate = run.hardware.controller.serialise_rate
        return step / (step + text + run.prompts * run.n * images / rate)

    published = {
        (model, gpus): theirs / own
        for model, gpus in points
        for theirs, own in [PUBLISHED["vlm_at_verls_largest_batch"][model][str(gpus)]]
    }
    fitted = solve(-published["7b", 32], 0.0, 1e8, lambda x: -share("7b", 32, x))
    for model, gpus in points:
        fit = (model, gpus) == ("7b", 32)
        note = f"{fitted / 1e6:.1f} MB of images per sample and step fitted" if fit else ""
        what = f"{model}, {gpus} GPUs: {THEIRS} relative to {OWN}"
        yield Row("Images, full batch", what, published[model, gpus], share(model, gpus, fitted), fit, note)


def long_contexts() -> Iterator[Row]:
    """Tokens per second and GPU by length of the context; 32 GPUs are assumed."""
    for model, points in PUBLISHED["long_context_tokens_per_s"].items():
        for length, (theirs, own) in points.items():
            longest = int(length[:-1]) * 1024
            run = replace(
                setting("grpo", model, 32),
                max_tokens=longest - 2048,
                mean=longest / 2,
                train_sp=min(HEADS[model], longest // 8192),
                kv_cache=40e9,
            )
            step, controller = run.run()
            rate = tokens(run) / run.workers
            note = "72B is published as half as fast as its FLOPs beside 32B's say" if model == "72b" else ""
            yield Row("Long contexts", f"{model}, {length}: {OWN}", own, rate / step.step_s, model == "7b", note)
            if theirs is not None:
                slower = rate / controller.step_s
                yield Row("Long contexts", f"{model}, {length}: {THEIRS}", theirs, slower, note=NOT_ITS_DATA)


LEFT_OUT = {
    "Images at the largest batch, beyond it": (
        13 - 5,
        "how large the largest batch is that verl survives is not published, and both systems run it",
    ),
    "Images, absolute throughput": (3, "tokens of images and their processing are not published; efficiencies are"),
    "Convergence": (1, "its curve is the same by design, and depends on the model; its time follows from GRPO's rows"),
    "Own data plane of the profiled step": (1, "theirs takes 10.4 s; ours is another, and takes less than a second"),
}


def predicted_rows() -> list[Row]:
    return [
        *throughput("grpo"),
        *throughput("ppo"),
        profile(),
        *weak_scaling(),
        *images_through_a_controller(),
        *long_contexts(),
    ]
