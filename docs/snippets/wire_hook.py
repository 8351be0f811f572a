import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bitwright.comms import register
from bitwright.models import load

dist.init_process_group("gloo")  # nccl, where ranks have GPUs
model = DistributedDataParallel(load("my-model").model.requires_grad_(True).train())
hook = register(model, wire="fp8_e4m3", error_feedback=True)  # before the first backward pass

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.arange(4 * 32).view(4, 32) % 100 + dist.get_rank()
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, {hook.sent_bytes:,} bytes of gradients sent")
dist.destroy_process_group()
