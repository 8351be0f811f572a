"""Low-rank adapters on a frozen base: y = W x + (alpha / rank) · B A x, with W in few bits and only A and B trained.

    base        fp32, bf16, fp16: numbers; any scheme of weights alone (int4_g128, fp8_w, nf4 …): packed codes, which
                kernels expand as they multiply (`inference/packed`)
    adapters    fp32, or bf16 for update rules that lose nothing (stochastic rounding, Kahan)

peft makes and saves the adapters. Gradients pass through the values of the codes, which are expanded matrix by matrix
in the backward pass; no gradient, moment or master of the base exists. What is not a linear layer of the decoder
(embedding, norms, head) is kept in bf16 under codes, and in the base's own format without. Products with codes are in
the dtype that autocast computes in, as those of any linear layer.

The model that is given becomes the base, in place: a second copy of it is what adapters are there to avoid.

Sources: E. Hu et al., "LoRA", arXiv:2106.09685, section 4.1. T. Dettmers et al., "QLoRA", arXiv:2305.14314, section 3:
a frozen base in 4 bits, adapters in 16 or 32 on all linear layers.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bitwright import formats
from bitwright.errors import MissingExtra, TrainingError
from bitwright.inference.packed.input_rounding import InputRounding
from bitwright.inference.packed.modules import PackedLinear, raise_if_planned
from bitwright.inference.packed.rows import packed_rows
from bitwright.inference.packed.weight import PackedWeight
from bitwright.models.quiet import quiet_transformers
from bitwright.models.sites import Site, find_sites
from bitwright.quantize.catalogs import SCHEMES
from bitwright.quantize.fitted import UNCHANGED
from bitwright.quantize.pack import pack_codes, stored_dtype
from bitwright.quantize.packed_matmul import MatmulSelection, select_matmul
from bitwright.quantize.quantize import quantize
from bitwright.quantize.scheme import Scheme, TensorScheme

#: Formats that adapters are kept in.
ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: What everything beside codes is in.
_BESIDE_CODES = torch.bfloat16
#: Roles whose layers get no adapter: ends of the model, and what decides rather than computes.
_WITHOUT_ADAPTER = frozenset({"embedding", "lm_head", "router"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """What adapters are like, and what they stand on.

    Raises:
        TrainingError: a rank, an alpha or a dropout that cannot be, a base that is no name, or an unknown format of
            adapters.
    """

    rank: int = 16
    #: The adapter's output is multiplied by alpha / rank; None: twice the rank, so by 2.
    alpha: float | None = None
    dropout: float = 0.0
    #: A scheme of weights.
    base: str = "bf16"
    #: fp32 or bf16.
    adapters: str = "fp32"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, numbers.Integral) or isinstance(self.rank, bool) or self.rank < 1:
            raise TrainingError(
                f"adapters of rank {self.rank!r}; a rank is a whole number of at least 1, and 8 to 64 are common"
            )
        if self.alpha is not None and not (_is_finite(self.alpha) and self.alpha > 0):
            raise TrainingError(
                f"alpha is {self.alpha!r}; what adapters add is multiplied by alpha / rank: give a positive number, or "
                "None for twice the rank"
            )
        if not (_is_finite(self.dropout) and 0 <= self.dropout < 1):
            raise TrainingError(f"a dropout of {self.dropout!r} before adapters; give a share, 0 up to below 1")
        if not isinstance(self.base, str):
            raise TrainingError(
                f"base is {self.base!r}; give the name of a scheme of weights: bf16, fp8_w, int4_g128, …"
            )
        if not isinstance(self.adapters, str) or self.adapters not in ADAPTER_DTYPES:
            raise TrainingError(
                f"adapters in {self.adapters!r}; keep them in fp32, or in bf16 under an update rule that loses nothing "
                "(policy bf16-pure-sr or bf16-pure-kahan)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSizes:
    """What a model with adapters holds, in numbers and in bytes."""

    adapter_parameters: int
    adapter_bytes: int
    base_bytes: int
    #: Matrices that lie as packed codes.
    packed_matrices: int


def add_lora(model: nn.Module, settings: LoraSettings | None = None, **changes: Any) -> nn.Module:
    """Give a model adapters on every linear layer of its decoder, and freeze the rest in the base's format.

        model = add_lora(models.load("demo").model, rank=16, base="int4_g128")

    Args:
        model: a causal language model with numbers as weights, fp32 where it is to be quantised. It becomes the base.
        settings: rank, base, formats.
        changes: fields of `LoraSettings`, in place of those.

    Returns:
        peft's model around it; `prepare` takes it like any other, and `save_pretrained` writes the adapters alone.

    Raises:
        MissingExtra: peft is not installed.
        TrainingError: adapters are there already, settings that cannot be, or a scheme that rounds activations or does
            not fit a layer.
        UnknownName: no scheme has that name.
        ModelError: nothing in the model is linear, or it holds codes already.
    """
    settings = _settled(settings, changes)
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise MissingExtra("peft", "train", "adding adapters") from error
    if not isinstance(model, nn.Module):
        raise TrainingError(f"model is {model!r}; give a causal language model, a torch.nn.Module")
    raise_if_planned(model)
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise TrainingError(
            "the model has adapters already; train those, or put them into its weights first: model = "
            "model.merge_and_unload()"
        )
    sites = _adapted(find_sites(model))
    scheme = SCHEMES[settings.base]
    weights = _weights_of(scheme)
    modules = _modules_of(model, sites)
    plain = stored_dtype(formats.FORMATS[weights.format]) if weights.scaling is None else None
    layouts = {} if plain is not None else _layouts(modules, weights)
    # everything that can be refused is refused by now
    model.requires_grad_(False)
    for name, selection in layouts.items():
        _put(model, name, _packed_linear(modules[name], weights, selection))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(_BESIDE_CODES if plain is None else plain)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank if settings.alpha is None else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=sorted(modules),
        fan_in_fan_out=any(not isinstance(model.get_submodule(name), nn.Linear) for name in modules),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with quiet_transformers():  # peft asks it for an attribute by its old name
        adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(ADAPTER_DTYPES[settings.adapters])
    return adapted


def lora_sizes(model: nn.Module) -> LoraSizes:
    """Return what a model with adapters holds."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    packed = [module for module in model.modules() if isinstance(module, PackedWeight)]
    return LoraSizes(
        adapter_parameters=sum(parameter.numel() for parameter in trained),
        adapter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        base_bytes=sum(parameter.numel() * parameter.element_size() for parameter in frozen)
        + sum(weight.nbytes() for weight in packed),
        packed_matrices=len(packed),
    )


