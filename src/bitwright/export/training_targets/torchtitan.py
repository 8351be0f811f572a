"""torchtitan: `torchtitan.toml`, the sections of a job's configuration that precision decides.

    [training]                   dtype of the parameters, of products (FSDP2 or autocast), of gradients that are sent
    [model] converters           "quantize.linear.float8" or "quantize.linear.mx"
    [quantize.linear.float8]     recipe_name: one scale a tensor ("tensorwise"), E4M3 forward and E5M2 gradients
    [quantize.linear.mx]         recipe_name: "mxfp8_cublas_rceil", scales rounded up
      filter_fqns                layers that are left alone, by parts of their names

Names of layers are torchtitan's own where the model is a Llama (`layers.0.attention.wq`), else those of the plan.
Scales are those of the tensors themselves: delayed scaling is not there.

Source: pytorch/torchtitan, torchtitan/config/job_config.py (Training, Model, Quantize), docs of
components/quantization/float8.md and mxfp8.md, utils.py (filter_fqns match parts of names); job files in TOML, as its
releases up to 0.2 read them. Later versions are configured in Python with fields of the same names
(`Float8LinearConverter.Config`).
"""

from __future__ import annotations

import re

from bitwright.export.training_recipes import engine_recipe, kept_high, main_recipe, other_recipes
from bitwright.export.training_target import Written
from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.planning.planned_policy import PlannedPolicy
from bitwright.training.product_recipe import ProductRecipe

_FILE = "torchtitan.toml"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
#: Class of Transformer Engine's that a recipe is → (converter, recipe_name).
_CONVERTERS = {
    "DelayedScaling": ("quantize.linear.float8", "tensorwise"),
    "Float8CurrentScaling": ("quantize.linear.float8", "tensorwise"),
    "MXFP8BlockScaling": ("quantize.linear.mx", "mxfp8_cublas_rceil"),
}
#: Last part of a layer's name in transformers' Llama → in torchtitan's.
_LLAMA = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
_LLAMA_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class TorchTitan:
    """Writes torchtitan.toml."""

    name = "torchtitan"
    description = "torchtitan.toml: dtypes of [training], the converter of linear layers, layers left alone"
    source = "pytorch/torchtitan, torchtitan/config/job_config.py, components/quantization"

    def why_not(self, plan: TrainingPlan, planned: PlannedPolicy) -> str | None:
        """torchtitan computes in bf16 or fp32."""
        policy = planned.policy
        if policy.compute not in ("bf16", "fp32", "tf32"):
            return f"torchtitan computes in bf16 or fp32, and the plan in {policy.compute}"
        return None

    def write(self, plan: TrainingPlan, planned: PlannedPolicy) -> Written:
        """The file, and what torchtitan does otherwise."""
        main = main_recipe(planned)
        converter = None if main is None else _converter(main[0])
        sections = []
        if converter is not None:
            sections.append(f'[model]\nconverters = ["{converter[0]}"]\n')
        sections.append(_training(plan, planned))
        if converter is not None:
            left_alone = [_own_name(name) for name in kept_high(plan, planned)]
            filters = "".join(f'    "{name}",\n' for name in left_alone)
            listed = f"[\n{filters}]" if filters else "[]"
            sections.append(f'[{converter[0]}]\nrecipe_name = "{converter[1]}"\nfilter_fqns = {listed}\n')
        notes = _notes(planned, converter)
        return Written(files={_FILE: "\n".join(sections)}, notes=tuple(notes))


def _training(plan: TrainingPlan, planned: PlannedPolicy) -> str:
    policy = planned.policy
    sent = next((site.choice for site in plan.sites if site.kind == "comm.grad"), "fp32")
    return (
        "[training]\n"
        f'dtype = "{_DTYPES[policy.parameters]}"\n'
        f'mixed_precision_param = "{_DTYPES.get(policy.compute, "float32")}"\n'
        f'mixed_precision_reduce = "{_DTYPES[sent]}"\n'
    )


def _converter(recipe: ProductRecipe) -> tuple[str, str] | None:
    found = engine_recipe(recipe)
    return None if found is None else _CONVERTERS.get(found.class_name)


def _own_name(name: str) -> str:
    """A layer's name in torchtitan's Llama; what is none of its layers keeps its name."""
    if name == "lm_head":
        return "output"
    found = _LLAMA_LAYER.fullmatch(name)
    own = None if found is None else _LLAMA.get(found.group(2))
    return name if found is None or own is None else f"layers.{found.group(1)}.{own}"


def _notes(planned: PlannedPolicy, converter: tuple[str, str] | None) -> list[str]:
    main = main_recipe(planned)
    notes = []
    if main is not None and converter is None:
        notes.append(
            f"{len(main[1])} layers run in {planned.policy.compute}: torchtitan has no converter for their recipe"
        )
    if main is not None and converter is not None and main[0].forward_x.delay is not None:
        notes.append("scales are those of the tensors themselves: torchtitan has no delayed scaling")
    others = other_recipes(planned)
    if others and converter is not None:
        notes.append(f"{others} layers are planned under another recipe, and a job has one: they run under this one")
    if planned.policy.compute == "tf32":
        notes.append('tf32 is torch.set_float32_matmul_precision("high"); torchtitan has no key for it')
    if planned.policy.parameters != "fp32":
        notes.append("bf16 parameters are updated by rounding to nearest there; the plan rounds stochastically")
    return notes


TRAINING_TARGETS = (TorchTitan(),)
