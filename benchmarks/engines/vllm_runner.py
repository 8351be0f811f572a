"""Asks the real vLLM; runs in vLLM's environment, and knows nothing of bitwright.

    python vllm_runner.py request.json answer.json

request: {"model": folder, "dtype": …, "texts": [[token id, …], …], "prompts": [[token id, …], …], "new_tokens": n}
answer: {"logprobs": per text, one a token but the first; "greedy": token ids per prompt; "load_s";
"decode_tokens_per_s": of the greedy texts, one at a time}

vLLM has no kernel for NVFP4 on a CPU, but an emulation in torch for GPUs without the format. It is offered here on CPUs
too, which its registry does not: what is loaded and how scales are used is then vLLM's own code.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# read when vllm is imported: small cache, no second process, no thread binding on small machines
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams
from vllm.model_executor.kernels import linear
from vllm.platforms.interface import PlatformEnum

linear._POSSIBLE_NVFP4_KERNELS.setdefault(PlatformEnum.CPU, [linear.EmulationNvFp4LinearKernel])


def main() -> None:
    """Answer one request."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    start = time.perf_counter()
    length = max(map(len, [*request["texts"], *request["prompts"]])) + request["new_tokens"] + 1
    llm = LLM(model=request["model"], dtype=request["dtype"], enforce_eager=True, max_model_len=length, max_num_seqs=8)
    load_s = time.perf_counter() - start
    scored = llm.generate(
        [{"prompt_token_ids": ids} for ids in request["texts"]],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    logprobs = [
        [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(request["texts"], scored, strict=True)
    ]
    greedy: list[list[int]] = []
    decode_s = 0.0
    for ids in request["prompts"]:
        took_s = {}
        for new_tokens in (1, request["new_tokens"]):
            params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
            start = time.perf_counter()
            (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            took_s[new_tokens] = time.perf_counter() - start
        # the prompt runs in both: what is left is the time of the tokens after the first
        decode_s += took_s[request["new_tokens"]] - took_s[1]
        greedy.append(list(output.outputs[0].token_ids))
    answer = {
        "logprobs": logprobs,
        "greedy": greedy,
        "load_s": load_s,
        "decode_tokens_per_s": sum(len(new) - 1 for new in greedy) / decode_s if greedy else None,
    }
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
