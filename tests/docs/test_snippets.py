"""Whatever the documentation tells a reader to type works: Python blocks are executed files, commands are run.

A Python, TOML or YAML block must be, to the letter, a file in docs/snippets. Those files, and every `bitwright` line of
a shell block, are run in an empty folder that holds what they speak of: my-model (a tiny random one), my-text.txt,
my-chats.jsonl, sites.toml, my-run.toml, my-bench.json, and my-task.yaml with my-questions.jsonl.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bitwright import hardware
from bitwright.cli import main
from bitwright.quantize import SCHEMES, dequantize, quantize
from bitwright.quantize.scheme import Scheme

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: Modules that a reader would put into a package; not for running by themselves.
EXTENSIONS = {"new_scheme.py", "train_loop.py"}
#: What reads a folder that the commands of its page have written: run after them, in a process of its own.
READERS = {"load_exported.py"}
#: What torchrun starts, in several processes.
UNDER_TORCHRUN = {"wire_hook.py"}
EXPORT_PAGES = ("exporting", "importing")
SCRIPTS = sorted(path.name for path in SNIPPETS.glob("*.py") if path.name not in EXTENSIONS | READERS | UNDER_TORCHRUN)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of the languages."""
    text = page.read_text(encoding="utf-8")
    return [code for language, code in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if language in languages]


def commands(page: Path) -> list[str]:
    """The `bitwright` lines of a page's shell blocks, comments left out."""
    lines = [line for block in blocks(page, "sh", "bash", "console") for line in block.splitlines()]
    return [line for line in lines if line.startswith("bitwright ")]


