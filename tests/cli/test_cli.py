"""The command line: what is printed where, exit codes, and that bad input changes nothing on disk."""

from __future__ import annotations

import errno
import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fabricated_plan import make_plan
from rich.console import Console
from typer.testing import CliRunner

from bitwright import formats, hardware
from bitwright.cli import main
from bitwright.cli.app import create_app
from bitwright.cli.optimize import default_folder, optimize_command
from bitwright.cli.progress import Bars
from bitwright.cli.table import new_console, print_rows
from bitwright.errors import ModelError
from bitwright.plan import Budget, Measured, Workload, load_plan, write_plan
from bitwright.report import render_report, total_roles
from bitwright.report.units import spell_bytes, spell_number


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the search: keeps what it is called with, and gives a fabricated plan."""
    module = ModuleType("bitwright.search.optimize")
    module.calls = []
    module.plan = make_plan(num_layers=2)

    def optimize(model, *, progress, **options):
        module.calls.append({"model": model, **options})
        with progress.stage("calibrate", 3) as stage:
            for _ in range(3):
                stage.advance()
        return module.plan

    def verify(plan, *, progress, **options):
        module.calls.append(options)
        return plan.measured

    module.optimize, module.verify = optimize, verify
    monkeypatch.setattr("bitwright.cli.optimize.render_report", lambda plan: b"<!DOCTYPE html>")
    monkeypatch.setitem(sys.modules, "bitwright.search", ModuleType("bitwright.search"))
    monkeypatch.setitem(sys.modules, "bitwright.search.optimize", module)
    return module


def in_new_process(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(formats.__file__).parents[2])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_plan(make_plan(), tmp_path / "some-plan")


def test_optimize_writes_plan_and_report_and_names_them(search, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bitwright.cli.optimize.render_report", render_report)
    assert main(["optimize", "demo", "--max-kl", "0.15"]) == 0
    out, err = capsys.readouterr()
    assert load_plan(tmp_path / "demo-plan") == search.plan
    assert (tmp_path / "demo-plan" / "report.html").read_bytes() == render_report(search.plan)
    assert "plan    demo-plan\n" in out
    assert f"report  {Path('demo-plan') / 'report.html'}" in out
    assert re.search(r"^attn\.q +int", out, flags=re.MULTILINE)
    assert "every limit is met" in out
    assert "calibrate" in err and "calibrate" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_optimize_passes_every_option(search):
    arguments = (
        "optimize org/model --max-kl 0.1 --max-ppl-increase 2% --max-memory 90MiB --effective-bits 4.8 "
        "--nominal-bits 4.5 --device-memory 24GiB --latency-sla 20ms --min-tokens-per-s 100 --prefill-sla 1.5s "
        "--max-overflow-risk 0 --objective kl --hardware l4 --device-file my.toml --engine vllm --context 8192 "
        "--batch 4 --schemes int8_w,bf16 --rounding rtn,gptq --transforms none --values all --effort high "
        "--include-head --sites sites.toml --task chat --calibration a.txt --evaluation b.jsonl --tokens 512 "
        "--sequence-length 64 --pareto --pareto-points 9 --robustness --seed 7 --out there --allow-pickle --no-cache "
        "--low-memory --spool disk"
    )
    assert main(arguments.split()) == 0
    assert Path("there/plan.json").exists()
    assert search.calls == [
        {
            "model": "org/model",
            "budget": Budget(
                max_kl=0.1,
                max_ppl_increase=0.02,
                max_memory_bytes=94_371_840,
                effective_bits=4.8,
                nominal_bits=4.5,
                device_memory_bytes=24 * 2**30,
                latency_sla_s=0.02,
                min_tokens_per_s=100,
                prefill_sla_s=1.5,
                max_overflow_risk=0,
            ),
            "workload": Workload(context=8192, batch=4),
            "objective": "kl",
            "hardware": "l4",
            "device_file": Path("my.toml"),
            "engine": "vllm",
            "schemes": ["int8_w", "bf16"],
            "roundings": ["rtn", "gptq"],
            "transforms": ["none"],
            "values": "all",
            "effort": "high",
            "include_head": True,
            "site_file": Path("sites.toml"),
            "task": "chat",
            "calibration": "a.txt",
            "evaluation": "b.jsonl",
            "tokens": 512,
            "sequence_length": 64,
            "pareto_points": 9,
            "robustness": True,
            "seed": 7,
            "allow_pickle": True,
            "cache": None,
            "low_memory": True,
            "spool": Path("disk"),
        }
    ]


def test_options_are_these():
    names = {name.replace("_", "-") for name in inspect.signature(optimize_command).parameters}
    assert names == set(
        "model max-kl max-ppl-increase max-memory effective-bits nominal-bits device-memory latency-sla "
        "min-tokens-per-s prefill-sla max-overflow-risk objective hardware device-file engine context batch schemes "
        "rounding transforms values effort include-head sites task calibration evaluation tokens sequence-length "
        "pareto pareto-points robustness seed out json allow-pickle no-cache low-memory spool".split()
    )


def test_help_stands_in_sections(capsys):
    """One heading for each kind of option, limits first, and every option under one of them."""
    assert main(["optimize", "--help"]) == 0
    text = capsys.readouterr().out
    headings = re.findall(r"^(\w.*):$", text, flags=re.MULTILINE)
    assert headings[:3] == ["Arguments", "Limits (any mix of them)", "What it has to serve, and where"]
    assert headings[-1] == "Options"
    for name in inspect.signature(optimize_command).parameters:
        assert name == "model" or f"--{name.replace('_', '-')}" in text


def test_json_is_the_plan_and_nothing_else(search, capsys):
    assert main(["optimize", "demo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == search.plan.to_json() == Path("demo-plan/plan.json").read_text()
    assert "demo-plan" in err


def test_a_missed_limit_is_3_and_the_plan_is_written(search, capsys):
    search.plan = make_plan(num_layers=2, missed=True)
    assert main(["optimize", "demo"]) == 3
    out = capsys.readouterr().out
    assert "missed: KL divergence" in out and "% over" in out
    assert load_plan("demo-plan").met is False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("optimize demo --max-memory 90M", "90MiB"),
        ("optimize demo --max-memory=-1MiB", "above 0"),
        ("optimize demo --max-ppl-increase 1.5", "ambiguous"),
        ("optimize demo --max-kl nan", "max_kl"),
        ("optimize demo --max-kl 0", "max_kl"),
        ("optimize demo --max-kl x", "--max-kl"),
        ("optimize demo --effective-bits 40", "at most 32"),
        ("optimize demo --objective memory --effective-bits 4", "contradicts itself"),
        ("optimize demo --objective kl --max-kl 0.1", "contradicts itself"),
        ("optimize demo --objective speed", "unknown objective"),
        ("optimize demo --objective latency --latency-sla 1ms", "contradicts itself"),
        ("optimize demo --device-memory 24GiB", "add context"),
        ("optimize demo --max-kl 0.1 --context 0", "context must be a whole number"),
        ("optimize demo --max-kl 0.1 --context 64 --batch 0", "batch must be a whole number"),
        ("optimize demo --latency-sla fast", "no time"),
        ("optimize demo --latency-sla 20m", "write it like 20ms"),
        ("optimize demo --prefill-sla=-1s", "above 0"),
        ("optimize demo --min-tokens-per-s=-5", "min_tokens_per_s"),
        ("optimize demo --max-overflow-risk=-1", "at least 0"),
        ("optimize demo --rounding ,", "names no rounding"),
        ("optimize demo --pareto-points 1", "--pareto-points"),
        ("compare nowhere nowhere", "no plan at"),
        ("optimize demo --schemes ,", "names no scheme"),
        ("optimize demo --tokens 0", "--tokens"),
        ("optimize demo --seed 99999999999999999999999", "--seed"),
        ("optimize demo --max-memory 1e400", "finite"),
        ("optimize demo --frobnicate", "--frobnicate"),
        ("optimize demo --out occupied", "not a plan folder"),
        ("optimize", "MODEL"),
        ("optimise demo", "Did you mean 'optimize'? See: bitwright --help"),
        ("show nowhere", "no plan at"),
        ("show occupied", "no plan.json"),
        ("verify nowhere", "no plan at"),
    ],
)
def test_bad_input_is_one_sentence_and_2_and_changes_nothing(search, capsys, arguments: str, sentence: str):
    Path("occupied").mkdir()
    Path("occupied/mine.txt").write_text("mine")
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert sentence in err
    assert not search.calls
    assert sorted(str(path) for path in Path().rglob("*")) == ["occupied", str(Path("occupied/mine.txt"))]


def test_errors_of_the_search_are_one_sentence(search, capsys):
    def fail(*_: object, **__: object):
        raise ModelError("weight 'a.b[q]' holds NaN; load another checkpoint")

    search.optimize = fail
    assert main(["optimize", "demo"]) == 2
    assert capsys.readouterr().err == "error: weight 'a.b[q]' holds NaN; load another checkpoint\n"
    assert not list(Path().iterdir())


def test_defects_keep_their_traceback(search):
    def fail(*_: object, **__: object):
        raise IndexError("a defect")

    search.optimize = fail
    with pytest.raises(IndexError, match="a defect"):
        main(["optimize", "demo"])


def test_ctrl_c_is_130_and_nothing_is_written(search, capsys):
    def interrupt(*_: object, **__: object):
        raise KeyboardInterrupt

    search.optimize = interrupt
    assert main(["optimize", "demo"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
    assert not list(Path().iterdir())


def test_a_full_disk_is_2_and_nothing_is_written(search, capsys, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["optimize", "demo"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list(Path().iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("arguments", [["show", "plan"], ["show", "plan", "--json"], ["formats"]])
def test_a_full_disk_behind_stdout_is_one_sentence(tmp_path: Path, arguments: list[str]):
    write_plan(make_plan(), tmp_path / "plan")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; from bitwright.cli import main; sys.exit(main({arguments}))"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_typer_is_the_pip_line(package: str):
    code = f"import sys; sys.modules['{package}'] = None; from bitwright.cli import main; sys.exit(main(['formats']))"
    done = in_new_process(code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: the command line needs the package '{package}'; install it with: pip install 'bitwright[cli]'\n"
    )


def test_show(folder: Path, capsys):
    plan = load_plan(folder)
    assert main(["show", str(folder)]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80
    assert "predicted" in table and "measured" in table
    assert "weights already lie on a 4-bit grid of 32" in table
    assert plan.hardware_reason in table
    assert "time (predicted)" in table
    assert "\x1b" not in table
    assert main(["show", str(folder / "plan.json"), "--sites"]) == 0
    table = capsys.readouterr().out
    assert all(site.name in table for site in plan.sites)
    head = table.splitlines()[0]
    assert "KL predicted" in head and "measured" not in head
    assert main(["show", str(folder), "--json"]) == 0
    assert capsys.readouterr().out == plan.to_json()


def test_lines_break_beside_numbers_and_their_units(capsys):
    """At whatever place the line ends: a sentence whose first word grows letter by letter."""
    for length in range(1, 90):
        console = new_console()
        print_rows(console, [("title", f"{'x' * length} is 38 % larger, 94.5 MiB, in 1 site of 12 sites")])
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert not [line for line in lines if re.search(r"\b(38|94\.5|1|12)$", line)], lines
        assert max(map(len, lines)) <= 80
    assert "\uf8ff" not in "".join(lines)


def test_the_engine_that_was_asked_for_stands_in_the_summary(tmp_path: Path, capsys):
    plan = make_plan(num_layers=1)
    write_plan(plan.replace(options=plan.options.model_copy(update={"engine": "vllm"})), tmp_path / "asked")
    assert main(["show", "asked"]) == 0
    assert re.search(r"^engine +vllm *$", capsys.readouterr().out, flags=re.MULTILINE)


def line_cells(table: str, *start: str) -> list[str]:
    """The cells of the one line of a table that starts with the cells ``start``."""
    lines = [re.split(r" {2,}|(?<=\d) (?=\d)", line.strip()) for line in table.splitlines()]
    (cells,) = [cells for cells in lines if cells[: len(start)] == list(start)]
    return cells


def test_measured_kl_stands_beside_the_predicted_one(tmp_path: Path, capsys):
    """A role of one choice has it in its line, a role of several in the line after them; the plan in the last line."""
    plan = make_plan(num_layers=1)
    planned = {point.role: point for point in plan.predictions if point.kind == "plan_role"}
    write_plan(plan, tmp_path / "uniform")
    main(["show", "uniform"])
    table = capsys.readouterr().out
    assert "together" not in table
    for role, point in planned.items():
        figures = [spell_number(point.predicted_kl), spell_number(point.measured_kl)]
        assert line_cells(table, role)[-2:] == figures
    assert line_cells(table, "lm_head")[-2:] == ["0", "–"]
    assert line_cells(table, "whole plan")[-2:] == [
        spell_number(plan.summary.predicted_kl),
        spell_number(plan.measured.kl.mean),
    ]

    plan = make_plan()
    write_plan(plan, tmp_path / "mixed")
    main(["show", "mixed"])
    table = capsys.readouterr().out
    mixed = [total for total in total_roles(plan) if len(total.groups) > 1]
    assert mixed and table.count("together") == len(mixed)
    for total in mixed:
        for group in total.groups:
            assert line_cells(table, total.role, group.choice)[-1] == spell_number(group.predicted_kl)
        assert line_cells(table, total.role, "together")[2:] == [
            str(total.num_sites),
            f"{total.bits:.2f}",
            spell_bytes(total.num_bytes),
            spell_number(total.predicted_kl),
            spell_number(total.measured_kl),
        ]


def test_the_longest_choice_stands_on_one_line_of_80_columns(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plan = make_plan(num_layers=1)
    widest = {"role": "expert.gate_up", "scheme": "int4_g128_min", "rounding": "clip", "bytes": 1000 * 1024}
    sites = [plan.sites[0].model_copy(update=widest), *plan.sites[1:]]
    folder = write_plan(plan.model_copy(update={"sites": tuple(sites)}), tmp_path / "plan")
    main(["show", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("expert.gate_up  int4_g128_min+clip ") for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", ["40", "60"])
@pytest.mark.parametrize(
    "arguments", [["show", "some-plan"], ["show", "some-plan", "--sites"], ["schemes"], ["hardware"]]
)
def test_narrow_terminals_get_what_80_columns_show(
    folder: Path, capsys, monkeypatch, columns: str, arguments: list[str]
):
    main(arguments)
    expected = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", columns)
    main(arguments)
    assert capsys.readouterr().out == expected


def test_json_of_a_plan_is_escaped_where_the_output_is_ascii(tmp_path: Path, monkeypatch):
    plan = make_plan(num_layers=1)
    write_plan(plan.replace(notes=("α → β",)), tmp_path / "plan")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["show", "plan", "--json"]) == 0
    printed = stdout.buffer.getvalue()
    assert printed.isascii() and json.loads(printed) == json.loads(Path("plan/plan.json").read_text(encoding="utf-8"))


def test_brackets_in_names_are_text(tmp_path: Path, capsys):
    plan = make_plan(num_layers=1)
    site = plan.sites[0].model_copy(update={"name": "transformer.h.0.attn.c_attn[q]", "role": "attn[bold]"})
    write_plan(plan.replace(sites=(site, *plan.sites[1:])), tmp_path / "plan")
    main(["show", "plan", "--sites"])
    assert "transformer.h.0.attn.c_attn[q]" in capsys.readouterr().out
    main(["show", "plan"])
    assert "attn[bold]" in capsys.readouterr().out


def test_verify(search, folder: Path, capsys):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert main(["verify", str(folder), "--evaluation", "code", "--tokens", "256"]) == 0
    assert search.calls == [{"model": None, "evaluation": "code", "tokens": 256}]
    assert "ratio 1.1140 [1.1010, 1.1270]" in capsys.readouterr().out
    assert main(["verify", str(folder), "--json"]) == 0
    assert Measured.model_validate(json.loads(capsys.readouterr().out)) == load_plan(folder).measured
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_verify_is_3_where_a_limit_breaks(search, tmp_path: Path, capsys):
    write_plan(make_plan(num_layers=2, budget=Budget(max_kl=1e-6, effective_bits=5.6)), tmp_path / "plan")
    assert main(["verify", "plan"]) == 3
    assert "missed: KL divergence" in capsys.readouterr().out


def test_catalogs_are_listed_completely(capsys):
    assert main(["formats"]) == 0
    out = capsys.readouterr().out
    assert {*formats.names(), *formats.block_names()} <= {line.split()[0] for line in out.splitlines() if line.strip()}
    assert "65504" in out and "57344" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["hardware"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in hardware.names())
    assert "this machine: " in out


def test_schemes_are_listed_completely(capsys):
    from bitwright.quantize import SCHEMES
    from bitwright.quantize.catalogs import VALUE_SCHEMES

    assert main(["schemes"]) == 0
    out = capsys.readouterr().out
    assert {*SCHEMES, *VALUE_SCHEMES} <= {line.split()[0] for line in out.splitlines() if line.strip()}
    assert re.search(r"^int4_g128 +4\.125 ", out, flags=re.MULTILINE)


def test_help_version_and_no_arguments(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("bitwright ")
    assert main([]) == 0
    listed = capsys.readouterr().out
    for verb in ("optimize", "verify", "compare", "show", "formats", "schemes", "hardware"):
        assert verb in listed
        assert main([verb, "--help"]) == 0
        assert "Usage: bitwright" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["", "optimize", "run", "import", "bench", "formats", "formats show", "hardware"])
def test_help_has_no_words_of_the_parser_and_whole_sentences(verb: str, capsys):
    assert main([*verb.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"[{}<>](?!=)|INTEGER|(?<!])\.\.\.$", text, flags=re.MULTILINE)
    if verb == "":
        assert "chat      Talk to the model" in text and "the end of the input ends it." in text
    if verb == "run":
        assert "Usage: bitwright run [OPTIONS] PLAN\n" in text and "--prompt TEXT" in text and "--seed N " in text


def test_application_runs_without_main():
    result = CliRunner().invoke(create_app(), ["formats"])
    assert result.exit_code == 0 and "fp8_e4m3" in result.output


def test_parsing_loads_nothing_heavy():
    code = (
        "import sys; from bitwright.cli import main; main(['optimize', 'demo', '--max-memory', '90M']);"
        "print([name for name in ('torch', 'transformers', 'matplotlib', 'jinja2') if name in sys.modules])"
    )
    done = in_new_process(code)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo-plan"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M-plan"),
        ("/models/tiny.gguf", "tiny-plan"),
        ("models/llama/", "llama-plan"),
        ("here/..", "here-plan"),
    ],
)
def test_default_folder(tmp_path: Path, monkeypatch, model: str, name: str):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "here").mkdir()
    assert default_folder(model) == Path(name)


def test_bars_on_a_terminal_show_time_left():
    text = io.StringIO()
    with Bars(Console(file=text, force_terminal=True, width=100, legacy_windows=False)) as bars:
        with bars.stage("calibrate", 4) as stage:
            stage.advance()
            stage.advance(3)
        with bars.stage("score", 2) as stage:
            stage.advance(2)
    shown = text.getvalue()
    assert "calibrate" in shown and "4/4" in shown and "left" in shown and "2/2" in shown


def test_bars_without_a_terminal_are_lines():
    text = io.StringIO()
    with Bars(Console(file=text, force_terminal=False, width=80)) as bars, bars.stage("calibrate [x]", 4) as stage:
        stage.advance(4)
    assert re.fullmatch(r"calibrate \[x\] …\ncalibrate \[x\]: done in \d+\.\d s\n", text.getvalue())
