"""Tiny models, text, and one plan a model, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_search import BUDGET, search_options, write_text

from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.plan import Plan
from bitwright.search.optimize import optimize


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("prose"))


@pytest.fixture(scope="session")
def load_tiny(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Callable[..., LoadedModel]:
    """A new model each time: a search must leave it as it was."""

    def make(architecture: str, seed: int = 0) -> LoadedModel:
        return from_memory(make_tiny_model(architecture, seed), tiny_tokenizer, name=f"tiny-{architecture}")

    return make


@pytest.fixture(scope="session")
def plan_of(load_tiny: Callable[..., LoadedModel], prose: Path) -> Callable[[str], Plan]:
    made: dict[str, Plan] = {}

    def make(architecture: str) -> Plan:
        if architecture not in made:
            made[architecture] = optimize(load_tiny(architecture), budget=BUDGET, **search_options(prose))
        return made[architecture]

    return make
