"""What the modules of published models are called: the table from a module's name to its role.

Facts only, no code paths per architecture. A pattern is an anchored glob over the last dotted components of a module
name, as many as it has itself: ``parent.leaf``, or the leaf alone; the first row that matches decides. A new naming
habit is one more row here. What no row matches keeps its name and gets the role ``other``.

Sources: the modelling files of transformers 5.24 (llama, qwen2/3, gemma, mistral, phi/phi3, gpt2, gpt_neo, gpt_neox,
gptj, opt, bloom, falcon, mpt, dbrx, mixtral, qwen3_moe, gpt_oss, granitemoe; encoders: bert, roberta, electra, mpnet,
distilbert, modernbert); torch/nn/modules/transformer.py and activation.py of torch 2.13.
"""

from __future__ import annotations

from typing import NamedTuple

#: (pattern, role) of a linear layer, first match wins.
LINEAR_ROLES: tuple[tuple[str, str], ...] = (
    # attention, separate projections
    ("q_proj", "attn.q"),
    ("k_proj", "attn.k"),
    ("v_proj", "attn.v"),
    ("*attn*.query", "attn.q"),
    ("*attn*.key", "attn.k"),
    ("*attn*.value", "attn.v"),
    # attention of encoders
    ("attention.self.query", "attn.q"),
    ("attention.self.key", "attn.k"),
    ("attention.self.value", "attn.v"),
    ("attention.output.dense", "attn.out"),
    ("attention.attn.q", "attn.q"),
    ("attention.attn.k", "attn.k"),
    ("attention.attn.v", "attn.v"),
    ("attention.attn.o", "attn.out"),
    ("attention.q_lin", "attn.q"),
    ("attention.k_lin", "attn.k"),
    ("attention.v_lin", "attn.v"),
    ("attention.out_lin", "attn.out"),
    ("attn.Wo", "attn.out"),
    # attention, fused (whole matrix, unless FUSED_ROWS can say which rows are which)
    ("qkv_proj", "attn.qkv"),
    ("c_attn", "attn.qkv"),
    ("query_key_value", "attn.qkv"),
    ("Wqkv", "attn.qkv"),
    # attention output
    ("o_proj", "attn.out"),
    ("*attn*.out_proj", "attn.out"),
    ("*attn*.c_proj", "attn.out"),
    ("*attention.dense", "attn.out"),
    ("*attn.dense", "attn.out"),
    # routers of mixtures of experts; "mlp.gate" is one, "mlp.gate_proj" is not
    ("mlp.gate", "router"),
    ("block_sparse_moe.gate", "router"),
    ("*.router", "router"),
    ("router.layer", "router"),
    ("shared_expert_gate", "router"),
    # feed-forward
    ("gate_up_proj", "mlp.gate_up"),
    ("gate_proj", "mlp.gate"),
    ("up_proj", "mlp.up"),
    ("down_proj", "mlp.down"),
    ("w1", "mlp.gate"),
    ("w3", "mlp.up"),
    ("w2", "mlp.down"),
    ("mlp.c_fc", "mlp.up"),
    ("mlp.c_proj", "mlp.down"),
    ("mlp.fc_in", "mlp.up"),
    ("mlp.fc_out", "mlp.down"),
    ("fc1", "mlp.up"),
    ("fc2", "mlp.down"),
    ("dense_h_to_4h", "mlp.up"),
    ("dense_4h_to_h", "mlp.down"),
    # feed-forward of encoders
    ("intermediate.dense", "mlp.up"),
    ("output.dense", "mlp.down"),
    ("ffn.lin1", "mlp.up"),
    ("ffn.lin2", "mlp.down"),
    ("mlp.Wi", "mlp.gate_up"),
    ("mlp.Wo", "mlp.down"),
    # torch.nn.MultiheadAttention, and torch.nn.TransformerEncoderLayer around it
    ("in_proj_weight", "attn.qkv"),
    ("linear1", "mlp.up"),
    ("linear2", "mlp.down"),
)

#: (name of a 3-D parameter [experts, ., .], short name in a site, role): one site per expert.
EXPERT_PARAMETERS: tuple[tuple[str, str, str], ...] = (
    ("gate_up_proj", "gate_up", "expert.gate_up"),
    ("gate_proj", "gate", "expert.gate"),
    ("up_proj", "up", "expert.up"),
    ("down_proj", "down", "expert.down"),
)

#: Role of a linear layer that lies below a list of experts (``experts.3.w1``), by its role outside one.
EXPERT_ROLES: dict[str, str] = {
    "mlp.gate_up": "expert.gate_up",
    "mlp.gate": "expert.gate",
    "mlp.up": "expert.up",
    "mlp.down": "expert.down",
}


class Fusion(NamedTuple):
    """How the output rows of a fused matrix divide, in storage order."""

    #: Suffix of each part in the site's name.
    parts: tuple[str, ...]
    #: Role of each part.
    roles: tuple[str, ...]
    #: "heads": q has ``heads · head_dim`` rows, k and v ``kv_heads · head_dim`` each. "halves": equal parts.
    rows: str


#: Role of a whole fused matrix → how its rows divide.
FUSED_ROWS: dict[str, Fusion] = {
    "attn.qkv": Fusion(("q", "k", "v"), ("attn.q", "attn.k", "attn.v"), "heads"),
    "mlp.gate_up": Fusion(("gate", "up"), ("mlp.gate", "mlp.up"), "halves"),
    "expert.gate_up": Fusion(("gate", "up"), ("expert.gate", "expert.up"), "halves"),
}

#: ``config.model_type`` of models that interleave q, k and v head by head (or order them otherwise), so that no row
#: range is q alone: their fused matrix stays one site of role attn.qkv.
INTERLEAVED_QKV: frozenset[str] = frozenset(
    {"bloom", "codegen", "falcon", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "persimmon"}
)

#: Forward order of roles inside one decoder layer. Modules are declared in any order (Phi-3 declares o_proj first).
FORWARD_ORDER: tuple[str, ...] = (
    "attn.qkv",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.out",
    "router",
    "expert",
    "mlp.gate_up",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "other",
)
