"""From what a checkpoint holds to a plan for its reference: choices, tensors, and the text that it is to be proved on.

Nothing was searched, so nothing is predicted: a plan of this kind has 0 where others have predictions, says so in its
notes, and is proved by `bitwright verify`. Its budget is empty. Bytes are those of the schemes; where the checkpoint
stores the same codes in fewer (k-quants keep scales of their scales), a note says how many.
"""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from bitwright import hardware
from bitwright.export.importer import Found, Taken
from bitwright.inference import input_tensors_of, tensors_of
from bitwright.models.loaded import LoadedModel, hash_each_weight
from bitwright.plan import Budget, ModelInfo, Plan, Run, SearchOptions, SiteChoice, TextInfo
from bitwright.quantize import SCHEMES, TRANSFORMS
from bitwright.quantize.fitted import Fitted
from bitwright.quantize.rounding.stored import IMPORTED
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.spelled_scheme import spell_scheme
from bitwright.search.candidate import Candidate
from bitwright.search.draft import summary_of, weight_choice
from bitwright.search.price import AS_LOADED, price_model
from bitwright.search.progress import Progress, Silent
from bitwright.search.speaker import Speaker
from bitwright.search.text import Splits, TextSet, split_text
from bitwright.search.verify import lasting_path, vocabulary_size

#: Scale bytes that a note is worth: checkpoints store less than the plan by more than this share.
_WORTH_A_NOTE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofText:
    """What an imported plan is to be proved on: as in `optimize`, which would calibrate on the rest of it."""

    evaluation: str | Path = "docs"
    #: None: 64 sequences.
    evaluation_tokens: int | None = None
    sequence_length: int = 128
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the final text."""
        return self.evaluation_tokens if self.evaluation_tokens is not None else 64 * self.sequence_length


def plan_of(
    found: Found,
    reference: LoadedModel,
    text: ProofText | None = None,
    *,
    reference_path: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan that a checkpoint is.

    Args:
        found: of `look`, with nothing refused.
        reference: what it was read against.
        text: what the plan will be proved on.
        reference_path: where the reference lies, for later proofs; None: its name.
        progress: shows the stages.

    Raises:
        DataError: the text cannot be read or is too short.
    """
    assert not found.refused, "what was refused is raised, or left out, before"
    text = ProofText() if text is None else text
    shown = progress if progress is not None else Silent()
    splits = _cut(reference, text, shown)
    prices = price_model(reference, found.sites)
    tensors: dict[str, np.ndarray] = {}
    choices = []
    for item in found.taken:
        choices.append(_choice(item, prices.site_bytes(item.site, _candidate(item))))
        tensors |= _tensors(item)
    assignment = {item.site.name: _candidate(item) for item in found.taken}
    device, reason = hardware.detect()
    plan = Plan(
        model=ModelInfo(
            name=reference.name, hash=reference.hash, params=reference.num_parameters, notes=reference.notes
        ),
        tensor_hashes=hash_each_weight(reference.model),
        hardware=device.name,
        hardware_reason=reason,
        task="text" if reference.pooling is None else "embedding",
        budget=Budget(),
        objective="kl",
        objective_reason=f"none: imported from a {found.kind} checkpoint",
        seed=text.seed,
        options=SearchOptions(
            schemes=tuple(sorted({choice.scheme for choice in choices} - {AS_LOADED.scheme})),
            include_head=any(
                item.site.role in ("embedding", "lm_head") and assignment[item.site.name] != AS_LOADED
                for item in found.taken
            ),
            sequence_length=text.sequence_length,
            calibration_tokens=text.tokens,
            evaluation_tokens=text.tokens,
        ),
        calibration=_text_info(splits.calibrate),
        repair=_text_info(splits.repair),
        evaluation=_text_info(splits.final),
        sites=tuple(choices),
        summary=summary_of(prices, assignment, predicted_kl=0.0),
        met=False,
        notes=(
            f"imported from {found.path.name}, a {found.kind} checkpoint; nothing was predicted of it, 0 stands there: "
            "bitwright verify measures it",
            *found.notes,
            *_stored_smaller(found),
            *splits.notes,
        ),
        versions=_versions(),
    )
    lasting = {
        "model": reference.name if reference_path is None else lasting_path(reference_path),
        "calibration": lasting_path(text.evaluation),
        "evaluation": lasting_path(text.evaluation),
        "checkpoint": lasting_path(found.path),
    }
    return plan.attach(tensors=tensors, run=Run(paths=lasting))


