# mypy: ignore-errors
"""What vLLM generates for bench/exact.py, which starts it, with its log-probs; not run by itself.

.peers/vllm/bin/python bench/peers/vllm_logprobs.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")


def main() -> None:
    from vllm import LLM, SamplingParams

    folder = Path(sys.argv[1])
    work = json.loads((folder / "work.json").read_text())
    llm = LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        max_model_len=512,
    )
    how = SamplingParams(max_tokens=work["tokens"], ignore_eos=True, detokenize=False, logprobs=0, seed=5)
    done = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in work["prompts"]], how, use_tqdm=False)]
    tokens = [list(o.token_ids) for o in done]
    logprobs = [[row[t].logprob for row, t in zip(o.logprobs, o.token_ids, strict=True)] for o in done]
    (folder / "found.json").write_text(json.dumps({"tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
