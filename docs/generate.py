"""Write the pages that are tables of what exists: formats, schemes, devices, commands.

    make docs          # or: python docs/generate.py

Everything comes from the catalogs, so the pages cannot tell of anything that is not there; the tests hold them against
the catalogs (tests/docs/test_generated_pages.py). To change a page, change the record or the text below.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from bitwright import formats, hardware
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS, TensorScheme
from bitwright.search.settings import default_schemes

DOCS = Path(__file__).parent
_NOTICE = "<!-- Written by docs/generate.py; change that or the catalogs, not this page. -->"
#: Bits per weight are stated for a matrix whose sides every group size divides.
_SIDE = 4096
_TRANSFORMS: Mapping[str, Any] = TRANSFORMS
#: What stands for a value where an option does not name it.
_VALUE_NAMES = {str: "NAME", int: "N", float: "X", float | None: "X", int | None: "N"}


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a title that ends in ":" stands over numbers, which are set to the right."""
    head = [title.removesuffix(":") for title in titles]
    rule = ["--:" if title.endswith(":") else "---" for title in titles]
    cells = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def formats_page() -> str:
    """docs/formats.md"""
    rows = [
        (
            f"`{row.name}`",
            str(row.bits),
            row.layout,
            f"{row.max:.6g}",
            f"{row.min_normal:.3g}",
            "" if row.min_subnormal is None else f"{row.min_subnormal:.3g}",
            f"{row.decimal_digits:.1f}",
            " ".join([*(["Inf"] if row.has_inf else []), *(["NaN"] if row.has_nan else [])]),
            ", ".join(f"`{alias}`" for alias in row.aliases),
        )
        for row in formats.rows()
    ]
    titles = ("format", "bits:", "layout", "max:", "min normal:", "min subnormal:", "digits:", "specials", "aliases")
    sources = markdown_table(("format", "source"), [(f"`{row.name}`", row.source) for row in formats.rows()])
    return f"""# Formats: what one number is

{_NOTICE}

{markdown_table(titles, rows)}

*Layout*: bits of sign · exponent · fraction. *Min normal*: the smallest positive value with full precision. *Digits*:
decimal digits that the significand is worth. *Aliases* are names of other libraries; they are accepted where text comes
in (command line, files, checkpoints) and nowhere else.

A format says nothing of scales: those belong to a [scheme](schemes.md). Two formats may share a layout and differ in
their special values: OCP's `fp8_e4m3` gives up Inf and reaches 448, MI300's `fp8_e4m3fnuz` also gives up −0 and reaches
240. The same byte means twice as much in the first as in the second.

## Sources

{sources}
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
    return f"""# Schemes: how a tensor becomes codes

{_NOTICE}

A choice at a site is a scheme, a rounding and a transform. A scheme is number format plus scaling, for weights and for
the activations that enter the layer.

{markdown_table(("scheme", "bits:", "weights", "activations", "source"), rows)}

*Bits*: stored bits per weight of a {_SIDE} × {_SIDE} matrix, scales and offsets included. *Row*: one scale per output
channel of a weight, or per token of an activation; scales of activations are found on every call. *group(n)*: one scale
per n consecutive weights of a row. Where n does not divide the row, the last group is shorter; a plan says so, since
some engines refuse it.

`scale` always multiplies codes back to values:

| symmetry | value | who stores it so |
| --- | --- | --- |
| symmetric | `code · scale` | most integer and all floating schemes |
| zero_point (`_zp`) | `(code − zero_point) · scale` | AWQ, GPTQ, compressed-tensors |
| minimum (`_min`) | `code · scale + minimum` | GGUF's Q4_1 |

Unless `--schemes` names others, bitwright chooses among these:
{", ".join(f"`{name}`" for name in default_schemes())}.
They leave activations in 16 bits, since no limit that can be given asks for faster matrix products, and rounding
activations further could only lose quality.

## Roundings: how codes are found

{markdown_table(("rounding", "what it does"), roundings)}

## Transforms: what is done to the tensor before

{markdown_table(("transform", "what it does"), transforms)}
"""


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
measured. Times that follow from these figures (`time = max(operations / rate, bytes / bandwidth)`) are always called
predicted.

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
    from bitwright.cli.app import create_app

    parts = [_command(str(command.name), command.callback) for command in create_app().registered_commands]
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


def _command(name: str, verb: Any) -> str:
    """One command, read off the signature of its function."""
    usage = ["bitwright", name]
    rows: list[tuple[str, str, str]] = []
    hints = get_type_hints(verb, include_extras=True)
    for parameter in inspect.signature(verb).parameters.values():
        value_type, info = get_args(hints[parameter.name])
        if isinstance(info, typer.models.ArgumentInfo):
            usage.append(str(info.metavar))
            rows.append((f"`{info.metavar}`", "required", str(info.help)))
            continue
        option = "--" + parameter.name.replace("_", "-")
        is_flag = value_type is bool
        if not is_flag:
            option += f" {info.metavar or _VALUE_NAMES[value_type]}"
        default = "" if is_flag or parameter.default is None else f"`{parameter.default}`"
        rows.append((f"`{option}`", default, str(info.help)))
    parts = [f"## `{' '.join(usage)}`", inspect.cleandoc(verb.__doc__ or "")]
    if rows:
        parts.append(markdown_table(("argument", "default", "meaning"), rows))
    return "\n\n".join(parts)


#: File of docs/ → what makes it.
PAGES = {
    "formats.md": formats_page,
    "schemes.md": schemes_page,
    "hardware.md": hardware_page,
    "commands.md": commands_page,
}


def main() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
