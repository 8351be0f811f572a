"""Which sites have to choose together, since one stored matrix, one kernel or one setting serves them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bitwright.plan.engine import Engine
from bitwright.plan.site_facts import SiteFacts


def ties(sites: Iterable[SiteFacts], engine: Engine | None) -> dict[str, str]:
    """Return site name → name of the group that has to choose together; sites that are free are absent.

    Parts of one stored matrix (`tied_group`) stay together under every engine. An engine adds its fused kernels: sites
    of these roles under one module, or one expert list; caches as its `cache_ties` says. Where an engine runs one
    scheme in a model, all its quantisable sites are one group.
    """
    asked = list(sites)
    parents = {site.name: site.name for site in asked}
    keys: dict[str, str] = {}
    for site in asked:
        for key in _tie_keys(site, engine):
            first = keys.setdefault(key, site.name)
            parents[_root(parents, site.name)] = _root(parents, first)
    groups: dict[str, list[str]] = {}
    for site in asked:
        groups.setdefault(_root(parents, site.name), []).append(site.name)
    names = {
        root: min((key for key, first in keys.items() if _root(parents, first) == root), default=root)
        for root in groups
    }
    return {name: names[root] for root, members in groups.items() if len(members) > 1 for name in members}


def _tie_keys(site: SiteFacts, engine: Engine | None) -> list[str]:
    """Names of what the site is a part of; sites that share one are tied."""
    keys = [] if site.tied_group is None else [site.tied_group]
    if engine is None:
        return keys
    is_cache = site.role == "kv_cache"
    if is_cache and engine.cache_ties != "none":
        keys.append("kv_cache" if engine.cache_ties == "all" else f"kv_cache:{site.name.rpartition(':')[2]}")
    for fused in engine.fused:
        if site.role in fused.roles:
            keys.append(f"{_shared_prefix(site, fused.within)}[{'+'.join(fused.roles)}]")
    if not engine.mixes_schemes and not is_cache and site.role not in engine.kept_roles and ":" not in site.name:
        keys.append("all")
    return keys


def _shared_prefix(site: SiteFacts, within: str | None) -> str:
    if within is None:
        return site.module.rpartition(".")[0]
    head, found, _ = site.module.partition(f".{within}")
    return f"{head}{found}"


def _root(parents: Mapping[str, str], name: str) -> str:
    while parents[name] != name:
        name = parents[name]
    return name
