"""The plot of a checkpoint's magnitudes: self-contained, repeatable, whole or not there."""

from __future__ import annotations

import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitwright.errors import ReportError
from bitwright.models.tensor_files import list_tensors
from bitwright.models.tensor_survey import Survey, survey_tensors
from bitwright.report.histogram_page import draw_png, raise_if_no_place, render_page, write_histogram

NAMES = ["bf16", "fp8_e4m3", "fp4_e2m1", "int8"]


def make_survey(folder: Path, *, scaled: bool = False) -> Survey:
    draw = torch.Generator().manual_seed(0)
    tensors = {"a.weight": torch.randn(64, 8, generator=draw), "<b>": torch.zeros(3)}
    save_file(tensors, folder / "a.safetensors")
    return survey_tensors(list_tensors(folder), NAMES, scaled=scaled, per_tensor=True)


class Page(HTMLParser):
    """Collects what a page shows and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            str(value) for key, value in attributes if key in ("src", "href") and not str(value).startswith("#")
        ]

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_page_shows_plot_shares_and_tensors(tmp_path: Path, scaled: bool) -> None:
    survey = make_survey(tmp_path, scaled=scaled)
    content = render_page(survey, "a & b.safetensors")
    page = Page(content.decode())
    assert {"svg", "table"} <= set(page.tags) and "b" not in page.tags and page.fetched == []
    assert {"a & b.safetensors", "a.weight", "<b>", *NAMES, "% of finite values"} <= set(page.words)
    assert render_page(survey, "a & b.safetensors") == content


def test_a_png_has_the_plot_alone(tmp_path: Path) -> None:
    survey = make_survey(tmp_path)
    content = draw_png(survey, "a.safetensors")
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000 and height > 500
    assert draw_png(survey, "a.safetensors") == content


def test_all_zeros_are_drawn_too(tmp_path: Path) -> None:
    save_file({"zeros": torch.zeros(5)}, tmp_path / "a.safetensors")
    assert b"100.0 %" in render_page(survey_tensors(list_tensors(tmp_path), NAMES), "zeros")


@pytest.mark.parametrize("name", ["plot.png", "plot.HTML"])
def test_files_are_written_whole(tmp_path: Path, name: str) -> None:
    survey = make_survey(tmp_path)
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / name
    target.write_text("before")
    assert write_histogram(survey, "a", target) == target
    assert target.read_bytes() == (render_page(survey, "a") if name.endswith("HTML") else draw_png(survey, "a"))
    assert [path.name for path in target.parent.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plot.svg", "ends in '.svg', which tells how to draw; name a file that ends in .png or .html"),
        ("plot", "'.*plot' has no ending, which tells how to draw; name a file that ends in .png or .html"),
        ("absent/plot.png", "which is no folder"),
        ("folder.png", "is a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ReportError, match=message):
        raise_if_no_place(tmp_path / name)
