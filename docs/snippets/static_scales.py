from pathlib import Path

import bitwright
from bitwright.inference import calibrate_static, check_static
from bitwright.models import load

loaded = load("my-model")
budget = bitwright.Budget(effective_bits=8.5)
plan = bitwright.optimize(loaded, budget=budget, schemes=("fp8_static", "bf16"))

texts = Path("my-text.txt").read_text(encoding="utf-8").split("\n\n")
prompts = [loaded.tokenizer(text, return_tensors="pt").input_ids for text in texts[:64]]
plan = calibrate_static(plan, loaded, prompts[:48], rule="percentile", percentile=99.99)  # or min_max, mse
found = check_static(plan, loaded, prompts[48:])
for finding in found.findings:
    print(finding.site, finding.what, finding.sentence)
print(len(found.findings), "findings at", found.num_sites, "sites over", found.num_tokens, "tokens")
bitwright.write_plan(plan, "my-static-plan")
