"""run, chat and bench on a tiny model folder: text on stdout, everything else on stderr, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_plans import uniform_plan

from bitwright.cli import main
from bitwright.inference import apply
from bitwright.inference.generation.generate import generate
from bitwright.models import LoadedModel, find_sites, load
from bitwright.plan import ModelInfo, Plan, Run, write_plan


@pytest.fixture(scope="module")
def loaded(make_tiny_folder: Callable[..., Path]) -> LoadedModel:
    return load(make_tiny_folder("llama"))


def plan_for(loaded: LoadedModel, folder: Path, scheme: str = "int4_g32") -> Plan:
    plan = uniform_plan(find_sites(loaded.model), scheme)
    info = ModelInfo(name=loaded.name, hash=loaded.hash, params=loaded.num_parameters)
    return plan.replace(model=info).attach(run=Run(paths={"model": str(folder)}))


@pytest.fixture
def plan(
    loaded: LoadedModel, make_tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    yield write_plan(plan_for(loaded, make_tiny_folder("llama")), tmp_path / "plan")


def test_run_goes_on_with_a_prompt(plan: Path, loaded: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    planned: Any = apply(plan_for(loaded, plan), loaded, mode="auto")
    ids = loaded.tokenizer("Hello", return_tensors="pt")["input_ids"]
    found = generate(planned, ids, max_new_tokens=6, stop_ids={256})
    expected = loaded.tokenizer.decode(found.tokens[0], skip_special_tokens=True)
    for mode in ("auto", "packed"):
        assert main(["run", "plan", "--prompt", "Hello", "--max-new-tokens", "6", "--mode", mode, "--report"]) == 0
        out, err = capsys.readouterr()
        assert out == expected + "\n"
        assert "tokens/s, weights" in err and "int4_g32" in err and "planar" in err
    drawn = []
    for _ in range(2):
        arguments = ["--temperature", "1", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "6"]
        assert main(["run", "plan", "--prompt", "Hello", *arguments]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != expected + "\n"


def test_chat_takes_turns(plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn reads what is new; the answer is that of the whole chat at once."""
    read: list[int] = []
    import bitwright.inference.generation.generate as module

    original = module.generate

    def watched(model: Any, input_ids: torch.Tensor, **settings: Any) -> Any:
        read.append(input_ids.shape[1])
        return original(model, input_ids, **settings)

    monkeypatch.setattr(module, "generate", watched)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAnd you?\n/exit\nnever\n"))
    assert main(["chat", "plan", "--max-new-tokens", "4", "--temperature", "0", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    assert len(read) == 2 and read[1] < 45
    assert err.count("tokens/s, weights") == 2
    assert len(out.splitlines()) >= 2


def test_a_chat_that_fills_its_context_forgets_the_oldest_turns_and_says_so(
    plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 512 positions: three turns of 200 letters do not fit; one of 600 never does, and ends nothing."""
    lines = ["a" * 200, "b" * 200, "x" * 600, "c" * 200, "d" * 200]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", "plan", "--max-new-tokens", "4", "--temperature", "0"]) == 0
    err = capsys.readouterr().err
    assert err.count("tokens/s, weights") == 4
    assert err.count("the context is full: the oldest 1 turn of this chat") == 2
    assert err.count("not said: ") == 1 and "are more than the model's 512 positions" in " ".join(err.split())


def test_bench_measures_beside_bf16(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--prompt-tokens", "8", "--new-tokens", "3", "--repeats", "1", "--batch", "2"]
    assert main(["bench", "plan", *small]) == 0
    out = capsys.readouterr().out
    assert "prefill, tokens/s" in out and "decode, tokens/s" in out and "KV cache" in out and "plan / bf16" in out
    assert "one round, 2 x 8 + 3 tokens, " in out and "planar" in out and "1 threads" not in out
    assert main(["bench", "plan", "--json", *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"plan", "bf16"}
    assert found["plan"]["weight_bytes"] < found["bf16"]["weight_bytes"]
    assert "peak memory" in out
    for facts in found.values():  # where the system tells it
        assert facts["peak_bytes"] is None or facts["peak_bytes"] >= facts["weight_bytes"]
    assert found["plan"]["decode_tokens_per_s"] > 0 and found["bf16"]["batch"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "plan", "--prompt", "  "], "the prompt is '  ', and a model goes on with some text"),
        (["run", "plan", "--prompt", "x", "--mode", "fast"], "unknown mode 'fast'"),
        (["run", "plan", "--prompt", "x" * 600], "600 tokens of prompt and 64 new ones are more than the model's 512"),
        (["run", "plan", "--prompt", "x", "--mode", "native"], "14 of 14 sites of the plan for"),
        (["run", "nowhere", "--prompt", "x"], "there is no plan at 'nowhere'"),
        (["run", "plan", "--prompt", "x", "--top-p", "0"], "top_p is 0.0"),
        (["bench", "plan", "--prompt-tokens", "500"], "500 tokens of prompt and 64 new ones"),
    ],
)
def test_bad_input_is_one_sentence(
    plan: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.rstrip("\n").splitlines()[-1].startswith("error: ") and message in err


def test_another_model_is_refused_with_what_differs(
    plan: Path, make_tiny_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "plan", "--prompt", "x", "--model", str(make_tiny_folder("llama", 1))]) == 2
    assert "the shapes of all 14 tensors agree, their values do not" in capsys.readouterr().err
    assert main(["run", "plan", "--prompt", "x", "--model", str(make_tiny_folder("gpt2"))]) == 2
    err = capsys.readouterr().err
    assert "model.layers.0.self_attn.q_proj is not in it" in err and "and 9 more; give the right model" in err


def test_a_plan_of_a_newer_schema_and_a_model_that_is_gone(
    plan: Path, loaded: LoadedModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_plan(plan_for(loaded, tmp_path / "gone"), tmp_path / "moved")
    assert main(["run", "moved", "--prompt", "x"]) == 2
    assert "gone' and is no longer there; give it with --model" in capsys.readouterr().err
    content = json.loads((plan / "plan.json").read_text(encoding="utf-8"))
    (plan / "plan.json").write_text(json.dumps(content | {"schema_version": 99}), encoding="utf-8")
    assert main(["run", "plan", "--prompt", "x"]) == 2
    assert "has schema version 99, and this bitwright reads up to" in capsys.readouterr().err


def test_a_model_without_a_chat_template_does_not_chat(
    plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    original = load

    def without_template(*arguments: Any, **named: Any) -> LoadedModel:
        found = original(*arguments, **named)
        found.tokenizer.chat_template = None
        return found

    monkeypatch.setattr("bitwright.inference.planned_model.load", without_template)
    assert main(["chat", "plan"]) == 2
    assert "has no chat template" in capsys.readouterr().err
