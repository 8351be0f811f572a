"""Write the pages that are tables of what exists (formats, schemes, devices, engines, commands), and tables in others.

    make docs          # or: python docs/generate.py

Everything comes from the catalogs and result files, so the pages cannot tell of anything that is not there; the tests
hold them against those (tests/docs/test_generated_pages.py). To change a page, change the record or the text below.

A page that is written by hand may hold tables: what stands between `<!-- table: NAME -->` and `<!-- end -->` is written
here, and nothing else of it is.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import typer

sys.path.insert(0, str(Path(__file__).parent))  # the pages of this folder, also where a test loads this file

import measured
import measured_communication
import measured_peers
import measured_running
import measured_training
import training_keys
from measured import markdown_table

from bitwright import formats, hardware
from bitwright.cli.app import create_app, run
from bitwright.cli.formats import native_devices, spell_specials
from bitwright.export import EXPORTERS, supported_schemes
from bitwright.export.source_kind import SOURCES
from bitwright.inference.packed.native_rows import NATIVE_LAYOUTS, NATIVE_PRODUCTS
from bitwright.plan.engine import Engine, ValueKind, WeightKind, engines
from bitwright.plan.engine_rules import spell_capabilities
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS, TensorScheme
from bitwright.quantize.catalogs import MATMULS, VALUE_SCHEMES
from bitwright.quantize.select import BACKENDS
from bitwright.search.settings import default_schemes

DOCS = Path(__file__).parent
_NOTICE = "<!-- Written by docs/generate.py; change that or the catalogs, not this page. -->"
#: Bits per weight are stated for a matrix whose sides every group size divides.
_SIDE = 4096
#: Bits per value are stated for heads of this size.
_HEAD_DIM = 128
_TRANSFORMS: Mapping[str, Any] = TRANSFORMS
#: What stands for a value where an option does not name it.
_VALUE_NAMES = {str: "NAME", int: "N", float: "X", float | None: "X", int | None: "N"}


def terminal(*arguments: str, columns: int = 100) -> str:
    """What a command prints into a file, at a width, as a block of text that cannot drift from the command."""
    width, printed = str(columns), io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": width}), redirect_stdout(printed), redirect_stderr(printed):
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            os.environ.pop(name, None)
        code = run(arguments)
    assert code == 0, arguments
    lines = [f"$ bitwright {' '.join(arguments)}", *printed.getvalue().splitlines()]
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"


def formats_page() -> str:
    """docs/formats.md"""
    native = native_devices()
    rows = [
        (
            f"`{row.name}`",
            str(row.bits),
            row.layout,
            f"{row.max:.6g}",
            f"{row.min_normal:.3g}",
            "" if row.min_subnormal is None else f"{row.min_subnormal:.3g}",
            f"{row.decimal_digits:.1f}",
            "" if row.steps_per_octave is None else str(row.steps_per_octave),
            spell_specials(row),
            ", ".join(native.get(row.name, ())),
            ", ".join(f"`{alias}`" for alias in row.aliases),
        )
        for row in formats.rows()
    ]
    titles = (
        "format",
        "bits:",
        "layout",
        "max:",
        "min normal:",
        "min subnormal:",
        "digits:",
        "steps per octave:",
        "specials",
        "native",
        "aliases",
    )
    block_rows = [
        (
            f"`{row.name}`",
            f"{row.bits_per_value:g}",
            row.element,
            str(row.block_size),
            row.scale_format,
            row.rule,
            f"{row.max:.4g}",
            ", ".join(f"`{alias}`" for alias in row.aliases),
        )
        for row in formats.block_rows()
    ]
    block_titles = ("format", "bits per value:", "element", "block:", "scale", "rule", "max:", "aliases")
    roundings = [(f"`{mode.name}`", mode.description) for mode in formats.ROUNDINGS.values()]
    overflows = [(f"`{rule.name}`", rule.description) for rule in formats.OVERFLOWS.values()]
    sources = [(f"`{row.name}`", row.source) for row in (*formats.rows(), *formats.block_rows())]
    return f"""# Formats: what one number is

{_NOTICE}

{markdown_table(titles, rows)}

