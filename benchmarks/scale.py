"""Whole searches with --low-memory on random models of Qwen2's shape: how time and peak memory grow with size and text.

    python benchmarks/scale.py sizes           more layers and width, up to Qwen2-1.5B's, the same text
    python benchmarks/scale.py tokens          one model, more calibration text
    python benchmarks/scale.py all             both, then the plot

Results go to benchmarks/results/scale.json, point by point, and scale.svg shows them. Each search is a process of its
own. Models are random, with 151,936 tokens in their vocabulary of which a byte tokenizer uses 256: neither time nor
memory depends on what weights or text say. Two schemes, round-to-nearest and gradient-aware rounding. The text is
small, so that the largest model is done within an hour on two idle cores: 512 calibration tokens, and for repair and
for the proof the least that a search takes, 64 sequences, here of 64 tokens. What grows with text is shown on its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import load_average, machine, now

RESULTS = Path(__file__).parent / "results"
SCHEMES = ("int4_g128", "int8_w")
CALIBRATION_TOKENS = 512
SEQUENCE_LENGTH = 64
EVALUATION_SEQUENCES = 64
#: Name → (layers, hidden, intermediate, heads, key-value heads): Qwen2-0.5B and Qwen2-1.5B, and what is smaller in the
#: same shape.
SHAPES = {
    "0.1B": (4, 512, 2816, 8, 2),
    "0.3B": (8, 896, 4864, 14, 2),
    "0.5B": (24, 896, 4864, 14, 2),
    "0.9B": (14, 1536, 8960, 12, 2),
    "1.5B": (28, 1536, 8960, 12, 2),
}
TOKENS = (512, 1024, 2048, 4096)
TOKENS_SHAPE = "0.1B"
#: What has to hold for the largest.
LIMIT_GIB = 10

_SEARCH = """
import json, sys
import bitwright
from bitwright import Budget
a = json.loads(sys.argv[1])
plan = bitwright.optimize(
    a["model"], budget=Budget(effective_bits=6.0), schemes=a["schemes"], roundings=("rtn", "gradient_aware"),
    transforms=("none",), tokens=a["tokens"], sequence_length=a["length"],
    evaluation_tokens=a["evaluation_tokens"], calibration=a["text"], evaluation=a["text"],
    cache=a["cache"], low_memory=a["low_memory"],
)
print(json.dumps({
    "timings_s": dict(plan.run.timings), "peak_memory_gib": plan.run.peak_memory_bytes / 2**30,
    "parameters": plan.model.params, "effective_bits": plan.summary.effective_bits,
    "decision": plan.decision_hash,
}))
"""


def write_model(folder: Path, shape: tuple[int, int, int, int, int]) -> None:
    """A random model in bf16, layer by layer: it is never in memory as a whole."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    layers, hidden, intermediate, heads, kv_heads = shape
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["Qwen2ForCausalLM"],
    )
    with torch.device("meta"):
        empty = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    shards: dict[str, dict[str, Any]] = {}
    for name, parameter in empty.named_parameters():
        part = ".".join(name.split(".")[:3]) if ".layers." in name else "ends"
        shards.setdefault(part, {})[name] = tuple(parameter.shape)
    index, total = {}, 0
    for number, tensors in enumerate(shards.values()):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        content = {}
        for name, size in tensors.items():
            values = torch.empty(size, dtype=torch.bfloat16)
            is_norm = name.endswith("norm.weight")
            content[name] = values.fill_(1.0) if is_norm else values.normal_(std=0.02, generator=generator)
            index[name] = file
            total += values.nbytes
        save_file(content, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}), encoding="utf-8"
    )
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    """Every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: rank for rank, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_text(path: Path) -> None:
    """English prose that every Python has."""
    from pydoc_data.topics import topics

    path.write_text("\n\n".join(topics.values()), encoding="utf-8")


def search(folder: Path, model: Path, tokens: int, *, low_memory: bool = True) -> dict[str, Any]:
    """One search in a fresh process with a fresh cache."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        arguments = {
            "model": str(model),
            "schemes": SCHEMES,
            "tokens": tokens,
            "length": SEQUENCE_LENGTH,
            "evaluation_tokens": EVALUATION_SEQUENCES * SEQUENCE_LENGTH,
            "text": str(folder / "text.txt"),
            "cache": cache,
            "low_memory": low_memory,
        }
        load, begin, used = load_average(), time.perf_counter(), processor_seconds()
        run = subprocess.run(
            [sys.executable, "-c", _SEARCH, json.dumps(arguments)], stdout=subprocess.PIPE, text=True, check=True
        )
        wall, used = time.perf_counter() - begin, processor_seconds() - used
    found = json.loads(run.stdout.splitlines()[-1])
    times = {"wall_s": wall, "processor_s": used, "load_average_before": load}
    return {"calibration_tokens": tokens, **times, "date": now(), **found}


