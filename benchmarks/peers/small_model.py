"""A model of another architecture than the built-in one, with weights that have learned something.

Shape of Qwen2 (biases at q, k, v; grouped queries; SwiGLU), four layers of 256 columns over bytes, 512 positions. 256
columns are two groups of 128, the 704 of the down projection are five and a ragged one. It is trained for a few
minutes on the documents that the built-in text keeps for repair, and on the built-in code, so that calibration
and evaluation documents are new to it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bitwright.search.deal import deal_documents
from bitwright.search.documents import read_source

_STEPS = 300
_BATCH = 8
_LENGTH = 256
_LEARNING_RATE = 2e-3


def trained_model(steps: int = _STEPS) -> tuple[Any, Any]:
    """The model and its tokenizer; the same seed gives the same weights on the same machine."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    tokenizer = _bytes()
    ids = torch.tensor(tokenizer(_text())["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        starts = torch.randint(len(ids) - _LENGTH - 1, (_BATCH,))
        batch = torch.stack([ids[start : start + _LENGTH + 1] for start in starts])
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {float(loss.detach()):.3f} nats per byte", file=sys.stderr)
    return model.eval(), tokenizer


def _bytes() -> Any:
    """A tokenizer whose 256 tokens are the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _text() -> str:
    docs = read_source("docs")
    kept = deal_documents(docs, docs, 0)["repair"].documents
    return "\n\n".join(document.text for document in (*kept, *read_source("code").documents))