def _cut(reference: LoadedModel, text: ProofText, progress: Progress) -> Splits:
    with progress.stage("read the text", 1) as stage:
        splits = split_text(
            reference.tokenizer,
            task="text" if reference.pooling is None else "embedding",
            calibration=text.evaluation,
            evaluation=text.evaluation,
            calibration_tokens=text.tokens,
            evaluation_tokens=text.tokens,
            sequence_length=text.sequence_length,
            seed=text.seed,
            vocabulary_size=vocabulary_size(reference),
            speaker=Speaker(
                loaded=reference, sequence_length=text.sequence_length, seed=text.seed, folder=None, progress=progress
            ),
        )
        stage.advance()
    return splits


def scheme_of_taken(item: Taken) -> Scheme | None:
    """The scheme that a site runs with; None as loaded."""
    if item.matrix is not None:
        return item.matrix.scheme
    return None if item.plain is None else SCHEMES[spell_scheme(item.plain)]


def _candidate(item: Taken) -> Candidate:
    scheme = scheme_of_taken(item)
    if scheme is None:
        return AS_LOADED
    if item.matrix is None:
        return Candidate(scheme=scheme.name)
    return Candidate(scheme=scheme.name, rounding=IMPORTED.name, transform=_transform_name(item.transform))


def _transform_name(fitted: Fitted) -> str:
    """The first transform that stores what this one does."""
    parts = frozenset(fitted.tensors())
    return next(name for name, transform in TRANSFORMS.items() if transform.parts == parts)


def _tensors(item: Taken) -> dict[str, np.ndarray]:
    if item.matrix is None:
        return {}
    name = item.site.name
    return tensors_of(name, item.matrix.q) | input_tensors_of(name, item.transform, item.matrix.input_scale)


def _choice(item: Taken, num_bytes: int) -> SiteChoice:
    site, candidate = item.site, _candidate(item)
    if item.matrix is not None:
        reason = f"in the checkpoint: {item.matrix.words}"
    elif item.plain is not None:
        reason = f"in the checkpoint: the reference's numbers in {item.plain.format}"
    else:
        reason = "in the checkpoint as the reference has it"
    return weight_choice(site, candidate, reason=reason, num_bytes=num_bytes, predicted_kl=0.0)


def _stored_smaller(found: Found) -> list[str]:
    """Kinds of matrices that the checkpoint stores in clearly fewer bytes than their scheme."""
    stored: Counter[str] = Counter()
    written_out: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for item in found.taken:
        if item.matrix is not None:
            stored[item.matrix.words] += item.matrix.stored_bytes
            written_out[item.matrix.words] += item.matrix.q.scheme.stored_bytes(*item.site.shape)
            weights[item.matrix.words] += item.site.num_weights
    return [
        f"{words} takes {8 * stored[words] / weights[words]:.2f} bits a weight in the checkpoint and "
        f"{8 * written_out[words] / weights[words]:.2f} here, where its scales are written out"
        for words in stored
        if stored[words] < (1 - _WORTH_A_NOTE) * written_out[words]
    ]


def _text_info(text: TextSet) -> TextInfo:
    return TextInfo(source=text.source, tokens=text.num_tokens, sequences=text.num_sequences, hash=text.hash)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("bitwright", "torch", "numpy", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
