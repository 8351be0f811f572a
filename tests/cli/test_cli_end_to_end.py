"""The verbs with the real search on a tiny model folder: exit codes, files, and what is printed."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bitwright
from bitwright.cli import main
from bitwright.plan import load_plan

Run = Callable[..., int]
PROGRAM = [sys.executable, "-c", "import sys; from bitwright.cli import main; sys.exit(main())"]


@pytest.fixture
def folder(make_tiny_folder: Callable[..., Path]) -> Path:
    return make_tiny_folder("llama")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; text and cache lie elsewhere, so that whatever appears in it was written by the verb."""
    (tmp_path / "work").mkdir()
    (tmp_path / "prose.txt").write_text("\n\n".join(list(pydoc_data.topics.topics.values())[:30]), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # processes of these tests find the package as this one does, from another working folder
    monkeypatch.setenv("PYTHONPATH", str(Path(bitwright.__file__).parents[1]))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return tmp_path / "work"


def arguments(model: object, *more: str, text: str = "../prose.txt") -> list[str]:
    given = set(more)
    options = {
        "--calibration": text,
        "--evaluation": text,
        "--tokens": "128",
        "--sequence-length": "16",
        "--schemes": "int4_g32,int8_w",
        "--hardware": "x86-avx512-bf16",
        "--out": "plan",
    }
    flat = [part for name, value in options.items() if name not in given for part in (name, value)]
    return ["optimize", str(model), *flat, *more]


def test_a_budget_that_is_met(folder: Path, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit 0, three files and a report, a table on stdout; `verify` measures the same again."""
    assert main(arguments(folder, "--effective-bits", "6", "--max-kl", "0.05")) == 0
    printed = capfd.readouterr()
    assert "attn" in printed.out and "plan" in printed.out
    assert {path.name for path in work.iterdir()} == {"plan"}
    names = {path.name for path in (work / "plan").iterdir()}
    assert {"plan.json", "tensors.safetensors", "run.json", "report.html"} <= names
    plan = load_plan(work / "plan")
    assert plan.met
    report = (work / "plan" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in report and "http-equiv" not in report
    assert main(["verify", "plan", "--json"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert plan.measured is not None
    assert again == plan.measured.model_dump(mode="json")
    assert main(["show", "plan"]) == 0


def test_a_budget_that_cannot_be_met(folder: Path, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit 3, the best plan is written, and the limit is named with its value."""
    assert main(arguments(folder, "--max-kl", "1e-9")) == 3
    printed = capfd.readouterr()
    plan = load_plan(work / "plan")
    assert not plan.met
    (limit,) = plan.limits
    assert limit.name == "max_kl" and limit.status == "missed" and limit.value > limit.limit
    assert "missed" in printed.out
    assert main(["verify", "plan"]) == 3


def test_a_size_that_the_kept_head_rules_out_names_the_option(folder: Path, work: Path) -> None:
    assert main(arguments(folder, "--max-memory", "20KiB")) == 3
    assert any("--include-head" in note for note in load_plan(work / "plan").notes)
    assert main(arguments(folder, "--max-memory", "20KiB", "--include-head")) == 3
    assert not any("--include-head" in note for note in load_plan(work / "plan").notes)


def test_json_is_all_that_is_printed(folder: Path, work: Path) -> None:
    """Of the whole process: the solver and other libraries write to the same stdout."""
    finished = subprocess.run(
        [*PROGRAM, *arguments(folder, "--effective-bits", "6", "--json")], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == (work / "plan" / "plan.json").read_text(encoding="utf-8")
    assert json.loads(finished.stdout)["met"] is True
    assert "Warning" not in finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.parametrize("stage", ["calibrate", "solve", "measure the plan"])
def test_interrupted_nothing_is_half_written(folder: Path, work: Path, tmp_path: Path, stage: str) -> None:
    """Ctrl-C after a stage was reported: exit 130, one word, no plan and nothing temporary anywhere."""
    process = subprocess.Popen(
        [*PROGRAM, *arguments(folder, "--effective-bits", "6", "--tokens", "2048")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # whoever runs the suite in the background has it ignored, and children take that over
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if stage in line:
            process.send_signal(signal.SIGINT)
            break
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, seen + rest
    assert "interrupted" in rest and "Traceback" not in rest
    assert list(work.iterdir()) == []
    assert [path for path in tmp_path.rglob(".*")] == []


def test_a_full_disk_leaves_nothing(
    folder: Path, work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bitwright.plan.folder.os.fsync", full)
    assert main(arguments(folder, "--effective-bits", "6", "--no-cache")) == 2
    assert "No space left on device" in capfd.readouterr().err
    assert list(work.iterdir()) == []


# --- bad input: one sentence, exit 2, nothing written ----------------------------------------------------------------


@pytest.fixture
def refused(work: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Run and return the one sentence; everything that bad input must not do is checked here."""

    def run(model: object, *more: str, **options: str) -> str:
        code = main(arguments(model, *more, **options))
        printed = capfd.readouterr()
        assert code == 2, printed
        assert printed.out == ""
        lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and printed.err.rstrip().endswith(lines[0])
        assert list(work.iterdir()) == []
        return lines[0].removeprefix("error: ")

    yield run


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_missing_path(refused: Callable[..., str]) -> None:
    sentence = refused("./no-such-folder", "--effective-bits", "6")
    assert "no file or folder at './no-such-folder'" in sentence


@pytest.mark.parametrize("num_bytes", [0, 5, 1000])
def test_truncated_weights(refused: Callable[..., str], copied: Path, num_bytes: int) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert "model.safetensors" in refused(copied, "--effective-bits", "6")


def test_weights_that_are_no_safetensors(refused: Callable[..., str], copied: Path) -> None:
    (copied / "model.safetensors").write_text("<html>Access denied</html>" * 100)
    assert "model.safetensors" in refused(copied, "--effective-bits", "6")


def test_a_gguf_of_an_architecture_that_is_not_supported(refused: Callable[..., str], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "speech.gguf", "whisper")
    writer.add_tensor("encoder.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "whisper" in refused(tmp_path / "speech.gguf", "--effective-bits", "6")


def test_weights_that_are_not_a_number(refused: Callable[..., str], copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refused(copied, "--effective-bits", "6")


A_PAGE = "\n\n".join(f"Paragraph {i} says only a little, and not much more than that." for i in range(60))


@pytest.mark.parametrize(
    ("content", "word"),
    [("", "empty"), ("\n \n", "empty"), ("One line.", "more text"), (A_PAGE, "too short")],
)
def test_empty_and_short_text(
    refused: Callable[..., str], folder: Path, tmp_path: Path, content: str, word: str
) -> None:
    (tmp_path / "short.txt").write_text(content)
    sentence = refused(folder, "--effective-bits", "6", text="../short.txt")
    assert "short.txt" in sentence and word in sentence


def test_text_that_is_no_text(refused: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(bytes(range(128, 256)) * 50)
    assert "binary.txt" in refused(folder, "--effective-bits", "6", text="../binary.txt")


def test_text_that_cannot_be_tokenised(refused: Callable[..., str], copied: Path) -> None:
    """A vocabulary of ten words, in which the unknown token is missing."""
    tokenizer = json.loads((copied / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {str(digit): digit for digit in range(10)}
    tokenizer["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"}
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "text cannot be tokenised" in refused(copied, "--effective-bits", "6")


def test_no_tokenizer(refused: Callable[..., str], copied: Path) -> None:
    for path in copied.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(copied, "--effective-bits", "6")


def test_unknown_names(refused: Callable[..., str], folder: Path) -> None:
    sentence = refused(folder, "--effective-bits", "6", "--schemes", "int4_g32,int4_g12")
    assert "unknown scheme 'int4_g12'; did you mean 'int4_g128'?" in sentence
    assert "unknown task 'story'" in refused(folder, "--task", "story")
    assert "x86-avx" in refused(folder, "--hardware", "x86-avx5")
    assert "no-such-set" in refused(folder, text="no-such-set")


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--effective-bits", "6", "--objective", "memory"), "contradicts itself"),
        (("--max-kl", "0.01", "--objective", "kl"), "contradicts itself"),
        (("--max-kl", "-1"), "max_kl must be a finite number above 0"),
        (("--max-kl", "nan"), "max_kl must be a finite number above 0"),
        (("--max-memory", "90M"), "write 90MB"),
        (("--max-ppl-increase", "3"), "ambiguous"),
        (("--effective-bits", "many"), "--effective-bits"),
    ],
)
def test_budgets_that_contradict_themselves(
    refused: Callable[..., str], folder: Path, more: tuple[str, ...], word: str
) -> None:
    assert word in refused(folder, *more)


def test_sequences_that_do_not_fit(refused: Callable[..., str], folder: Path) -> None:
    assert "512 positions" in refused(folder, "--effective-bits", "6", "--sequence-length", "1024")


def test_a_hub_id_without_a_network(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "no-such-owner/no-such-model" in refused("no-such-owner/no-such-model", "--effective-bits", "6")


def test_pickled_weights_are_refused_unless_allowed(
    refused: Callable[..., str], copied: Path, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    assert "--allow-pickle" in refused(copied, "--effective-bits", "6")
    assert main(arguments(copied, "--effective-bits", "6", "--allow-pickle")) == 0


def test_verify_of_the_wrong_model(
    folder: Path, make_tiny_folder: Callable[..., Path], work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folder, "--effective-bits", "6")) == 0
    capfd.readouterr()
    assert main(["verify", "plan", "--model", str(make_tiny_folder("llama", 1))]) == 2
    assert "not those that the plan was made for" in capfd.readouterr().err


def test_a_cache_that_cannot_be_written(
    refused: Callable[..., str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a-file"))
    sentence = refused(folder, "--effective-bits", "6")
    assert "--no-cache" in sentence and os.fspath(tmp_path / "a-file") in sentence


def test_a_second_budget_is_answered_from_the_cache(folder: Path, work: Path) -> None:
    assert main(arguments(folder, "--effective-bits", "6")) == 0
    first = load_plan(work / "plan").run.timings
    started = time.perf_counter()
    assert main(arguments(folder, "--effective-bits", "5", "--out", "second")) == 0
    assert time.perf_counter() - started < 60
    second = load_plan(work / "second").run.timings
    assert "calibrate" in first and "calibrate" not in second and "score" not in second