*Layout*: bits of sign · exponent · fraction. *Min normal*: the smallest positive value with full precision. *Digits*:
decimal digits that the significand is worth. *Steps per octave*: values from 2^k up to 2^(k+1). *Native*: devices with
a matrix rate for it ([devices](hardware.md)). *Aliases* are names of other libraries; they are accepted where text
comes in (command line, files, checkpoints) and nowhere else.

A format says nothing of scales: those belong to a [scheme](schemes.md) or to a block format. Formats may share a layout
and differ in their special values. E4M3 is three formats: OCP's `fp8_e4m3` gives up Inf and reaches 448, the IEEE-style
`fp8_e4m3_ieee` keeps it and reaches 240, MI300's `fp8_e4m3fnuz` also gives up −0 and reaches 240; the same byte means
half as much in the last as in the first. A codebook (`nf4`) is a list of values and follows no layout.

## Block formats

Numbers that are stored together share a scale.

{markdown_table(block_titles, block_rows)}

*Bits per value*: stored bits, the block's scales included. *Block*: how many values share a scale. *Rule*: how the
scale follows from the values. *Max*: the largest value that some block can hold.

## Rounding and overflow

{markdown_table(("rounding", "what it does"), roundings)}

{markdown_table(("overflow rule", "what becomes of numbers beyond the range"), overflows)}

## A format of your own

A TOML file describes it, without code: every `bitwright formats` command takes `--format-file my-format.toml`, and from
Python `formats.add` takes what `formats.read_format_file` returns. From then on it is a format like any other.

```toml
{(DOCS / "snippets" / "my-format.toml").read_text(encoding="utf-8")}```

## On the command line

{terminal("formats")}

{terminal("formats", "show", "bf16", "0.1")}

{terminal("formats", "show", "mxfp4", "1", "2", "3.5", "-0.1")}

{terminal("formats", "compare", "3e-5", "70000")}

## Sources

{markdown_table(("format", "source"), sources)}
"""


def spell_tensor(tensor: TensorScheme | None, without: str) -> str:
    """What a tensor is stored in, for a table cell."""
    if tensor is None:
        return without
    two_levels = tensor.scaling is not None and tensor.scaling.tensor_scale
    return f"{tensor}, one fp32 scale per tensor" if two_levels else str(tensor)


def schemes_page() -> str:
    """docs/schemes.md"""
    rows = [
        (
            f"`{scheme.name}`",
            "" if scheme.weights is None else f"{8 * scheme.weights.stored_bytes(_SIDE, _SIDE) / _SIDE**2:.3f}",
            spell_tensor(scheme.weights, "as in the checkpoint"),
            spell_tensor(scheme.activations, "untouched"),
            scheme.source,
        )
        for scheme in SCHEMES.values()
    ]
    roundings = [(f"`{rounding.name}`", rounding.description) for rounding in ROUNDINGS.values()]
    transforms = [(f"`{name}`", transform.description) for name, transform in _TRANSFORMS.items()]
    values = [
        (
            f"`{scheme.name}`",
            f"{scheme.stored_bits(_HEAD_DIM):.3f}",
            str(scheme.values),
            scheme.axis + (", static" if scheme.static else ""),
            ", ".join(sorted(scheme.roles)),
            scheme.source,
        )
        for scheme in VALUE_SCHEMES.values()
    ]
    return f"""# Schemes: how a tensor becomes codes

{_NOTICE}

A choice at a site is a scheme, a rounding and a transform. A scheme is number format plus scaling, for weights and for
the activations that enter the layer.

{markdown_table(("scheme", "bits:", "weights", "activations", "source"), rows)}

*Bits*: stored bits per weight of a {_SIDE} × {_SIDE} matrix, scales and offsets included. *Row*: one scale per output
channel of a weight, or per token of an activation; scales of activations are found on every call, save for those of the
schemes called static, which are found in calibration. *group(n)*: one scale
per n consecutive weights of a row. Where n does not divide the row, the last group is shorter; a plan says so, since
some engines refuse it.

`scale` always multiplies codes back to values:

| symmetry | value | who stores it so |
| --- | --- | --- |
| symmetric | `code · scale` | most integer and all floating schemes |
| zero_point (`_zp`) | `(code − zero_point) · scale` | AWQ, GPTQ, compressed-tensors |
| minimum (`_min`) | `code · scale + minimum` | GGUF's Q4_1 |

