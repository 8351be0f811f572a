import torch

from bitwright.models import load
from bitwright.training import prepare
from bitwright.training.lora import add_lora, lora_sizes

loaded = load("my-model")
model = add_lora(loaded.model, rank=8, base="int4_g32").train()  # frozen codes, adapters in fp32
ids = torch.tensor(loaded.tokenizer("The scale of a group multiplies its codes.").input_ids)[None]

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
run = prepare(model, optimizer, policy="bf16-mixed")
for _ in range(4):
    with run.step() as step:
        step.backward(model(input_ids=ids, labels=ids).loss)
model.save_pretrained("my-adapters")  # the adapters alone, as peft keeps them
print(lora_sizes(model), run.last)
