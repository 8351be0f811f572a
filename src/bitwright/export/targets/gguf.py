"""GGUF: one file that llama.cpp runs, each tensor under the nearest of ggml's types.

    model.gguf             weights, sizes, tokenizer
    gguf_tensors.json      for every tensor: type, how the plan's weight got there, relative error

ggml has types of its own, not schemes: where one can hold a plan's codes and scales it holds exactly them, and where
none can the nearest is taken and its difference measured (`gguf_types.py`). So no scheme of weights is refused; what is
refused is what a file of weights cannot say, inputs under scales. llama.cpp multiplies quantised weights with inputs in
8 bits of its own (Q8_0, Q8_1, Q8_K), whatever the plan. Column factors go into norms where they can (`folding.py`); a
matrix under any other transform is rounded again in its own space.

The rows of q and k are put into the order that ggml's rotary embedding expects, with their scales. Tied embeddings are
stored once.

Source: docs/gguf.md of ggml; see `gguf_metadata.py` and `gguf_vocabulary.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright.export.folding import Folding, fold_factors
from bitwright.export.gguf_codes import GGUF_CODES
from bitwright.export.gguf_metadata import (
    architecture_of,
    layout_of,
    metadata_of,
    rotary_factors,
    why_not_architecture,
)
from bitwright.export.gguf_types import Encoded, encode_coded, encode_plain, encode_values
from bitwright.export.gguf_vocabulary import Vocabulary, read_vocabulary, why_not_vocabulary
from bitwright.export.site_names import spell_sites
from bitwright.export.source import ExportSource, SiteWeight
from bitwright.models.gguf_layout import GgufLayout
from bitwright.plan import Plan, SiteChoice
from bitwright.plan.engine import get_engine
from bitwright.plan.engine_rules import engine_value_reason
from bitwright.quantize.granularity import group
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scheme, TensorScheme
from bitwright.quantize.value_scheme import ValueScheme

FILE = "model.gguf"
REPORT_FILE = "gguf_tensors.json"
_LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True, slots=True)
class Gguf:
    """Writes .gguf files."""

    name: str = "gguf"
    description: str = (
        "a GGUF file for llama.cpp: codes exactly where a type of ggml's holds them, else the nearest type"
    )
    #: No engine's rules: what a type cannot hold is not refused here but rounded again, and told.
    engines: tuple[str, ...] = ()
    loaded_by: tuple[str, ...] = (_LLAMA_CPP,)
    keeps_caches: bool = True

    def why_not(self, choice: SiteChoice, scheme: Scheme | ValueScheme) -> str | None:
        """Inputs under scales, and values that llama.cpp does not keep so."""
        if isinstance(scheme, ValueScheme):
            return engine_value_reason(choice, scheme, get_engine(_LLAMA_CPP))
        if scheme.activations is not None and scheme.activations.scaling is not None:
            return f"llama.cpp rounds inputs in its own way, and not to {scheme.activations}"
        return None

    def why_not_plan(self, plan: Plan) -> str | None:
        """Nothing: types are chosen tensor by tensor."""
        return None

    def why_not_model(self, source: ExportSource) -> Mapping[str, str]:
        """Architectures and tokenizers that llama.cpp does not have, or that are not written."""
        reason = why_not_architecture(source.model) or why_not_vocabulary(source.loaded.tokenizer)
        return {} if reason is None else {choice.name: reason for choice in source.plan.sites}

    def write(self, source: ExportSource, folder: Path) -> tuple[str, ...]:
        """Write the file, and what became of each tensor; notes tell it type by type."""
        tensors = _Tensors(source=source, folding=fold_factors(source))
        written: dict[str, dict[str, Any]] = {}
        with _open_writer(source, folder / FILE) as writer:
            for name, parameter in tensors.layout.parameter_of.items():
                encoded = tensors.encode(name, parameter)
                _add(writer, name, encoded)
                written[name] = {"type": encoded.type, "how": encoded.words, "relative_error": round(encoded.error, 9)}
                if parameter in tensors.sites:
                    written[name]["site"] = tensors.sites[parameter].site.name
            factors = rotary_factors(source.model)
            if factors is not None:
                _add(writer, "rope_freqs.weight", encode_plain(factors, torch.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        (folder / REPORT_FILE).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        return (*_type_notes(written), *_cache_notes(source))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tensors:
    """A model's parameters as tensors of a file."""

    source: ExportSource
    folding: Folding

    @cached_property
    def layout(self) -> GgufLayout:
        """Names and rows."""
        return layout_of(self.source.model)

    @cached_property
    def sites(self) -> Mapping[str, SiteWeight]:
        """Parameter → its site."""
        return {site.parameter: self.source.weight(site) for site in self.source.sites}

    def encode(self, name: str, parameter: str) -> Encoded:
        """A parameter under the type that it takes."""
        weight = self.sites.get(parameter)
        if weight is None:
            values = self.folding.parameters.get(parameter, self.source.model.get_parameter(parameter).detach())
            rows = self._rows(name, values)
            return encode_plain(values[rows], torch.float32)
        if weight.has_codes:
            return self._encode_codes(weight, self._rows(name, weight.loaded_NK))
        values = weight.values()[self._rows(name, weight.loaded_NK)]
        scheme = weight.tensor_scheme
        dtype = self.source.dtype if scheme is None else _DTYPES[scheme.format]
        loaded = self.source.loaded.loaded_format.get(parameter) if scheme is None else None
        return encode_plain(values, dtype, loaded)

    def _encode_codes(self, weight: SiteWeight, rows: Tensor) -> Encoded:
        folded = weight.transform.is_identity or (
            weight.transform.signs_K is None and weight.site.name not in self.folding.refused
        )
        if folded:
            q = _take_rows(weight.codes(), rows)
            return encode_coded(q, q.dequantize())
        scheme = weight.tensor_scheme
        assert scheme is not None
        return encode_values(
            weight.values()[rows], 8 * scheme.stored_bytes(*weight.site.shape) / weight.site.num_weights
        )

    def _rows(self, name: str, values: Tensor) -> Tensor:
        """For each row of the stored tensor, the row of the parameter."""
        of_parameter = self.layout.rows_of(name, values.shape[0])
        assert of_parameter is not None, f"{name}: rows of these architectures only change their order"
        return torch.from_numpy(np.argsort(of_parameter))


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _take_rows(q: QTensor, rows: Tensor) -> QTensor:
    """Codes with their rows in another order, each with its scales."""
    assert q.scales_NG is not None
    scaling = q.scheme.scaling
    assert scaling is not None
    if torch.equal(rows, torch.arange(len(rows))):
        return q
    own = q.scales_NG.shape[0] == len(rows)
    if not own and scaling.granularity.scope == "block":
        # a block's scale reaches over rows that part company: each row takes it along
        height = scaling.granularity.group_rows(len(rows))
        spread = replace(q, scales_NG=q.scales_NG.repeat_interleave(height, 0)[: len(rows)])
        return _take_rows(_in_groups(spread), rows)
    return replace(
        q,
        codes_NK=q.codes_NK[rows],
        scales_NG=q.scales_NG[rows] if own else q.scales_NG,
        offsets_NG=q.offsets_NG[rows] if own and q.offsets_NG is not None else q.offsets_NG,
    )


