"""One door for every source of a model.

    load("path/to/folder")      a Hugging Face folder (safetensors)
    load("model.gguf")          a GGUF file, dequantised to fp32
    load("owner/name")          a hub id; the files are fetched once, then it is a folder
    load("demo")                the built-in real model; "demo-dithered" is the same without its 4-bit grid
    load("demo-encoder")        the built-in sentence encoder

What exists on disk is a file or folder; what does not and looks like ``owner/name`` is a hub id; everything else is
a missing path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bitwright.catalog import nearest_name_hint
from bitwright.errors import MissingExtra, ModelError
from bitwright.models.demo import demo_file, dither, encoder_folder
from bitwright.models.gguf_file import load_gguf
from bitwright.models.hf_folder import load_folder
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.models.sites import find_sites

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: What is fetched from the hub, and what is not: weights in folders below the top are other formats of the same model
#: (small .json files there may say how an encoder pools).
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_NOT_BELOW = ("*/*.safetensors", "*/*.bin", "*/*.model", "*/*.txt", "*/*.jinja")


def load(
    source: str | Path, *, allow_pickle: bool = False, seed: int = 0, site_file: Path | str | None = None
) -> LoadedModel:
    """Load a model and its tokenizer: fp32 weights, eval mode, no gradients, on the CPU.

    ``allow_pickle`` accepts pytorch_model.bin files; ``seed`` is that of demo-dithered; ``site_file`` names the sites
    of a model in which `find_sites` finds none. Raises ModelError, naming the file, parameter or architecture at fault,
    and MissingExtra for an absent package.
    """
    if str(source) in BUILT_IN:
        return BUILT_IN[str(source)](str(source), seed)
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path, path.resolve().name, allow_pickle, site_file)
    if path.is_file():
        return _load_file(path, site_file)
    text = str(source)
    names_a_path = isinstance(source, Path) or text.startswith((".", "~", "/")) or path.suffix == ".gguf"
    if names_a_path or not _HUB_ID.fullmatch(text):
        raise ModelError(
            f"no file or folder at {text!r}; pass a model folder, a .gguf file, a hub id such as "
            f"'owner/name', or one of {', '.join(BUILT_IN)}"
        )
    return _load_folder(_fetch(text, allow_pickle), text, allow_pickle, site_file)


def _load_demo(name: str, seed: int) -> LoadedModel:
    model, tokenizer, formats, bits = load_gguf(demo_file())
    return from_memory(model, tokenizer, name=name, loaded_format=formats, loaded_bits=bits)


def _load_dithered(name: str, seed: int) -> LoadedModel:
    model, tokenizer, formats, bits = load_gguf(demo_file())
    decoder = [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]
    dither(model, decoder, seed=seed)
    formats |= {site.parameter: "fp32" for site in decoder}
    bits |= {site.parameter: 32.0 for site in decoder}
    notes = (f"each decoder weight was moved uniformly within the 4-bit bin it was stored in (seed {seed})",)
    return from_memory(model, tokenizer, name=name, loaded_format=formats, loaded_bits=bits, notes=notes)


def _load_encoder(name: str, seed: int) -> LoadedModel:
    return _load_folder(encoder_folder(), name, allow_pickle=False)


def _load_file(path: Path, site_file: Path | str | None) -> LoadedModel:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        model, tokenizer, formats, bits = load_gguf(path)
        return from_memory(
            model, tokenizer, name=path.stem, loaded_format=formats, loaded_bits=bits, site_file=site_file
        )
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} holds weights alone; pass the folder with its config.json: {str(path.parent)!r}")
    raise ModelError(f"{path} is neither a .gguf file nor a model folder; pass one of those")


def _load_folder(folder: Path, name: str, allow_pickle: bool, site_file: Path | str | None = None) -> LoadedModel:
    found = load_folder(folder, allow_pickle=allow_pickle)
    return from_memory(
        found.model,
        found.tokenizer,
        name=name,
        loaded_format=found.formats,
        loaded_bits=found.bits,
        notes=found.notes,
        pooling=found.pooling,
        site_file=site_file,
    )


def _fetch(hub_id: str, allow_pickle: bool) -> Path:
    """Folder of the local copy of a hub repository."""
    try:
        from huggingface_hub import snapshot_download

        from bitwright.models.quiet import quiet_transformers
    except ImportError as error:
        raise MissingExtra("transformers", "hf", f"loading {hub_id!r} from the hub") from error
    patterns = [*_HUB_FILES, "*.bin"] if allow_pickle else list(_HUB_FILES)
    with quiet_transformers():
        try:
            return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=list(_NOT_BELOW)))
        except (OSError, ValueError) as error:
            hint = nearest_name_hint(hub_id, list(BUILT_IN))
            advice = "; check its spelling, or the network, or pass a downloaded folder" if hint == "." else hint
            reason = (str(error).splitlines() or [type(error).__name__])[0].strip()
            raise ModelError(
                f"{hub_id!r} is neither an existing file or folder nor a reachable hub id ({reason}){advice}"
            ) from error


#: Names that are sources of their own: (name, seed) → model.
BUILT_IN: Mapping[str, Callable[[str, int], LoadedModel]] = {
    "demo": _load_demo,
    "demo-dithered": _load_dithered,
    "demo-encoder": _load_encoder,
}
