"""Models whose sizes are known by name: one TOML file a model in `model_shapes/`; the folder is the list.

name = "llama-7b"
num_layers = 32
…                       # as the model's config.json has them
published_parameters    # what its makers say; a test holds the count from the sizes against it
source, certainty       # where the sizes can be looked up; "read" there, or "recalled"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from bitwright.catalog import FileCatalog
from bitwright.errors import HardwareError
from bitwright.fact_file import parse_facts
from bitwright.hardware.device import Certainty
from bitwright.hardware.model_shape import Biases, ModelShape, Norm, shape_from_sizes

_Count = Annotated[int, Field(gt=0)]
_Text = Annotated[str, Field(min_length=1)]


class _ShapeFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    aliases: list[_Text] = []
    num_layers: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_heads: _Count
    num_kv_heads: _Count | None = None
    head_dim: _Count | None = None
    vocab_size: _Count
    is_gated: bool
    norm: Norm
    biases: Biases = "none"
    num_positions: Annotated[int, Field(ge=0)] = 0
    trained_positions: _Count | None = None
    is_head_tied: bool = False
    num_experts: _Count = 1
    experts_per_token: _Count = 1
    published_parameters: _Count
    source: _Text
    certainty: Certainty


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A model known by its name."""

    name: str
    aliases: tuple[str, ...]
    shape: ModelShape
    published_parameters: int
    source: str
    certainty: Certainty


def parse_model(content: bytes, file: str) -> KnownModel:
    """Return the model of a file's content; `file` is what errors call it.

    Raises:
        HardwareError: no TOML, or a field is missing, unknown or impossible.
    """
    fields = parse_facts(content, file, _ShapeFile, kind="model", error=HardwareError)
    sizes = fields.model_dump(exclude={"aliases", "published_parameters", "source", "certainty"})
    return KnownModel(
        name=fields.name,
        aliases=tuple(alias.lower() for alias in fields.aliases),
        shape=shape_from_sizes(**sizes),
        published_parameters=fields.published_parameters,
        source=fields.source,
        certainty=fields.certainty,
    )


#: Every model that is known by name.
KNOWN_MODELS: FileCatalog[KnownModel] = FileCatalog(
    kind="model",
    package="bitwright.hardware",
    folder="model_shapes",
    read=parse_model,
    aliases=lambda model: model.aliases,
    error=HardwareError,
)