A scheme without a name is spelled out, wherever a scheme is named: format of the codes, who shares a scale (`tensor`,
`row`, `g32`, `b128x128`), format of the scales, then `zp` or `min`; what inputs are rounded to stands behind a bar.
`uint4:g48:bf16:zp` has 4 bits with zero points in groups of 48, `fp8_e4m3:tensor:fp32|fp8_e4m3:tensor:fp32:static` one
static scale for its inputs.

Unless `--schemes` names others, bitwright chooses among these:
{", ".join(f"`{name}`" for name in default_schemes())}.
They leave activations in 16 bits, for rounding them can only lose quality. Where the time to read prompts is limited,
schemes that the device multiplies natively are among them too: they alone make long products faster.

## Roundings: how codes are found

{markdown_table(("rounding", "what it does"), roundings)}

## Transforms: what is done to the tensor before

{markdown_table(("transform", "what it does"), transforms)}

## Schemes of values

Values are what a model computes or keeps rather than its weights: K and V caches, operands of attention's products,
probabilities, activations, norms, the residual stream.

{markdown_table(("scheme", "bits:", "format", "axis", "where", "source"), values)}

*Bits*: per value of a head of {_HEAD_DIM}, scales included. *Axis*: who shares a scale: a *token* of one head, a
*channel* of one head over a group of tokens, a *head*, or all (*tensor*). Static scales are found in calibration and
kept in the plan; what goes beyond them saturates and is counted, or stays unrounded where a plan runs with fallback.
"""


def engines_page() -> str:
    """docs/engines.md"""
    parts = [_engine(engine) for engine in engines()]
    return f"""# Engines: what a serving engine runs

{_NOTICE}

`bitwright optimize MODEL --engine NAME` chooses only what that engine runs; what is ruled out is listed in the plan
with its reason. Each statement has a source. *read*: found there; *recalled*: not checked.

*Kernels on*: a kind is left out on other devices, of which `--hardware` names one; otherwise it is the machine at hand,
if the engine runs on such a machine at all. A compute capability is asked of NVIDIA's GPUs alone.

{"".join(parts)}"""


def _engine(engine: Engine) -> str:
    fused = [(", ".join(f"`{role}`" for role in kind.roles), kind.source, kind.certainty) for kind in engine.fused]
    weights = [
        (
            kind.name,
            ", ".join(kind.formats),
            ", ".join([*kind.scopes, *map(str, kind.group_sizes)]),
            ", ".join(kind.symmetries),
            ", ".join(kind.scale_formats) or "any",
            ", ".join(kind.activations) or "as they are",
            "may be shorter" if kind.ragged_groups else "must fit",
            _kernels(kind),
            kind.source,
            kind.certainty,
        )
        for kind in engine.weights
    ]
    values = [
        (
            kind.name,
            ", ".join(kind.roles),
            ", ".join(kind.formats),
            ", ".join(kind.axes),
            _kernels(kind),
            kind.source,
            kind.certainty,
        )
        for kind in engine.values
    ]
    aliases = f" (also: {', '.join(f'`{alias}`' for alias in engine.aliases)})" if engine.aliases else ""
    kept = ", ".join(f"`{role}`" for role in engine.kept_roles) or "none"
    where = ", ".join(engine.device_kinds) or "any device"
    facts = ("weights", "formats", "groups", "symmetry", "scales", "inputs", "last group")
    titles = (*facts, "kernels on", "source", "certainty")
    of_values = ("values", "roles", "formats", "axis", "kernels on", "source", "certainty")
    tables = [
        ("Roles that share a scheme", markdown_table(("roles", "source", "certainty"), fused) if fused else ""),
        ("Weights", markdown_table(titles, weights) if weights else ""),
        (
            "Caches and other values",
            markdown_table(of_values, values) if values else "",
        ),
    ]
    shown = "".join(f"### {title}\n\n{table}\n\n" for title, table in tables if table)
    notes = "".join(f"- {note}\n" for note in engine.notes)
    return f"""## `{engine.name}`{aliases}

{engine.description}. Plain formats: {", ".join(engine.plain_formats)}. Roles that stay plain: {kept}. Runs on: {where}.
Source: {engine.source} ({engine.certainty}).

