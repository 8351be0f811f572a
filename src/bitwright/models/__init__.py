"""Load a model and name every site of it; never changes a model.

loaded = models.load("demo")                # a folder, a .gguf file, a hub id, demo, demo-dithered
loaded = models.plain_model(module)         # or any module of your own
sites = models.find_sites(loaded.model)     # every weight whose precision can be chosen
models.site_weight(loaded.model, sites[0])  # its [out, in] view
models.find_value_sites(loaded.model)       # every place where a computed or kept value can be rounded

Importing this page loads no torch: each name is fetched when it is first used, and `models.tensor_files` needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.lazy_page import open_lazily

if TYPE_CHECKING:
    from bitwright.models.demo import demo_file, demo_folder
    from bitwright.models.grid import Grid, detect_grid
    from bitwright.models.load import load
    from bitwright.models.loaded import LoadedModel, from_memory, hash_weights
    from bitwright.models.plain import plain_model
    from bitwright.models.sites import Site, find_sites, site_weight
    from bitwright.models.value_sites import ValueSite, find_value_sites, values_left_out

_HOMES = {
    "Grid": "bitwright.models.grid",
    "LoadedModel": "bitwright.models.loaded",
    "Site": "bitwright.models.sites",
    "ValueSite": "bitwright.models.value_sites",
    "demo_file": "bitwright.models.demo",
    "demo_folder": "bitwright.models.demo",
    "detect_grid": "bitwright.models.grid",
    "find_sites": "bitwright.models.sites",
    "find_value_sites": "bitwright.models.value_sites",
    "from_memory": "bitwright.models.loaded",
    "hash_weights": "bitwright.models.loaded",
    "load": "bitwright.models.load",
    "plain_model": "bitwright.models.plain",
    "site_weight": "bitwright.models.sites",
    "values_left_out": "bitwright.models.value_sites",
}

__all__ = [
    "Grid",
    "LoadedModel",
    "Site",
    "ValueSite",
    "demo_file",
    "demo_folder",
    "detect_grid",
    "find_sites",
    "find_value_sites",
    "from_memory",
    "hash_weights",
    "load",
    "plain_model",
    "site_weight",
    "values_left_out",
]

open_lazily(__name__, _HOMES)
