import torch
from torch import nn
from transformers import AutoTokenizer

import bitwright
from bitwright.inference import apply
from bitwright.models import plain_model


class Mixer(nn.Module):
    """Logits of the next token from the mean of the tokens so far."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(1, ids.shape[1] + 1).unsqueeze(-1)
        return self.down_proj(torch.tanh(self.up_proj(self.embed(ids).cumsum(1) / counts)))


tokenizer = AutoTokenizer.from_pretrained("my-model")
model = plain_model(Mixer(len(tokenizer), 64), tokenizer=tokenizer)
plan = bitwright.optimize(model, calibration="my-text.txt", evaluation="my-text.txt")
print(plan.summary.effective_bits, "bits per weight, KL", plan.measured.kl.mean)
runs = apply(plan, model)  # a copy that runs as planned; an ExportedProgram is taken and given back too
