from bitwright.training import prepare


def train(model, optimizer, batches):
    run = prepare(model, optimizer, policy="bf16-mixed", max_grad_norm=1.0)  # or "auto"
    for batch in batches:
        with run.step() as step:
            step.backward(model(**batch).loss)  # scaling, accumulation, checks, clipping, skipping inside
    return run.counters