{shown}{notes}{chr(10) if notes else ""}"""


def _kernels(kind: WeightKind | ValueKind) -> str:
    """Where an engine has kernels for a kind."""
    least, most = kind.min_compute_capability, kind.max_compute_capability
    parts = [
        ", ".join(kind.device_kinds),
        f"compute capability {spell_capabilities(least, most)}" if least or most else "",
        f"processors with {', '.join(kind.cpu_flags)}" if kind.cpu_flags else "",
    ]
    return "; ".join(filter(None, parts)) or "any"


def hardware_page() -> str:
    """docs/hardware.md"""
    rows = [
        (
            f"`{device.name}`",
            ", ".join(f"`{alias}`" for alias in device.aliases),
            f"{device.memory_bytes / 1e9:g}",
            f"{device.memory_gb_per_s:g}",
            ", ".join(f"{name} {rate:g}" for name, rate in device.matmul_tflops.items()),
            ", ".join(f"{name} {rate:g}" for name, rate in device.achieved_matmul_tflops.items()),
        )
        for device in hardware.devices()
    ]
    titles = ("device", "aliases", "memory, GB:", "GB/s:", "dense peak, TFLOP/s", "achieved, TFLOP/s")
    sources = [
        (f"`{device.name}`", section, source, device.certainties[section])
        for device in hardware.devices()
        for section, source in device.sources.items()
    ]
    notes = [(f"`{device.name}`", note) for device in hardware.devices() for note in device.notes]
    return f"""# Devices: what a chip can do

{_NOTICE}

{markdown_table(titles, rows)}

Rates are dense: data sheets often print twice the figure, which needs 2:4 sparsity. Integer formats count operations
(TOP/s). A format without a rate has no matrix unit on the chip, or none that is known. *Achieved*: what somebody
measured; plans count with it, and take a format that nobody measured to reach the same share of its peak. Times that
follow from these figures (`time = max(operations / rate, bytes / bandwidth)`) are always called predicted.

`--hardware NAME` plans for one of these; without it, the machine at hand is recognised by the name its GPU reports or
by the instruction sets of its processor (`bitwright hardware` says which it is, and why).

## Notes

{markdown_table(("device", "note"), notes)}

## Sources

*read*: found at the source; *recalled*: not checked; *derived*: computed as the source spells out; *measured*: here.

{markdown_table(("device", "figures", "source", "certainty"), sources)}
"""


def commands_page() -> str:
    """docs/commands.md"""
    parts = [_command(usage, verb) for usage, verb in _verbs("bitwright", create_app())]
    return (
        f"""# Commands

{_NOTICE}

`bitwright --version` prints the version, `bitwright COMMAND --help` what follows. Exit codes of all commands: 0, done
and every limit met; 2, bad input (one sentence, nothing written); 3, done, but a limit is missed (the plan is written
and says which); 130, interrupted.

