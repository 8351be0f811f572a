"""Load a model and name every site of it; never changes a model.

loaded = models.load("demo")                # a folder, a .gguf file, a hub id, demo, demo-dithered
sites = models.find_sites(loaded.model)     # every weight whose precision can be chosen
models.site_weight(loaded.model, sites[0])  # its [out, in] view
"""

from __future__ import annotations

from bitwright.models.demo import demo_file, demo_folder
from bitwright.models.grid import Grid, detect_grid
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel, from_memory, hash_weights
from bitwright.models.sites import Site, find_sites, site_weight

__all__ = [
    "Grid",
    "LoadedModel",
    "Site",
    "demo_file",
    "demo_folder",
    "detect_grid",
    "find_sites",
    "from_memory",
    "hash_weights",
    "load",
    "site_weight",
]
