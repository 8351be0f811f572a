"""Clusters by name and count, groups of their ranks, and files that lack something."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwright.comms import TOPOLOGIES, read_topology_file, topology, write_topology_text
from bitwright.errors import CommsError, UnknownName

FILE = """
name = "mine"
[[levels]]
kind = "bus"
medium = "pci"
members = 4
one_way_gb_per_s = 10
source = "measured here"
certainty = "measured"
[[levels]]
kind = "Ethernet"
medium = "network"
members = 2
one_way_gb_per_s = 1
source = "measured here"
certainty = "measured"
"""


@pytest.mark.parametrize("name", TOPOLOGIES.names)
def test_a_topology_reads_back_as_it_is_written(name: str, tmp_path: Path) -> None:
    record = TOPOLOGIES.get(name)
    (tmp_path / "copy.toml").write_text(write_topology_text(record), encoding="utf-8")
    assert read_topology_file(tmp_path / "copy.toml") == record


@pytest.mark.parametrize(
    ("spelled", "counts"),
    [("h100x8x16", (8, 16)), ("h100", (8, 1)), ("rtx4090x4", (4, 1)), ("mi300x", (8, 1)), ("GB200x72x2", (72, 2))],
)
def test_a_name_spells_its_counts(spelled: str, counts: tuple[int, ...]) -> None:
    found = topology(spelled)
    assert found.counts == counts


@pytest.mark.parametrize(
    ("num_ranks", "stride", "counts"),
    [
        (8, 1, (8, 1)),  # the GPUs of a node
        (4, 1, (4, 1)),
        (4, 2, (4, 1)),  # every second GPU of a node
        (16, 8, (1, 16)),  # one GPU of each node
        (64, 2, (4, 16)),  # every second GPU of all nodes
        (4, 32, (1, 4)),  # one GPU of every fourth node
        (128, 1, (8, 16)),
    ],
)
def test_a_group_spans_the_levels_that_its_ranks_do(num_ranks: int, stride: int, counts: tuple[int, int]) -> None:
    assert topology("h100x8x16").group(num_ranks, stride=stride).counts == counts


@pytest.mark.parametrize(
    ("num_ranks", "stride", "words"),
    [(256, 1, "does not fit into the 128 ranks"), (12, 1, "unevenly"), (2, 3, "do not divide"), (32, 8, "fit")],
)
def test_a_group_that_cannot_be_is_refused(num_ranks: int, stride: int, words: str) -> None:
    with pytest.raises(CommsError, match=words):
        topology("h100x8x16").group(num_ranks, stride=stride)


def test_counts_that_no_level_has_are_refused() -> None:
    with pytest.raises(CommsError, match="1 to 8 by NVSwitch"):
        topology("h100x16x2")
    with pytest.raises(CommsError, match="names 3 levels"):
        topology("h100x8x2x2")
    with pytest.raises(UnknownName, match="did you mean 'h100"):
        topology("h10x8")


def test_a_file_of_ones_own_is_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE, encoding="utf-8")
    assert topology(str(path)).counts == (4, 2)
    assert topology(f"{path}x2x2").counts == (2, 2)


@pytest.mark.parametrize(
    ("line", "put", "words"),
    [
        ("one_way_gb_per_s = 1\n", "", "lacks levels.1.one_way_gb_per_s"),
        ("one_way_gb_per_s = 1\n", "one_way_gb_per_s = 0\n", "levels.1.one_way_gb_per_s"),
        ('medium = "pci"', 'medium = "string"', "levels.0.medium"),
        ("members = 4", "members = 4\nlanes = 3", "levels.0.lanes"),
        ('name = "mine"', 'name = "mine"\ndevice = "h1000"', "h100"),
    ],
)
def test_a_file_with_a_missing_or_wrong_field_names_it(tmp_path: Path, line: str, put: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace(line, put), encoding="utf-8")
    with pytest.raises((CommsError, UnknownName), match=words):
        read_topology_file(path)
