"""Policies are records: the names that the world knows are found, contradictions are refused, tables follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwright.errors import TrainingError, UnknownName
from bitwright.training.forward.operation_table import operation_table
from bitwright.training.policy import POLICIES, KeptHigh, policy_named

NAMES = {
    "fp32",
    "tf32",
    "fp16-mixed",
    "bf16-mixed",
    "bf16-pure",
    "bf16-pure-sr",
    "bf16-pure-kahan",
    "fp8-hybrid",
    "fp8-block",
    "mxfp8",
    "nvfp4",
}


def test_the_policies_are_there() -> None:
    assert set(POLICIES) == NAMES


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("mixed_float16", "fp16-mixed"),  # Keras
        ("mixed_bfloat16", "bf16-mixed"),
        ("16-mixed", "fp16-mixed"),  # Lightning
        ("bf16-true", "bf16-pure"),
        ("32-true", "fp32"),
        ("bf16", "bf16-mixed"),  # accelerate
        ("fp16", "fp16-mixed"),
        ("fp8", "fp8-hybrid"),
        ("BF16-Mixed", "bf16-mixed"),
    ],
)
def test_what_other_libraries_call_it(alias: str, name: str) -> None:
    assert policy_named(alias).name == name


def test_no_alias_is_claimed_twice_or_is_a_name() -> None:
    aliases = [alias for policy in POLICIES.values() for alias in policy.aliases]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & set(POLICIES)


@pytest.mark.parametrize(
    ("typo", "nearest"), [("bf16-mixd", "bf16-mixed"), ("mixed_bfloat61", "mixed_bfloat16"), ("autoo", "auto")]
)
def test_an_unknown_policy_names_the_nearest(typo: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{nearest}'"):
        policy_named(typo)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_policy_says_where_it_is_from(name: str) -> None:
    policy = POLICIES[name]
    assert policy.source and policy.description
    assert len(policy.description) <= 100


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compute": "fp8_e4m3"}, "compute"),
        ({"parameters": "fp16"}, "parameters"),
        ({"update": "kahan"}, "goes with fp32 parameters"),
        ({"moments": "int8"}, "moments"),
        ({"kept": (KeptHigh(role="router", reason="it decides"),)}, "recipe"),
        ({"last_layers_high": 0.5}, "recipe"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        replace(POLICIES["bf16-mixed"], **changes)


def test_only_fp16_needs_a_loss_scale() -> None:
    assert {name for name, policy in POLICIES.items() if policy.loss_scale is not None} == {"fp16-mixed"}


def test_the_recipes_are_those_of_the_libraries() -> None:
    def operands(name: str) -> dict[str, str]:
        recipe = POLICIES[name].products
        assert recipe is not None
        return {operand: rule.scheme.format for operand, rule in recipe.operands.items()}

    hybrid = operands("fp8-hybrid")
    assert {hybrid["forward_x"], hybrid["forward_w"], hybrid["wgrad_x"], hybrid["dgrad_w"]} == {"fp8_e4m3"}
    assert {hybrid["dgrad_g"], hybrid["wgrad_g"]} == {"fp8_e5m2"}
    assert set(operands("mxfp8").values()) == set(operands("fp8-block").values()) == {"fp8_e4m3"}
    nvfp4 = POLICIES["nvfp4"].products
    assert nvfp4 is not None and set(operands("nvfp4").values()) == {"fp4_e2m1"}
    stochastic = {name for name, rule in nvfp4.operands.items() if rule.is_stochastic}
    assert stochastic == {"dgrad_g", "wgrad_g"}
    assert {name for name, rule in nvfp4.operands.items() if rule.rotation} == {"wgrad_g", "wgrad_x"}


@pytest.mark.parametrize("device_type", ["cuda", "cpu", "mps"])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_policy_has_a_table_that_says_why(name: str, device_type: str) -> None:
    rows = operation_table(POLICIES[name], device_type)
    assert all(row.what and row.format and row.by and row.why for row in rows)
    formats = {row.what: row.format for row in rows}
    assert formats["cross-entropy"] == "fp32"
    assert formats["moments"] == POLICIES[name].moments


def test_losses_and_norms_are_fp32_in_fp16_whatever_the_device() -> None:
    for device_type in ("cuda", "cpu", "mps"):
        formats = {row.what: row.format for row in operation_table(POLICIES["fp16-mixed"], device_type)}
        for what in (
            "softmax",
            "layer norm",
            "RMS norm",
            "cross-entropy",
            "logsumexp",
            "powers",
            "positions",
            "routers",
        ):
            assert formats[what] == "fp32", (device_type, what)
