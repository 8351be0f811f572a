"""What `bitwright train CONFIG.toml` is told: one TOML file, checked whole before anything is loaded.

    model = "path/to/folder"          # or a hub id, a .gguf file, demo
    out = "my-run"                    # a folder of its own
    policy = "bf16-mixed"             # default: auto

    steps = 1000
    batch = 8                         # sequences in a micro-batch of one process
    accumulate = 4                    # micro-batches in a step
    max_grad_norm = 1.0

    [data]
    train = "corpus.jsonl"
    validation = "held-out.jsonl"     # or validation_share = 0.05 of the documents of train
    sequence_length = 512

    [optimizer]
    name = "adamw"                    # any of torch.optim, with its own options
    lr = 2e-5

    [schedule]
    kind = "cosine"
    warmup_steps = 50

Everything else has a default; `TrainConfig` is the whole list. A key that does not exist is an error with the nearest
one that does. What decides the run (all but `out`, and when things are saved and measured) is compared when a run is
gone on with.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bitwright.catalog import nearest_name_hint
from bitwright.errors import TrainingError

_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=1)]
_Natural = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    #: strict: no text and no boolean becomes a number, nothing but a boolean becomes one; integers are numbers.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(_Section):
    """Text to learn from, and text to measure on."""

    #: A .txt, .jsonl or .parquet file, or a built-in set (docs, code).
    train: _Text
    #: Text to measure on, of the same kinds; never trained on; None: a share of the documents of `train` is kept back.
    validation: _Text | None = None
    #: Share of the characters of `train` that is kept back where there is no `validation`; 0: nothing is measured.
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    #: text: every token counts; chat: conversations, the assistant's tokens count.
    task: _Text = "text"
    #: Tokens in a sequence.
    sequence_length: Annotated[int, Field(ge=2)] = 512


class OptimizerConfig(BaseModel):
    """A class of torch.optim by its name in lower case; further keys are its own options.

    Types of those are looked up at torch (`optimizers.py`), which this file does not load.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    #: A class of torch.optim in lower case; further keys of the section are its own options (`weight_decay`, `betas`).
    name: _Text = "adamw"
    #: Learning rate, the largest of the schedule.
    lr: _Positive

    @property
    def options(self) -> dict[str, Any]:
        """What the class is made with."""
        return {"lr": self.lr, **(self.model_extra or {})}


class ScheduleConfig(_Section):
    """The learning rate over the steps: up in a straight line, then as `kind` says."""

    #: Course of the learning rate after the warm-up: constant, linear or cosine.
    kind: _Text = "cosine"
    #: Steps until the learning rate is reached.
    warmup_steps: _Natural = 0
    #: Share of the learning rate that is left at the last step.
    final_share: _Share = 0.1


class CheckpointConfig(_Section):
    """When the run is saved; at its end always."""

    #: Steps between two checkpoints; None: only at the end.
    every_steps: _Count | None = None
    #: How many are kept, the newest.
    keep: _Count = 2


class EvaluationConfig(_Section):
    """When the loss on validation text is measured; at the end always."""

    #: Steps between two measurements; None: only at the end.
    every_steps: _Count | None = None
    #: Sequences that are measured, the first ones; None (from Python alone) measures all.
    max_sequences: _Count | None = 256
    #: Sequences at once; None: as many as `batch`.
    batch: _Count | None = None


class LoraConfig(_Section):
    """Adapters of low rank beside frozen weights; the fields of `lora.LoraSettings`."""

    #: Columns of one factor and rows of the other.
    rank: _Count = 16
    #: What their product is multiplied by, over the rank; None: twice the rank.
    alpha: _Positive | None = None
    #: Share of an adapter's inputs that is set to zero while it trains.
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    #: What the frozen weights are kept in: a scheme of weights.
    base: _Text = "bf16"
    #: What the adapters are kept in: fp32 or bf16.
    adapters: _Text = "fp32"


class CommunicationConfig(_Section):
    """How gradients travel between processes that each hold the whole model; `comms/hooks.py` has the exchange."""

    #: A format of the wire: fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, int8.
    wire: _Text
    #: Whether what rounding lost is added to the next gradient; it takes a second fp32 copy of all gradients.
    error_feedback: bool = False


