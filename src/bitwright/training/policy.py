"""A training policy is data: in which format everything of a step is computed, kept and added up.

    compute      what autocast runs products in; fp32: no autocast
    products     whether linear layers multiply codes of fewer bits, and under which recipe (`product_recipe.py`)
    parameters   what the model's own parameters are: "fp32", they are the masters, or "bf16"
    update       how the optimizer's result is stored in them (`updates/`)
    moments      how the optimizer's moments are kept between steps
    gradients    how the gradients of micro-batches are added up, and clipped
    uses         how those of one weight's uses in a forward pass are: in `compute`, as autocast does, or in fp32
    loss_scale   the state machine that keeps fp16 gradients above its smallest number (`loss_scale.py`)

fp32 parameters are the masters, as with torch.autocast: no second copy of a weight exists, and `bf16-mixed` is bit for
bit what torch does. One file of `policies/` is one policy; its aliases are what other libraries call it. Nothing
branches on a name: devices are asked for the formats that follow from the fields (`choose.py`).

Rejected: fp16 parameters. Their gradients cannot be unscaled without being rounded again, and their updates vanish as
bf16's do; whoever wants 16-bit parameters has bf16-pure-sr and bf16-pure-kahan.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.catalog import Catalog, nearest_name_hint
from bitwright.errors import TrainingError, UnknownName
from bitwright.training.loss_scale import LossScaleRule
from bitwright.training.product_recipe import ProductRecipe

#: What `prepare` is asked for where the device decides; no policy.
AUTO = "auto"

_ALLOWED: dict[str, tuple[str, ...]] = {
    "compute": ("fp32", "tf32", "fp16", "bf16"),
    "parameters": ("fp32", "bf16"),
    "moments": ("fp32", "bf16", "fp16"),
    "gradients": ("fp32", "bf16"),
    "uses": ("compute", "fp32"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptHigh:
    """A role whose products are computed in the policy's `compute`, whatever its recipe."""

    #: A role of `models.find_sites`: "lm_head", "router", "embedding", …
    role: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """In which format everything of a training step happens.

    Raises:
        TrainingError: a format that the field cannot have, or fields that contradict each other.
    """

    name: str
    #: One line, for lists.
    description: str
    #: Where the combination can be looked up.
    source: str
    #: What other libraries call it.
    aliases: tuple[str, ...] = ()
    #: Format of products and activations outside the islands: fp32, tf32, fp16 or bf16.
    compute: str
    #: Products of codes in linear layers; None: all products are in `compute`.
    products: ProductRecipe | None = None
    #: Format of the model's own trainable parameters: fp32 (they are the masters) or bf16. Norms, routers and tables of
    #: positions stay fp32 in any case.
    parameters: str = "fp32"
    #: A name in `updates.UPDATES`: how the optimizer's result is stored in the parameters.
    update: str = "fp32"
    #: How the optimizer's moments are kept between steps: fp32, bf16, or fp16 under a scale per tensor.
    moments: str = "fp32"
    #: Format in which the gradients of micro-batches are added up.
    gradients: str = "fp32"
    #: Format in which the gradients of one fp32 weight are added up that a forward pass uses many times (a loss in
    #: chunks, a layer in a loop): "compute", autocast's own; or "fp32", which casts the weight for each use anew.
    uses: str = "compute"
    #: None: the loss is not scaled.
    loss_scale: LossScaleRule | None = None
    #: Roles that the recipe leaves alone; empty where there is no recipe.
    kept: tuple[KeptHigh, ...] = ()
    #: Share of the decoder's layers, counted from the last one, that the recipe leaves alone too.
    last_layers_high: float = 0.0
    #: Where "auto" looks first: the highest that the device runs natively. None: only by name.
    preference: int | None = None

    def __post_init__(self) -> None:
        for field, allowed in _ALLOWED.items():
            value = getattr(self, field)
            if value not in allowed:
                raise TrainingError(f"policy '{self.name}' has {field} {value!r}; use one of {', '.join(allowed)}")
        if (self.parameters == "fp32") != (self.update == "fp32"):
            raise TrainingError(
                f"policy '{self.name}' stores {self.parameters} parameters by update rule '{self.update}'; rule 'fp32' "
                "goes with fp32 parameters, every other rule with bf16 ones"
            )
        if self.products is None and (self.kept or self.last_layers_high):
            raise TrainingError(
                f"policy '{self.name}' keeps sites out of a recipe that it does not have; leave them out"
            )
        if not 0 <= self.last_layers_high <= 1:
            raise TrainingError(
                f"policy '{self.name}' keeps {self.last_layers_high} of the layers; give a share, 0 to 1"
            )

    @property
    def keep_high(self) -> tuple[str, ...]:
        """Roles whose products are never those of the recipe."""
        return tuple(kept.role for kept in self.kept)

    @property
    def product_formats(self) -> tuple[str, ...]:
        """Formats of the operands of the recipe, each once; empty without one."""
        if self.products is None:
            return ()
        return tuple(dict.fromkeys(rule.scheme.format for rule in self.products.operands.values()))

    @property
    def format_of_uses(self) -> str:
        """Format in which the gradients of a weight's uses are added up outside of the recipe, which adds in fp32."""
        is_cast = self.compute in ("fp16", "bf16") and self.parameters == "fp32" and self.uses == "compute"
        return self.compute if is_cast else self.gradients

    @property
    def level(self) -> str:
        """What most products are computed in: "bf16", or "fp8_e4m3/fp8_e5m2"."""
        return "/".join(self.product_formats) or self.compute


def _by_alias(name: str) -> Policy | None:
    return next((policy for policy in POLICIES.values() if name in policy.aliases), None)


#: Every policy by its name, and by what other libraries call it.
POLICIES: Catalog[Policy] = Catalog(
    kind="policy", package="bitwright.training.policies", attribute="POLICIES", record_type=Policy, spelled=_by_alias
)


def policy_named(name: str) -> Policy:
    """Return a policy by its name or an alias; case does not matter.

    Raises:
        UnknownName: no policy has that name; the nearest one is suggested. "auto" is none: `choose.py` makes it one.
    """
    written = name.strip().lower()
    if written in POLICIES:
        return POLICIES[written]
    aliases = [alias for policy in POLICIES.values() for alias in policy.aliases]
    hint = nearest_name_hint(written, [AUTO, *POLICIES, *aliases])
    raise UnknownName(f"unknown policy {name!r}{hint} Known policies: {', '.join((AUTO, *POLICIES))}")
