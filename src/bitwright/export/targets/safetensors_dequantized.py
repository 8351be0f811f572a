"""Plain weights that have the values of their codes: whatever loads the model loads this, and nothing is smaller.

For trying a plan's weights in a tool that knows no quantiser, and for evaluating them there. Inputs, caches and other
values that the plan rounds are rounded by nobody then; where a transform changes inputs, the weight is the one of the
unchanged inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bitwright.export.source import ExportSource
from bitwright.export.written_folder import ShardWriter, as_stored, write_model_files
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import SCHEMES
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.value_scheme import ValueScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsDequantized:
    """See the opening of this file."""

    name: str = "safetensors-dequantized"
    description: str = "a plain model folder whose weights have the values of their codes; nothing is smaller"
    engines: tuple[str, ...] = ()
    loaded_by: tuple[str, ...] = ("transformers", "vllm", "tensorrt-llm")
    keeps_caches: bool = False

    def why_not(self, choice: SiteChoice, scheme: Scheme | ValueScheme) -> str | None:
        """Every weight can be written."""
        return None

    def why_not_plan(self, plan: Plan) -> str | None:
        """Every plan can be written."""
        return None

    def why_not_model(self, source: ExportSource) -> Mapping[str, str]:
        """Every parameter can be written."""
        return {}

    def write(self, source: ExportSource, folder: Path) -> tuple[str, ...]:
        """See `Exporter`."""
        coded = {site.parameter for site in source.coded_sites()}
        with ShardWriter(folder) as shards:
            for name, tensor in source.rest():
                for stored, value in as_stored(source.model, name, tensor).items():
                    shards.add(stored, value)
            for name in sorted(coded):
                values = source.parameter_values(name).to(source.dtype)
                for stored, value in as_stored(source.model, name, values).items():
                    shards.add(stored, value)
        return (*write_model_files(source, folder), *_notes(source))


def _notes(source: ExportSource) -> tuple[str, ...]:
    rounded = [
        choice.name
        for choice in source.plan.sites
        if (choice.kind == "weight" and SCHEMES[choice.scheme].activations is not None)
        or (choice.kind != "weight" and choice.scheme != "as_loaded")
    ]
    if not rounded:
        return ()
    return (f"inputs and values are not rounded by what loads it, and the plan rounds them at {len(rounded)} sites",)


EXPORTERS = (SafetensorsDequantized(),)
