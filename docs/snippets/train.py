from pathlib import Path

import torch

from bitwright.models import load
from bitwright.training import prepare

loaded = load("my-model")
model = loaded.model.requires_grad_(True).train()
text = Path("my-text.txt").read_text(encoding="utf-8")
ids = torch.tensor(loaded.tokenizer(text).input_ids)
batches = ids[: 8 * 4 * 32].view(8, 4, 32)  # eight batches of four sequences

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
run = prepare(model, optimizer, policy="bf16-mixed", max_grad_norm=1.0)
for batch in batches:
    with run.step() as step:
        step.backward(model(input_ids=batch, labels=batch).loss)

print(run.describe())
print(run.last)
print(run.counters)