"""
        + "\n\n".join(parts)
        + "\n"
    )


def _verbs(before: str, app: typer.Typer) -> Iterable[tuple[str, Any]]:
    """(words to type, function) of every command, those of a command that has commands of its own after it."""
    groups = {str(group.name): group.typer_instance for group in app.registered_groups}
    for command in app.registered_commands:
        yield f"{before} {command.name}", command.callback
    for name, group in groups.items():
        if group is not None:
            if group.registered_callback is not None:
                yield f"{before} {name}", group.registered_callback.callback
            yield from _verbs(f"{before} {name}", group)


def _command(usage: str, verb: Any) -> str:
    """One command, read off the signature of its function."""
    words = [usage]
    rows: list[tuple[str, str, str]] = []
    hints = get_type_hints(verb, include_extras=True)
    for parameter in inspect.signature(verb).parameters.values():
        if not get_args(hints[parameter.name]):
            continue  # what the parser gives to the function, and nobody types
        value_type, info = get_args(hints[parameter.name])
        if info.hidden:
            continue
        if isinstance(info, typer.models.ArgumentInfo):
            required = "required" if parameter.default is inspect.Parameter.empty else ""
            word = f"{info.metavar}…" if "list" in str(value_type) else str(info.metavar)
            words.append(word if required else f"[{word}]")
            rows.append((f"`{info.metavar}`", required, str(info.help)))
            continue
        declared = isinstance(info.default, str) and info.default.startswith("--")
        option = info.default if declared else "--" + parameter.name.replace("_", "-")
        is_flag = value_type is bool
        if not is_flag:
            option += f" {info.metavar or _VALUE_NAMES[value_type]}"
        rows.append((f"`{option}`", "" if is_flag else _default(parameter), str(info.help)))
    parts = [f"## `{' '.join(words)}`", inspect.cleandoc(verb.__doc__ or "")]
    if rows:
        parts.append(markdown_table(("argument", "default", "meaning"), rows))
    return "\n\n".join(parts)


def _default(parameter: inspect.Parameter) -> str:
    """What an option is unless it is given."""
    if parameter.default is inspect.Parameter.empty:
        return "required"
    return "" if parameter.default is None else f"`{parameter.default}`"


def quantize_page() -> str:
    """docs/quantize.md"""
    rows = [
        (f"`{backend.name}`", backend.description, ", ".join(backend.device_types) or "any") for backend in BACKENDS
    ]
    rows.append(("`reference`", "NumPy, plain and slow: the judge of the others, which never runs", ""))
    return measured.quantize_page(_NOTICE, markdown_table(("backend", "what it is", "preferred on"), rows))


# --- tables in pages that are written by hand -------------------------------------------------------------------------


def targets_table() -> str:
    """What a plan can be exported to."""
    rows = [(f"`{name}`", ", ".join(x.engines), x.description) for name, x in EXPORTERS.items()]
    return markdown_table(("target", "engines whose rules hold", "what is written"), rows)


def target_schemes_table() -> str:
    """Which schemes each target takes, engine by engine."""
    asked = [(name, engine) for name, exporter in EXPORTERS.items() for engine in exporter.engines or (None,)]
    taken = {column: set(supported_schemes(*column)) for column in asked}
    titles = [name if engine is None or engine == name else f"{name} for {engine}" for name, engine in asked]
    rows = [
        (f"`{scheme}`", *("yes" if scheme in taken[column] else "" for column in asked))
        for scheme in (*SCHEMES, *VALUE_SCHEMES)
        if any(scheme in found for found in taken.values())
    ]
    return markdown_table(("scheme", *titles), rows)


def sources_table() -> str:
    """What can be imported."""
    rows = [(f"`{name}`", source.description) for name, source in SOURCES.items()]
    return markdown_table(("kind", "what is read"), rows)


def kernels_table() -> str:
    """What multiplies packed weights, in the order in which it is asked."""
    rows = [("native", f"`{product.name}`", product.description) for product in NATIVE_PRODUCTS]
    rows += [("native", f"`{name}`", MATMULS[name].description) for name in NATIVE_LAYOUTS]
    layouts = sorted(MATMULS.values(), key=lambda layout: layout.preference)
    native = {*NATIVE_LAYOUTS, *(product.name for product in NATIVE_PRODUCTS)}
    asked = [layout for layout in layouts if layout.name not in native]
    rows += [("packed", f"`{layout.name}`", layout.description) for layout in asked]
    return markdown_table(("mode", "kernel", "what it is"), rows)


def memory_of_training() -> str:
    """What a step takes on each GPU, for two models."""
    return "\n\n".join(terminal("memory", *asked) for asked in _MEMORY_OF_TRAINING)


#: What the page on training asks `bitwright memory` for.
_MEMORY_OF_TRAINING = (
    ("llama-7b", "--policy", "bf16-mixed", "--gpus", "8", "--zero", "3"),
    ("llama-65b", "--policy", "fp8-hybrid", "--gpus", "64", "--zero", "3"),
)


def explained(*asked: str) -> str:
    """One collective step by step."""
    return terminal("comm", "explain", *asked)


def fit_of_bench() -> str:
    """What `comm fit` says of the measurements in docs/snippets."""
    measured_here = (DOCS / "snippets" / "my-bench.json").read_bytes()
    with TemporaryDirectory() as folder, chdir(folder):
        Path("my-bench.json").write_bytes(measured_here)
        return terminal("comm", "fit", "my-bench.json", "--name", "my-cluster", "--out", "my-cluster.toml")


def timeline_of_step() -> str:
    """What `parallel timeline` says; the picture is a page of its own."""
    with TemporaryDirectory() as folder, chdir(folder):
        return terminal("parallel", "timeline", *_TIMELINE)


def timeline_picture() -> str:
    """docs/timeline.svg: the picture that the page's command draws."""
    with TemporaryDirectory() as folder, chdir(folder):
        terminal("parallel", "timeline", *_TIMELINE)
        return Path("timeline.svg").read_text(encoding="utf-8")