@pytest.fixture
def readers_folder(
    tmp_path: Path, make_tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, shared_cache: Path
) -> Path:
    """An empty working folder with what the documentation speaks of."""
    shutil.copytree(make_tiny_folder("llama"), tmp_path / "my-model")
    words = "the scale of a group multiplies its codes and gives back values that a layer can use again".split()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=60)) + "." for _ in range(400)]
    (tmp_path / "my-text.txt").write_text("\n\n".join(texts), encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": text[:30]}, {"role": "assistant", "content": text}]} for text in texts
    ]
    (tmp_path / "my-chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    for name in ("my-task.yaml", "sites.toml", "my-run.toml", "my-bench.json"):
        shutil.copy(SNIPPETS / name, tmp_path)
    questions = [{"question": text[:30], "choices": [text[30:50], " red"], "answer": 0} for text in texts[:8]]
    (tmp_path / "my-questions.jsonl").write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_code_is_an_executed_file(page: Path) -> None:
    known = {path.read_text(encoding="utf-8") for path in SNIPPETS.iterdir() if path.is_file()}
    assert [block for block in blocks(page, "python", "py", "toml", "yaml") if block not in known] == []


@pytest.mark.slow
def test_python_snippets_run(readers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ["plan.py", *(name for name in SCRIPTS if name != "plan.py")]:  # the others read what plan.py writes
        runpy.run_path(str(SNIPPETS / name))
        assert capsys.readouterr().out
    assert sorted(os.listdir("my-plan")) == ["plan.json", "report.html", "run.json", "tensors.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNDER_TORCHRUN))
def test_snippets_of_several_processes_run(name: str, readers_folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run([*command, SNIPPETS / name], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank}" in done.stdout for rank in range(2))


def test_the_page_on_communication_shows_what_fsdp_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SNIPPETS / "fsdp.py"))
    assert capsys.readouterr().out in blocks(ROOT / "docs" / "communication.md", "text")


def test_the_comments_of_the_formats_snippet_are_true(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SNIPPETS / "formats.py"))
    assert capsys.readouterr().out.split("\n") == ["448.0", "[1.015625e-01 4.480000e+02]", "fp8_e4m3", ""]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_run(
    page: Path, readers_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in commands(page):
        monkeypatch.setattr("sys.stdin", io.StringIO("What is a scale?\n"))  # what a reader says to `chat`
        code = main(shlex.split(command, comments=True)[1:])
        # 3: a random model may miss a limit; the plan is written all the same.
        told = capsys.readouterr()
        assert code in (0, 3), f"{command}\n{told.err}"
        assert told.out or told.err
    for name in sorted(READERS):
        if (SNIPPETS / name).read_text(encoding="utf-8") in blocks(page, "python"):
            pytest.importorskip("compressed_tensors")
            done = subprocess.run([sys.executable, SNIPPETS / name], capture_output=True, text=True)
            assert done.returncode == 0 and done.stdout, done.stderr


def test_the_example_of_a_scheme_is_one_and_no_known_one() -> None:
    import torch

    (scheme,) = runpy.run_path(str(SNIPPETS / "new_scheme.py"))["SCHEMES"]
    assert isinstance(scheme, Scheme) and scheme.name not in SCHEMES
    assert scheme.weights is not None
    weight = torch.randn(8, 128)
    assert (dequantize(quantize(weight, scheme.weights)) - weight).abs().max() < 0.3


def test_the_example_of_a_device_is_one_and_no_known_one() -> None:
    device = hardware.read_device_file(SNIPPETS / "new_device.toml")
    assert device.name not in hardware.names()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|toml|txt|md))`", page.read_text(encoding="utf-8"))
    folders = [ROOT / name for name in ("src", "tests", "docs", "benchmarks")]
    there = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    users_own = {"my-text.txt", "sites.toml", "load_torchao.py", "te_recipe.py"}  # the last two: by exports
    missing = [
        name
        for name in named
        if name not in users_own and not any(path.as_posix().endswith(f"/{name}") for path in there)
    ]
    assert missing == []


def test_the_guide_names_every_set_task_and_limit() -> None:
    from bitwright.plan import Budget
    from bitwright.search.documents import CALIBRATION_SETS
    from bitwright.search.task import TASKS

    guide = (ROOT / "docs" / "optimize.md").read_text(encoding="utf-8")
    units = re.compile(r"_(bytes|s)$")  # fields say their unit, options take it
    options = ["--" + units.sub("", name).replace("_", "-") for name in Budget.model_fields]
    assert [name for name in [*CALIBRATION_SETS, *TASKS] if f"`{name}`" not in guide] == []
    assert [option for option in options if option not in guide] == []


def test_the_guides_to_exports_and_imports_name_every_kind() -> None:
    from bitwright.export import EXPORTERS
    from bitwright.export.source_kind import SOURCES

    exporting, importing = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in EXPORT_PAGES)
    assert [name for name in EXPORTERS if f"\n## `{name}`" not in exporting] == []
    typed = [command for command in commands(ROOT / "docs" / "exporting.md") if " --to " in command]
    assert [name for name in EXPORTERS if not any(f" --to {name} " in command for command in typed)] == []
    assert [name for name in SOURCES if f"| `{name}` |" not in importing] == []


def test_the_guide_to_running_names_every_mode_and_rule() -> None:
    from bitwright.inference.modes import MODES
    from bitwright.inference.static.calibration import RULES

    guide = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert [name for name in (*MODES, *RULES) if f"| `{name}` |" not in guide] == []


def test_contributing_names_every_plug_in_folder() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "bitwright"
    scanned = re.findall(
        r'package="bitwright\.([\w.]+)",\s*attribute="(\w+)"',
        "".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py")),
    )
    assert scanned
    assert [
        name for name, constant in scanned if f"`{name.replace('.', '/')}/" not in guide or constant not in guide
    ] == []


def test_the_loop_of_the_readme_trains() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    train = runpy.run_path(str(SNIPPETS / "train_loop.py"))["train"]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    before = model.lm_head.weight.detach().clone()
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counters = train(model, optimizer, [{"input_ids": ids, "labels": ids}] * 3)
    assert counters.updates == 3 and not torch.equal(before, model.lm_head.weight)
