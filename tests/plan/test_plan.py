"""Facts of a plan: what is hashed, what is refused, what its JSON looks like."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from fabricated_plan import make_plan
from hypothesis import given
from hypothesis import strategies as st

from bitwright.errors import PlanError
from bitwright.plan import Plan, Repair, Run
from bitwright.plan.canonical import canonical_json, hash_json, hash_tensors, round_significant


def test_hash_of_json_is_sha256_of_its_text():
    # printf '{\n "a": 1\n}\n' | sha256sum
    assert canonical_json({"a": 1}) == '{\n "a": 1\n}\n'
    assert hash_json({"a": 1}) == "b606a40d68ae742be63266c691e611efd8bfa4375628a5d31b8f5962a71afa47"


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_nine_digits_keep_every_fp32_value(value: float):
    assert struct.pack("f", round_significant(value)) == struct.pack("f", value + 0.0)


@given(st.floats(allow_nan=False, allow_infinity=False, max_value=1e300, min_value=-1e300))
def test_rounding_is_idempotent_and_survives_text(value: float):
    rounded = round_significant(value)
    assert round_significant(rounded) == rounded
    assert json.loads(json.dumps(rounded)) == rounded


def test_nan_never_reaches_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


def test_schema_has_the_fields_of_the_format():
    content = json.loads(make_plan().to_json())
    assert set(
        "schema_version model hardware task budget objective seed calibration evaluation sites summary measured limits "
        "met frontier predictions repairs latency tensors_hash versions content_hash decision_hash".split()
    ) <= set(content)
    assert {"from", "to"} <= set(content["repairs"][0])
    assert content["measured"]["kl"].keys() == {"mean", "low", "high"}
    assert "run" not in content and "timings" not in json.dumps(content)


def test_decision_hash_ignores_evidence_and_content_hash_does_not():
    plan = make_plan()
    other = plan.replace(notes=("another note",), versions={"torch": "9"})
    assert other.decision_hash == plan.decision_hash
    assert other.content_hash != plan.content_hash
    assert other != plan
    site = plan.sites[0].model_copy(update={"scheme": "bf16"})
    assert plan.replace(sites=(site, *plan.sites[1:])).decision_hash != plan.decision_hash


def test_run_is_in_no_hash():
    plan = make_plan()
    assert plan.attach(run=Run(created="2030-01-01T00:00:00Z")) == plan


def test_tensors_hash_follows_the_tensors():
    plan = make_plan()
    changed = {name: array + 1 for name, array in plan.tensors.items()}
    assert plan.attach(tensors=changed).tensors_hash == hash_tensors(changed) != plan.tensors_hash
    assert plan.attach(tensors=changed).content_hash != plan.content_hash


def test_tensor_hash_sees_name_dtype_shape_and_values():
    array = np.arange(6, dtype=np.int16)
    hashes = {
        hash_tensors({"a": array}),
        hash_tensors({"b": array}),
        hash_tensors({"a": array.view(np.uint16)}),
        hash_tensors({"a": array.reshape(2, 3)}),
        hash_tensors({"a": array[::-1]}),
        hash_tensors({}),
    }
    assert len(hashes) == 6
    assert hash_tensors({"a": array.astype(">i2")}) == hash_tensors({"a": array})


def test_tensor_of_no_site_is_refused():
    with pytest.raises(PlanError, match="'nowhere/codes' belongs to no site"):
        make_plan().attach(tensors={"nowhere/codes": np.zeros(1)})


def test_site_twice_is_refused():
    plan = make_plan()
    with pytest.raises(PlanError, match="appears twice"):
        plan.replace(sites=(*plan.sites, plan.sites[0]))


def test_tied_sites_must_agree():
    plan = make_plan()
    tied = [
        plan.sites[0].model_copy(update={"tied_group": "qkv", "scheme": "bf16"}),
        plan.sites[1].model_copy(update={"tied_group": "qkv", "scheme": "int8_w"}),
    ]
    with pytest.raises(PlanError, match="must share a scheme"):
        plan.replace(sites=(*tied, *plan.sites[2:]))


def test_met_cannot_stand_beside_a_missed_limit():
    with pytest.raises(PlanError, match="'max_kl' is missed"):
        make_plan(missed=True, met=True)


def test_repair_takes_both_spellings():
    mine = Repair(site="a", from_scheme="x", to_scheme="y", why="w", measured_kl_before=1.0)
    assert Repair.model_validate(mine.model_dump(by_alias=True)) == mine


def test_plan_is_frozen_and_its_tensors_too():
    plan = make_plan()
    with pytest.raises(ValueError, match="frozen"):
        plan.seed = 3
    with pytest.raises(TypeError):
        plan.tensors["x/y"] = np.zeros(1)  # type: ignore[index]


def test_site_lookup_names_the_next_step():
    plan: Plan = make_plan()
    assert plan.site("lm_head").shape == (49152, 576)
    with pytest.raises(PlanError, match="no site 'nothing'"):
        plan.site("nothing")