def processor_seconds() -> float:
    """Of all processes that have ended, in all threads: a machine that others use too changes it little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read() -> dict[str, Any]:
    """What is filed already."""
    path = RESULTS / "scale.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"sizes": {}, "tokens": {}, **known}


def write(content: dict[str, Any]) -> None:
    """Write the result file."""
    what = (
        f"optimize with low_memory, {' and '.join(SCHEMES)} under rtn and gradient_aware, at most 6 bits, calibration "
        f"in sequences of {SEQUENCE_LENGTH}, {EVALUATION_SEQUENCES} x {SEQUENCE_LENGTH} repair and final tokens each; "
        "processor_s counts all threads; the other times are those of a shared machine, see load_average_before"
    )
    filed = {**content, "what": what, "machine": machine(("torch", "transformers", "numpy"))}
    (RESULTS / "scale.json").write_text(json.dumps(filed, indent=1) + "\n", encoding="utf-8")


def measure(folder: Path, parts: set[str], sizes: list[str]) -> None:
    """Run what was asked for, and file every point as soon as it is known."""
    write_text(folder / "text.txt")
    wanted = [("sizes", name, name, CALIBRATION_TOKENS) for name in sizes if "sizes" in parts]
    wanted += [("tokens", f"{n}", TOKENS_SHAPE, n) for n in TOKENS if "tokens" in parts]
    for part, key, shape, tokens in wanted:
        with tempfile.TemporaryDirectory(dir=folder) as model:
            write_model(Path(model), SHAPES[shape])
            found = search(folder, Path(model), tokens)
        content = read()
        content[part][key] = {"shape": shape, **found}
        write(content)
        print(part, key, json.dumps(found), file=sys.stderr, flush=True)


def fit(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Least squares of y = a + b x: a, b, and the share of the variance that the line explains."""
    import numpy as np

    x, y = np.array(pairs).T
    slope, start = np.polyfit(x, y, 1)
    left = np.square(y - start - slope * x).sum()
    return float(start), float(slope), float(1 - left / np.square(y - y.mean()).sum())


def plot() -> None:
    """Processor time and peak memory over parameters, and over tokens, each with its straight line."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    found = read()
    by_size = sorted(found["sizes"].values(), key=lambda point: point["parameters"])
    by_tokens = sorted(found["tokens"].values(), key=lambda point: point["calibration_tokens"])
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    lines = {}
    for column, (points, name, x_of) in enumerate(
        (
            (by_size, "parameters (billions)", lambda point: point["parameters"] / 1e9),
            (by_tokens, "calibration tokens (thousands)", lambda point: point["calibration_tokens"] / 1e3),
        )
    ):
        for row, (what, y_of) in enumerate(
            (
                ("processor minutes", lambda p: p["processor_s"] / 60),
                ("peak memory (GiB)", lambda p: p["peak_memory_gib"]),
            )
        ):
            axis = axes[row, column]
            pairs = [(x_of(point), y_of(point)) for point in points]
            if not pairs:  # filed later
                axis.set_visible(False)
                continue
            if len(pairs) >= 2:
                start, slope, share = fit(pairs)
                lines[f"{what} over {name}"] = {"at_zero": start, "slope": slope, "r_squared": share}
                ends = [0.0, 1.05 * max(x for x, _ in pairs)]
                axis.plot(ends, [start + slope * x for x in ends], color="0.6", linewidth=1, zorder=1)
                axis.set_title(f"{start:.2f} + {slope:.2f} x,  R² = {share:.3f}", fontsize=9, loc="left")
            axis.scatter(*zip(*pairs, strict=True), color="C0", zorder=2)
            if what.startswith("peak") and points is by_size:
                axis.axhline(LIMIT_GIB, color="C3", linestyle="--", linewidth=1)
                axis.annotate(f"{LIMIT_GIB} GiB", (0, LIMIT_GIB), xytext=(2, 3), textcoords="offset points", color="C3")
            axis.set(xlabel=name, ylabel=what, xlim=(0, None), ylim=(0, None))
            axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"optimize --low-memory on random Qwen2-shaped models, {found['machine']['cpu']}", fontsize=10)
    figure.savefig(RESULTS / "scale.svg")
    write({**found, "lines": lines})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["sizes", "tokens", "plot", "all"])
    parser.add_argument("--size", action="append", choices=list(SHAPES), help="only these sizes")
    parser.add_argument("--folder", type=Path, help="where models and spools go; on a disk")
    arguments = parser.parse_args()
    parts = {"sizes", "tokens"} if arguments.part == "all" else {arguments.part}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if parts & {"sizes", "tokens"}:
            measure(Path(folder), parts, arguments.size or list(SHAPES))
    plot()


if __name__ == "__main__":
    main()
