import itertools

import torch

from bitwright.models import load
from bitwright.training import Batches, checked_batches, load_checkpoint, prepare, read_token_rows, save_checkpoint

loaded = load("my-model")
rows = read_token_rows("my-text.txt", loaded.tokenizer, sequence_length=32)
num_ids = loaded.model.get_input_embeddings().num_embeddings


def begin():
    model = load("my-model").model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = prepare(model, optimizer, policy="fp16-mixed", max_grad_norm=1.0)
    return run, Batches(rows, batch=4)


def go_on(run, data, first, last):
    # NaN, Inf and ids that the embedding lacks are refused by the number of their batch
    batches = checked_batches(data, vocabulary_size=num_ids, first=first)
    for number, batch in enumerate(itertools.islice(batches, last - first), start=first + 1):
        with run.step() as step:
            step.backward(run.model(**batch).loss)
        if number % 4 == 0:
            save_checkpoint(f"my-checkpoints/step-{number}", run, step=number, data=data, extra={"loss": run.last.loss})


run, data = begin()
go_on(run, data, 0, 6)  # stops here; steps 5 and 6 are lost

run, data = begin()  # the same model, optimizer, policy and text
resumed = load_checkpoint("my-checkpoints/step-4", run, data=data)
print(f"after step {resumed.step}, loss {resumed.extra['loss']:.3f}, scale {run.scale:g}")
go_on(run, data, resumed.step, 8)  # bit for bit as if it had never stopped
print(run.counters)
