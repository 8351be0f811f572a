"""`bitwright train policies`: what it lists, what it says of one, and what a misspelt word gets."""

from __future__ import annotations

import json

import pytest

from bitwright.cli import main
from bitwright.training.policy import POLICIES


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_every_policy_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "policies").splitlines()
    assert {line.split()[0] for line in lines if line and line.split()[0] in POLICIES} == set(POLICIES)
    assert all(len(line) <= 80 for line in lines)


def test_a_device_says_what_it_runs_and_what_auto_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "policies", "--hardware", "h100")
    assert "auto: fp8-hybrid, since h100-sxm" in text and "groups of 32" in text


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_policy_fits_the_terminal(capsys: pytest.CaptureFixture[str], name: str) -> None:
    for words in ([], ["--cpu"]):
        lines = told(capsys, "policies", name, *words).splitlines()
        assert lines[0].split()[:2] == ["policy", f"{name}:"]
        assert all(len(line) <= 80 for line in lines)


def test_autocasts_differ(capsys: pytest.CaptureFixture[str]) -> None:
    def who(*words: str) -> str:
        facts = json.loads(told(capsys, "policies", "fp16-mixed", "--json", *words))
        return next(row["by"] for row in facts["operations"] if row["what"] == "softmax")

    assert (who(), who("--cpu")) == ("autocast", "bitwright")


def test_json_has_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(told(capsys, "policies", "--json"))
    sizes = {policy["name"]: policy["bytes_per_parameter"] for policy in facts["policies"]}
    # fp32: 4 + 4 (gradient) + 8 (two moments); pure bf16 with stochastic rounding: 2 + 4 + 8
    assert (sizes["fp32"], sizes["bf16-mixed"], sizes["bf16-pure-sr"]) == (16, 16, 14)


def test_auto_is_a_policy_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "policies", "auto", "--hardware", "v100-sxm2")
    assert text.split()[1] == "fp16-mixed:" and "v100-sxm2 multiplies fp16" in text


def test_an_alias_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bf16-mixed:" in told(capsys, "policies", "mixed_bfloat16")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["policies", "bf17-mixed"], "did you mean 'bf16-mixed'"),
        (["policies", "--hardware", "h1000"], "did you mean 'h100"),
        (["polices"], "neither a verb of train nor a file; did you mean 'policies'"),
        (["missing.toml"], "'missing.toml' cannot be read"),
    ],
)
def test_misspelt_words(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert says in refused(capsys, *words)


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys)
    assert all(verb in text for verb in ("run", "plan", "policies"))
