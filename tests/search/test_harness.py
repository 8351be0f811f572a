"""Tasks of the lm-evaluation-harness: a task file of our own, a plan beside its reference, against scores by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_plans import uniform_plan

from bitwright.cli import main
from bitwright.errors import DataError, MissingExtra
from bitwright.inference import apply
from bitwright.models import LoadedModel, find_sites, load
from bitwright.plan import ModelInfo, Plan, Run, write_plan
from bitwright.search import harness

DOCUMENTS = [
    {"question": f"The {thing} is", "choices": [" red.", " a long way off.", " blue"], "answer": index % 3}
    for index, thing in enumerate(("sky", "sun", "sea", "road", "house", "cat"))
]
TASK = """
task: colours
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf" / "datasets"))
    data = tmp_path / "colours.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS), encoding="utf-8")
    file = tmp_path / "colours.yaml"
    file.write_text(TASK.format(data=data), encoding="utf-8")
    return file


@pytest.fixture
def loaded(make_tiny_folder: Callable[..., Path]) -> LoadedModel:
    return load(make_tiny_folder("llama"))


def plan_for(loaded: LoadedModel, folder: Path) -> Plan:
    info = ModelInfo(name=loaded.name, hash=loaded.hash, params=loaded.num_parameters)
    plan = uniform_plan(find_sites(loaded.model), "int4_g32").replace(model=info)
    return plan.attach(run=Run(paths={"model": str(folder)}))


def accuracy_by_hand(model: Any, tokenizer: Any) -> float:
    """The likeliest choice by the sum of its tokens' log-probabilities."""
    right = 0
    for document in DOCUMENTS:
        scores = []
        for ending in document["choices"]:
            start, end = (tokenizer(part)["input_ids"] for part in (document["question"], ending))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([start + end]), use_cache=False).logits[0].float()
            log_p = logits.log_softmax(-1)
            scores.append(sum(float(log_p[len(start) + i - 1, token]) for i, token in enumerate(end)))
        right += scores.index(max(scores)) == document["answer"]
    return right / len(DOCUMENTS)


def test_a_task_file_is_scored_for_reference_and_plan(
    loaded: LoadedModel, task_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'bitwright[eval]'")
    pytest.importorskip("accelerate", reason="the harness is not installed: pip install 'bitwright[eval]'")
    plan = plan_for(loaded, tmp_path)
    (result,) = harness.run_tasks(plan, loaded, [str(task_file)])
    assert (result.task, result.metric, result.num_documents) == ("colours", "acc", 6)
    assert result.reference == pytest.approx(accuracy_by_hand(loaded.model, loaded.tokenizer))
    assert result.plan == pytest.approx(accuracy_by_hand(apply(plan, loaded), loaded.tokenizer))
    assert result.difference is not None
    assert result.difference.mean == pytest.approx(result.plan - result.reference)
    with pytest.raises(DataError, match=r"no task file at 'nowhere.yaml'"):
        harness.run_tasks(plan, loaded, ["nowhere.yaml"])
    loaded.model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    write_plan(plan_for(loaded, tmp_path / "model"), tmp_path / "plan")
    assert main(["verify", str(tmp_path / "plan"), "--tasks", str(task_file), "--limit", "4"]) == 0
    out = capsys.readouterr().out
    assert "colours" in out and "plan − reference" in out and "paired over documents" in out


def test_a_name_that_nobody_knows_is_hinted() -> None:
    """Without reading the thousands of tasks that the harness brings."""
    error = harness.unknown_task("arc_eezy", ["arc_easy", "piqa"])
    assert "has no task 'arc_eezy'; did you mean 'arc_easy'? It knows 2 by name" in str(error)


def test_differences_are_paired_over_documents() -> None:
    """Of made-up results: the mean of differences, and no interval for what is no mean over documents."""
    scores = {"reference": [1.0, 0.0, 1.0, 1.0], "plan": [1.0, 0.0, 0.0, 1.0]}
    found = {
        name: {
            "results": {
                "t": {"alias": "t", "acc,none": sum(s) / 4, "acc_stderr,none": 0.1, "word_perplexity,none": 7.5}
            },
            "samples": {"t": [{"doc_id": i, "filter": "none", "acc": x} for i, x in enumerate(s)]},
        }
        for name, s in scores.items()
    }
    results = list(harness._results(found["reference"], found["plan"], seed=0))
    assert [(r.metric, r.reference, r.plan) for r in results] == [("acc", 0.75, 0.5), ("word_perplexity", 7.5, 7.5)]
    difference = results[0].difference
    assert difference is not None and difference.mean == -0.25 and -0.76 <= difference.low < difference.high <= 0
    assert results[1].difference is None and results[0].num_documents == 4


def test_without_the_harness_the_extra_is_named(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    monkeypatch.delitem(__import__("sys").modules, "bitwright.search.harness_calls", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'bitwright\[eval\]'"):
        harness.run_tasks(plan_for(loaded, tmp_path), loaded, ["arc_easy"])