#: What the page on communication asks `bitwright parallel` for.
_PLAN = ("llama-3-70b", "--cluster", "h100x8x16", "--global-batch", "1024", "--seq", "8192")
_TIMELINE = (
    "llama-3.2-1b", "--cluster", "h100x8x2", "--fix", "tp=2", "--fix", "pp=1", "--fix", "zero=3", "--global-batch", "8",
    "--out", "trace.json", "--out", "timeline.svg",
)  # fmt: skip

#: Name of a table in a page → what makes it.
TABLES: dict[str, Callable[[], str]] = {
    "targets": targets_table,
    "schemes of targets": target_schemes_table,
    "kinds of checkpoints": sources_table,
    "kernels": kernels_table,
    "products": measured_running.products_table,
    "processors": measured_running.processors_table,
    "decode": measured_running.decode_table,
    "engines": measured_running.engines_table,
    "fp8": measured_running.fp8_table,
    "break-even": measured_running.break_even_table,
    "padding": measured_running.padding_table,
    "keys of training": training_keys.keys_table,
    "policies of training": measured_training.policies_table,
    "policies of devices": measured_training.native_policies_table,
    "three am": measured_training.three_am_table,
    "swallowed updates": measured_training.swallowed_table,
    "small steps": measured_training.small_steps_table,
    "parity": measured_training.parity_table,
    "choice of policies": measured_training.choice_table,
    "cost of policies": measured_training.cost_table,
    "recipes of products": measured_training.products_table,
    "adapters": measured_training.adapters_table,
    "memory of training": memory_of_training,
    "all-reduce": partial(explained, "allreduce", "--ranks", "4", "--algorithm", "ring"),
    "reduce-scatter": partial(explained, "reducescatter", "--ranks", "4"),
    "closed forms": measured_communication.closed_forms_table,
    "collective algorithms": measured_communication.algorithms_table,
    "formats of the wire": measured_communication.formats_table,
    "errors of sums": measured_communication.growth_table,
    "error feedback": measured_communication.feedback_table,
    "fit": fit_of_bench,
    "collective time": partial(terminal, "comm", "time", "allreduce", "--cluster", "h100x8x16", "--size", "64MiB"),
    "accuracy of collectives": measured_communication.collectives_table,
    "network": measured_communication.network_table,
    "overlap": measured_communication.overlap_table,
    "parallel plan": partial(terminal, "parallel", "plan", *_PLAN),
    "parallel timeline": timeline_of_step,
    "parallel serve": partial(terminal, "parallel", "serve", "llama-3-70b", "--cluster", "h100x8"),
    "accuracy of predictions": measured_communication.parts_table,
    "accuracy by source": measured_communication.sources_table,
    "out of memory": measured_communication.out_of_memory_sentence,
    "accuracy of overlap": measured_communication.beside_table,
    "gpu": measured.gpu_sentence,
    "vLLM": measured.vllm_table,
    "llama.cpp": measured.llama_cpp_table,
    "torchao": measured.torchao_table,
    "peers": partial(measured.peers_table, "demo"),
    "peers, dithered": partial(measured.peers_table, "demo-dithered"),
    "peers, encoder": partial(measured.peers_table, "demo-encoder"),
    "peers, second architecture": partial(measured.peers_table, "small-qwen2"),
    "allocation alone": partial(measured_peers.allocation_table, "demo"),
    "seconds beside peers": partial(measured_peers.seconds_table, "demo"),
    "stored bits": partial(measured_peers.stored_table, "demo-dithered"),
    "growth of a search": measured_peers.scale_table,
}
_TABLE = re.compile(r"(<!-- table: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(name: str) -> str:
    """A page of docs/ with its tables as they are now."""
    text = (DOCS / name).read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


_PAGES_WITH_TABLES = (
    "optimize.md", "running.md", "training.md", "communication.md", "exporting.md", "importing.md", "compared.md",
)  # fmt: skip
#: File of docs/ → what makes it.
PAGES = {
    "formats.md": formats_page,
    "quantize.md": quantize_page,
    "schemes.md": schemes_page,
    "hardware.md": hardware_page,
    "engines.md": engines_page,
    "commands.md": commands_page,
    "timeline.svg": timeline_picture,
    **{name: partial(with_tables, name) for name in _PAGES_WITH_TABLES},
}


def main() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