def _in_groups(q: QTensor) -> QTensor:
    """A matrix of blocks whose rows have a scale each, as one of groups."""
    scaling = q.scheme.scaling
    assert scaling is not None
    groups = replace(scaling, granularity=group(scaling.granularity.group_size))
    return replace(q, scheme=replace(q.scheme, scaling=groups))


def _add(writer: Any, name: str, encoded: Encoded) -> None:
    from gguf import GGMLQuantizationType

    writer.add_tensor(name, np.ascontiguousarray(encoded.data), raw_dtype=GGMLQuantizationType[encoded.type.upper()])


@contextmanager
def _open_writer(source: ExportSource, path: Path) -> Iterator[Any]:
    """The file with everything but its tensors; closed, with what the writer keeps aside, however the block ends."""
    import gguf

    record = architecture_of(source.model.config)
    assert record is not None
    writer = gguf.GGUFWriter(path, record.name, use_temp_file=True)
    try:
        _add_metadata(writer, source)
        yield writer
    finally:
        if writer.temp_file is not None:
            writer.temp_file.close()
        writer.close()


def _add_metadata(writer: Any, source: ExportSource) -> None:
    import gguf

    writer.add_type("model")
    writer.add_name(source.loaded.name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata_of(source.model).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    embedding: Any = source.model.get_input_embeddings()  # type: ignore[operator]
    _add_vocabulary(writer, read_vocabulary(source.loaded.tokenizer, embedding.weight.shape[0]))


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.splitter)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.kinds))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    for key, number in vocabulary.special_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    writer.add_add_space_prefix(vocabulary.adds_space)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _type_notes(written: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """One sentence a type and way that weights took, with the sites and the error."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in written.values():
        if "site" in item:
            grouped.setdefault((item["type"], item["how"]), []).append(item)
    notes = []
    for (kind, how), items in grouped.items():
        error = max(item["relative_error"] for item in items)
        far = f", up to {error:.2g} of the weights off" if error else ", exactly"
        notes.append(f"{kind.upper()} holds {how}{far}: {spell_sites(item['site'] for item in items)}")
    return tuple(notes)


def _cache_notes(source: ExportSource) -> tuple[str, ...]:
    """What to tell llama.cpp of caches, which are no part of a file."""
    kept = {site.name: rule.scheme.values for site, rule in source.values.items() if site.role == "kv_cache"}
    types = {name: _cache_type(values) for name, values in kept.items()}
    parts: dict[str, set[str]] = {"k": set(), "v": set()}
    for name, kind in types.items():
        parts["k" if name.endswith("k_cache") else "v"].add(kind)
    options = [f"--cache-type-{part} {kind}" for part, kinds in parts.items() for kind in sorted(kinds)]
    return (f"the plan's caches are no part of the file: run llama.cpp with {' '.join(options)}",) if options else ()


def _cache_type(values: TensorScheme) -> str:
    """ggml's name of what a cache is kept in."""
    if values.scaling is None:
        return {"fp32": "f32", "fp16": "f16"}.get(values.format, values.format)
    has_minimum = values.scaling.symmetry == "minimum"
    own = (kind for kind in GGUF_CODES.values() if (kind.number, kind.has_minimum) == (values.format, has_minimum))
    return next(kind.name for kind in own if kind.block_size == values.scaling.granularity.group_size)


EXPORTERS = (Gguf(),)
