# mypy: ignore-errors
"""vLLM on the rollouts of bench/rollout.py, which starts it; not run by itself.

    .peers/vllm/bin/python bench/peers/vllm_generate.py MODEL WORK.json [--compiled]

float32: on machines that advertise AMX and then trap it, bfloat16 kills the process. One process, all cores it may use,
no detokenisation and no log-probs (ours computes them).
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from serve import keep_stdout_for_answers, serve

COMPILED = "--compiled" in sys.argv
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
if not COMPILED:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the first call compiles the sampler


def main() -> None:
    keep_stdout_for_answers()
    import torch
    from vllm import LLM, SamplingParams

    model, work = sys.argv[1:3]
    work = json.loads(Path(work).read_text())
    prompts = [{"prompt_token_ids": p} for p in work["prompts"]]
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=not COMPILED,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        max_model_len=max(512, max(map(len, work["prompts"])) + max(work["lengths"])),
        max_num_seqs=work["at_once"],
        max_num_batched_tokens=8192,
        disable_log_stats=True,
    )
    how = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in work["lengths"]]

    def generate(n: int) -> dict[str, int]:
        done = llm.generate(prompts[:n], how[:n], use_tqdm=False)
        return {"tokens": sum(len(o.outputs[0].token_ids) for o in done)}

    generate(work["warm_up"])
    name = "vllm-cpu" if _installed("vllm-cpu") else "vllm"
    setting = f"{'compiled' if COMPILED else 'eager'}, {torch.get_num_threads()} threads"
    about = {"version": f"{name} {version(name)}, torch {version('torch')}", "setting": setting}
    serve(lambda: generate(len(prompts)), about)


def _installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