class TrainConfig(_Section):
    """A whole run. See the opening of this file."""

    #: A folder, a hub id, a .gguf file, or demo.
    model: _Text
    #: Folder for metrics, checkpoints and the trained model.
    out: _Text
    #: A policy's name, auto, or a plan folder of `bitwright train plan`.
    policy: _Text = "auto"
    #: Round operands as formats would that the device lacks; None: only on a processor, where that is said.
    emulate: bool | None = None
    #: auto: the first GPU, or of many processes each its own; else the processor.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: Of the order of the data and of everything that draws.
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    #: Optimizer steps in all.
    steps: _Count
    #: Sequences in a micro-batch of one process.
    batch: _Count = 8
    #: Micro-batches that make a step.
    accumulate: _Count = 1
    #: Gradients are clipped to this norm; None (from Python alone) clips nothing.
    max_grad_norm: _Positive | None = 1.0
    #: How many processes share the model: whole copies (ddp) or pieces (fsdp2).
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    #: Go on from a checkpoint of another number of processes.
    allow_other_world_size: bool = False
    #: Load pickled checkpoints, which can run code.
    allow_pickle: bool = False
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    lora: LoraConfig | None = None
    #: None: gradients travel in their own format, and are added up by the backend.
    communication: CommunicationConfig | None = None

    @model_validator(mode="after")
    def _raise_if_contradictory(self) -> TrainConfig:
        if self.schedule.warmup_steps >= self.steps:
            raise ValueError(
                f"schedule.warmup_steps is {self.schedule.warmup_steps}, and the whole run has {self.steps} steps; "
                "lower it"
            )
        if self.data.validation is not None and self.data.validation == self.data.train:
            raise ValueError(
                "data.validation is data.train, and a loss on text that was trained on proves nothing; leave it out, "
                "and a share of the documents is kept back"
            )
        if self.communication is not None and self.parallel != "ddp":
            raise ValueError(
                f"communication.wire is '{self.communication.wire}', and parallel = \"{self.parallel}\" reduces "
                'gradients in a format of its own; write parallel = "ddp", or leave [communication] out'
            )
        return self

    @property
    def decisive(self) -> dict[str, Any]:
        """What must be the same when a run is gone on with."""
        facts = self.model_dump(mode="json")
        for name in ("out", "device", "emulate", "checkpoint", "evaluation", "allow_other_world_size", "allow_pickle"):
            del facts[name]
        if self.communication is None:
            del facts["communication"]  # which runs of earlier versions do not have
        return facts


def read_config(path: str | Path) -> TrainConfig:
    """Read and check a configuration file. Paths in it stand as they are written.

    Raises:
        TrainingError: the file cannot be read or is no TOML, or a key is missing, unknown, or impossible; names it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise TrainingError(f"'{path}' cannot be read ({reason}); give the path of a .toml file") from error
    return parse_config(text, str(path))


def parse_config(text: str, file: str) -> TrainConfig:
    """Return the configuration in a file's text; `file` is what errors call it. Raises as `read_config` does."""
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TrainingError(f"'{file}' is no TOML ({error}); correct it at that place") from error
    try:
        return TrainConfig.model_validate(fields)
    except ValidationError as error:
        raise TrainingError(_describe(error, file)) from error


def _describe(error: ValidationError, file: str) -> str:
    """Say the first finding in full, and name the keys of the others."""
    first, *others = error.errors()
    key = _key(first["loc"])
    if first["type"] == "missing":
        text = f"'{file}': '{key}' is missing; add it"
    elif first["type"] == "extra_forbidden":
        known = list(_section_of(first["loc"]).model_fields)
        hint = nearest_name_hint(str(first["loc"][-1]), known)
        text = f"'{file}': '{key}' is unknown{hint} Known there: {', '.join(known)}"
    elif first["type"] == "value_error":
        text = f"'{file}': {first['msg'].removeprefix('Value error, ')}"
    else:
        rule = first["msg"].removeprefix("Input ").strip()
        text = f"'{file}': '{key}' is {first['input']!r} but {rule}; correct it"
    if others:
        text += "; also wrong: " + ", ".join(f"'{_key(other['loc'])}'" for other in others)
    return text


def _key(place: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in place)


def _section_of(place: tuple[int | str, ...]) -> type[BaseModel]:
    """The section that a key stands in."""
    section = section_class(TrainConfig.model_fields[str(place[0])].annotation) if len(place) > 1 else None
    return section or TrainConfig


# --- what the keys are, for who writes or documents them --------------------------------------------------------------


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of `TrainConfig` holds; None: it is a key itself."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def key_meanings() -> dict[str, str]:
    """Return every key of the file, "data.train", with the comment that stands before it; "" where none does."""
    meanings: dict[str, str] = {}
    for name, field in TrainConfig.model_fields.items():
        section = section_class(field.annotation)
        if section is None:
            meanings[name] = _comments(TrainConfig).get(name, "")
        else:
            meanings |= {f"{name}.{key}": _comments(section).get(key, "") for key in section.model_fields}
    return meanings


def _comments(section: type[BaseModel]) -> dict[str, str]:
    """Field of a class → the lines that begin with #: right before it."""
    found: dict[str, str] = {}
    said: list[str] = []
    for line in map(str.strip, inspect.getsource(section).splitlines()):
        if line.startswith("#:"):
            said.append(line.removeprefix("#:").strip())
            continue
        name = line.partition(":")[0]
        if said and name in section.model_fields:
            found[name] = " ".join(said)
        said = []
    return found