class FrozenLinear(PackedLinear):
    """A linear layer in codes under adapters: autocast decides its dtype, as it does for torch's own.

    Without, a base in bf16 would give bf16 to functions that autocast runs in fp16, and they refuse both together.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(device_type))
        return super().forward(input)


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _settled(settings: LoraSettings | None, changes: dict[str, Any]) -> LoraSettings:
    return replace(LoraSettings() if settings is None else settings, **changes)


def _adapted(sites: Sequence[Site]) -> list[Site]:
    """Sites of linear layers of the decoder; experts in one parameter have no layers of their own."""
    found = [site for site in sites if site.role not in _WITHOUT_ADAPTER and site.expert is None]
    if not found:
        raise TrainingError(
            "the model has no linear layer of its own to put adapters on; it cannot be adapted this way"
        )
    return found


def _weights_of(scheme: Scheme) -> TensorScheme:
    if scheme.weights is None or (scheme.activations is not None and scheme.activations.scaling is not None):
        what = "stay as it is" if scheme.weights is None else "round activations too"
        raise TrainingError(
            f"a base in '{scheme.name}' would {what}; "
            "adapters stand on rounded weights alone: bf16, fp8_w, int4_g128, …"
        )
    return scheme.weights


def _modules_of(model: nn.Module, sites: Sequence[Site]) -> dict[str, nn.Module]:
    """Name → linear module; parts of a fused matrix are one."""
    return {site.module: model.get_submodule(site.module) for site in sites}


def _layouts(modules: dict[str, nn.Module], weights: TensorScheme) -> dict[str, MatmulSelection]:
    """Module → layout of its codes; refuses whatever has none."""
    found = {}
    for name, module in modules.items():
        weight = _weight_NK(module)
        rows, columns = weight.shape
        found[name] = select_matmul(weights, (rows, columns), weight.device.type, _BESIDE_CODES)
    return found


def _weight_NK(module: nn.Module) -> torch.Tensor:
    """The matrix as [out, in]: transformers' Conv1D stores the other way round."""
    weight = module.get_parameter("weight").data
    return weight if isinstance(module, nn.Linear) else weight.T


def _packed_linear(module: nn.Module, weights: TensorScheme, selection: MatmulSelection) -> FrozenLinear:
    weight = _weight_NK(module)
    q = quantize(weight.float().contiguous(), weights)
    rows = packed_rows(selection.layout.prepare(pack_codes(q)), _BESIDE_CODES, weight.device.type)
    packed = PackedWeight([rows], [InputRounding(UNCHANGED, None, None)], None, _BESIDE_CODES)
    return FrozenLinear(packed, module._parameters.get("bias"))


def _put(model: nn.Module, name: str, replacement: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    replacement.training = model.training
    setattr(model.get_submodule(parent), own, replacement)
