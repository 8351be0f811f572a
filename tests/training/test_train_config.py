"""The configuration of a run: what is missing, unknown or impossible is named before anything is loaded."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from bitwright.errors import TrainingError
from bitwright.training.fine_tuning.config import (
    TrainConfig,
    key_meanings,
    parse_config,
    read_config,
    section_class,
)

LEAST = """
model = "demo"
out = "run"
steps = 10
[data]
train = "docs"
[optimizer]
lr = 1e-4
"""


def changed(before: str, after: str) -> str:
    assert before in LEAST
    return LEAST.replace(before, after)


def test_the_least_that_is_needed() -> None:
    config = parse_config(LEAST, "a.toml")
    assert (config.policy, config.batch, config.accumulate, config.max_grad_norm) == ("auto", 8, 1, 1.0)
    assert config.optimizer.options == {"lr": 1e-4}
    assert config.lora is None


def test_options_of_the_optimizer_are_its_own() -> None:
    config = parse_config(changed("lr = 1e-4", "lr = 1e-4\nbetas = [0.9, 0.95]\nname = 'adam'"), "a.toml")
    assert config.optimizer.name == "adam"
    assert config.optimizer.options == {"lr": 1e-4, "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("steps = 10", "step = 10"), "'steps' is missing; add it; also wrong: 'step'"),
        (changed("steps = 10", "steps = 10\nbach = 4"), "'bach' is unknown; did you mean 'batch'"),
        (
            changed("[data]", "[data]\nsequence_lenght = 4"),
            "'data.sequence_lenght' is unknown; did you mean 'sequence_l",
        ),
        (changed("[data]", "[lora]\nranks = 4\n[data]"), "'lora.ranks' is unknown; did you mean 'rank'"),
        (changed("steps = 10", "steps = 0"), "'steps' is 0 but should be greater than or equal to 1; correct it"),
        (changed("steps = 10", "steps = 1.5"), "'steps' is 1.5 but should be a valid integer"),
        (changed("lr = 1e-4", "lr = -1"), "'optimizer.lr' is -1 but should be greater than 0"),
        (changed("lr = 1e-4", "lr = nan"), "'optimizer.lr' is nan but should be a finite number"),
        (changed("[data]", "[schedule]\nwarmup_steps = 10\n[data]"), "warmup_steps is 10, and the whole run has 10"),
        (changed('"docs"', '"docs"\nvalidation = "docs"'), "a loss on text that was trained on proves nothing"),
        (changed("steps = 10", "steps ="), "is no TOML"),
        (changed("[data]", "[communication]\nwires = 'bf16'\n[data]"), "'communication.wire' is missing; add it"),
        (
            changed("[data]", "parallel = 'fsdp2'\n[communication]\nwire = 'bf16'\n[data]"),
            "communication.wire is 'bf16', and parallel = \"fsdp2\" reduces gradients in a format of its own",
        ),
        (changed("steps = 10", "steps = 10\nparallel = 'zero'"), "'parallel' is 'zero' but should be 'ddp' or 'fsdp2'"),
        (changed("lr = 1e-4", "lr = true"), "'optimizer.lr' is True but should be a valid number"),
        (changed("lr = 1e-4", "lr = '1e-3'"), "'optimizer.lr' is '1e-3' but should be a valid number"),
        (
            changed("steps = 10", "steps = 10\nmax_grad_norm = true"),
            "'max_grad_norm' is True but should be a",
        ),
        (changed("steps = 10", "steps = 10\nemulate = 'yes'"), "'emulate' is 'yes' but should be a valid boolean"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(TrainingError) as caught:
        parse_config(text, "a.toml")
    assert message in str(caught.value)
    assert "'a.toml'" in str(caught.value)


def test_how_gradients_travel_decides_a_run() -> None:
    plain = parse_config(LEAST, "a.toml")
    rounded = parse_config(changed("[data]", "[communication]\nwire = 'int8'\n[data]"), "a.toml")
    assert plain.communication is None and "communication" not in plain.decisive
    assert rounded.decisive["communication"] == {"wire": "int8", "error_feedback": False}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"none\.toml' cannot be read \(No such file"):
        read_config(tmp_path / "none.toml")


def test_when_things_are_saved_decides_nothing() -> None:
    often = parse_config(changed("[data]", "[checkpoint]\nevery_steps = 2\n[data]"), "a.toml")
    assert often.decisive == parse_config(changed('out = "run"', 'out = "elsewhere"'), "b.toml").decisive
    assert often.decisive != parse_config(changed("steps = 10", "steps = 11"), "c.toml").decisive


def _places() -> list[tuple[str, str, Any]]:
    """(section, key, annotation) of every key that is no section."""
    found = []
    for name, field in TrainConfig.model_fields.items():
        section = section_class(field.annotation)
        if section is None:
            found.append(("", name, field.annotation))
        else:
            found += [(name, key, inner.annotation) for key, inner in section.model_fields.items()]
    return found


def _types(annotation: Any) -> set[type]:
    """Plain types in an annotation, however deep."""
    if annotation in (str, bool, int, float):
        return {annotation}
    return set[type]().union(*(_types(part) for part in get_args(annotation)))


@pytest.mark.parametrize(("section", "key", "annotation"), _places())
def test_no_type_is_taken_for_another(section: str, key: str, annotation: Any) -> None:
    """A text, a boolean, a number: what a key is not, it does not become."""
    kinds = _types(annotation)
    allowed = tuple(kinds | ({int} if float in kinds else set())) or (str,)
    for value in ("yes", "1", True, 1, 0.5):
        if type(value) in allowed:
            continue
        fields: dict[str, Any] = tomllib.loads(LEAST)
        (fields.setdefault(section, {}) if section else fields)[key] = value
        with pytest.raises(ValidationError) as error:
            TrainConfig.model_validate(fields)
        places = {finding["loc"] for finding in error.value.errors()}
        assert ((section, key) if section else (key,)) in places, value


def test_whole_numbers_are_numbers() -> None:
    config = parse_config(changed("lr = 1e-4", "lr = 1").replace("[data]", "max_grad_norm = 2\n[data]"), "a.toml")
    assert (config.optimizer.lr, config.max_grad_norm) == (1.0, 2.0)


def test_every_key_says_what_it_means() -> None:
    meanings = key_meanings()
    assert set(meanings) == {f"{section}.{key}" if section else key for section, key, _ in _places()}
    assert all(meanings.values())
