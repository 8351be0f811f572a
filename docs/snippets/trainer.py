from pathlib import Path

from transformers import Trainer, TrainingArguments

from bitwright.models import load
from bitwright.training.integrations.transformers_trainer import PolicyCallback

loaded = load("my-model")
ids = loaded.tokenizer(Path("my-text.txt").read_text(encoding="utf-8")).input_ids
rows = [{"input_ids": ids[start : start + 32], "labels": ids[start : start + 32]} for start in range(0, 2048, 32)]

arguments = TrainingArguments("my-trainer-run", max_steps=8, report_to=[], use_cpu=True)  # neither bf16 nor fp16
trainer = Trainer(model=loaded.model.requires_grad_(True), args=arguments, train_dataset=rows)
callback = PolicyCallback(trainer, policy="bf16-mixed")
trainer.add_callback(callback)
trainer.train()
print(callback.run.counters)
