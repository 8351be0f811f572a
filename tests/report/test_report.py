"""The page: self-contained, complete, the same bytes for the same plan, and honest about what is missing."""

from __future__ import annotations

import builtins
import errno
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fabricated_plan import make_plan, make_sites
from hypothesis import given
from hypothesis import strategies as st

from bitwright.errors import MissingExtra, ReportError
from bitwright.plan import (
    Budget,
    Interval,
    LimitStudy,
    LongerContext,
    Loosened,
    ModelInfo,
    OtherChoice,
    ParetoPoint,
    Robustness,
    SiteChoice,
)
from bitwright.report import group_sites, render_report, total_roles, write_report
from bitwright.report.layer_map import build_layer_map, layer_of
from bitwright.report.limit_words import say_limits
from bitwright.report.palette import ink_on, scheme_colours
from bitwright.report.pareto_figure import overflow_colour
from bitwright.report.render import _balanced
from bitwright.report.units import spell_number

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Balance(HTMLParser):
    """Fails on a tag closed out of order; collects text and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for key, value in attrs if key == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.replace("\u00a0", " "))


def parse(page: bytes) -> Balance:
    parser = Balance()
    parser.feed(page.decode())
    parser.close()
    assert not parser.open
    return parser


@pytest.fixture(scope="module")
def page() -> bytes:
    return render_report(make_plan())


def test_page_is_well_formed_and_same_every_time(page: bytes):
    parse(page)
    assert render_report(make_plan()) == page


def test_page_needs_no_network(page: bytes):
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page.decode())
    assert not re.search(r"https?://|@import|<link|<img|src=|url\((?!#)", text)


def test_page_states_every_figure(page: bytes):
    plan = make_plan()
    text = " ".join(parse(page).text)
    for wanted in (
        "Every limit is met.",
        plan.model.name,
        plan.content_hash,
        plan.decision_hash,
        plan.model.notes[0],
        plan.notes[0],
        f"for {plan.hardware}: {plan.hardware_reason}",
        "predicted KL (nats per token)",
        "measured KL (nats per token)",
        "effective bits (stored bits per decoder weight)",
        "bf16 itself: 0.000310",
        "0.000310",
        "predicted",
        plan.repairs[0].why,
        "88.7 %",
    ):
        assert wanted in text, wanted
    for site in plan.sites:
        assert site.name in text


def test_page_says_which_limit_is_missed_and_by_how_much():
    text = " ".join(" ".join(parse(render_report(make_plan(missed=True))).text).split())
    assert "Not every limit is met" in text
    assert re.search(r"missed · \d+ % over", text)


def test_names_from_outside_cannot_become_markup():
    plan = make_plan(num_layers=1, model=ModelInfo(name="<script>x</script>", hash="0", params=1))
    page = render_report(plan).decode()
    assert "<script>x" not in page
    assert "&lt;script&gt;x&lt;/script&gt;" in page


def test_plan_without_evidence_still_makes_a_page():
    plan = make_plan(
        num_layers=1, measured=None, predictions=(), frontier=(), repairs=(), latency=None, limits=(), options=None
    )
    text = " ".join(parse(render_report(plan)).text)
    assert "predicted, not measured" in text
    assert "Pareto" not in text


def test_ids_of_the_figures_do_not_collide(page: bytes):
    drawings = re.findall(r'<svg class="figure".*?</svg>', page.decode(), flags=re.DOTALL)
    assert len(drawings) == 3
    for first in drawings:
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', first))
        assert used <= set(re.findall(r'id="([^"]+)"', first))
        for other in drawings:
            if other is not first:
                assert not used & set(re.findall(r'id="([^"]+)"', other))


def test_write_is_all_or_nothing(tmp_path: Path, monkeypatch):
    plan = make_plan(num_layers=1)
    target = write_report(plan, tmp_path / "report.html")
    assert target.read_bytes() == render_report(plan)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match="No space left on device"):
        write_report(plan, tmp_path / "other.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ReportError, match="No such file"):
        write_report(plan, tmp_path / "nowhere" / "report.html")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_missing_extra_is_the_pip_line(monkeypatch, package: str):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'bitwright[report]'")):
        render_report(make_plan(num_layers=1))


def test_groups_add_up_to_the_plan():
    plan = make_plan()
    groups = group_sites(plan)
    assert sum(group.num_sites for group in groups) == len(plan.sites)
    assert sum(group.num_bytes for group in groups) == sum(site.bytes for site in plan.sites)
    assert math.fsum(group.predicted_kl for group in groups) == pytest.approx(plan.summary.predicted_kl)
    assert list(dict.fromkeys(group.role for group in groups)) == list(dict.fromkeys(s.role for s in plan.sites))


def test_roles_add_up_to_the_plan_and_carry_their_own_measurement():
    plan = make_plan()
    totals = total_roles(plan)
    assert [total.role for total in totals] == list(dict.fromkeys(site.role for site in plan.sites))
    assert [group for total in totals for group in total.groups] == list(group_sites(plan))
    for total in totals:
        sites = [site for site in plan.sites if site.role == total.role]
        assert total.num_sites == len(sites)
        assert total.num_bytes == sum(site.bytes for site in sites)
        weights = [math.prod(site.shape) for site in sites]
        bits = math.fsum(site.bits * count for site, count in zip(sites, weights, strict=True))
        assert total.bits == pytest.approx(bits / sum(weights))
        assert total.predicted_kl == pytest.approx(math.fsum(site.predicted_kl for site in sites))
        found = [p for p in plan.predictions if p.what == f"{total.role} as planned"]
        assert total.measured_kl == (found[0].measured_kl if found else None)
        assert (total.role == "lm_head") == (total.measured_kl is None)


def rows_of_role(page: bytes, role: str) -> list[list[str]]:
    """The cells of a role's rows in the table of site groups."""
    table = page.decode().split("<h2>Site groups</h2>")[1].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", table)]
    cells = [[re.sub("<[^>]*>", "", cell) for cell in row] for row in rows]
    return [row for row in cells if row and row[0] == role]


def test_a_role_of_several_choices_is_measured_together(page: bytes):
    plan = make_plan()
    total = next(total for total in total_roles(plan) if len(total.groups) > 1)
    *choices, together = rows_of_role(page, total.role)
    assert [row[1] for row in choices] == [group.choice for group in total.groups]
    assert {row[-1] for row in choices} == {""}
    assert together[1:3] == ["together", str(total.num_sites)]
    assert together[-2:] == [spell_number(total.predicted_kl), spell_number(total.measured_kl)]
    (whole,) = rows_of_role(page, "whole plan")
    assert whole[-2:] == [spell_number(plan.summary.predicted_kl), spell_number(plan.measured.kl.mean)]


def test_a_role_of_one_choice_is_one_row():
    plan = make_plan(num_layers=1)
    (row,) = rows_of_role(render_report(plan), "attn.q")
    (point,) = (p for p in plan.predictions if p.kind == "plan_role" and p.role == "attn.q")
    assert row[-2:] == [spell_number(point.predicted_kl), spell_number(point.measured_kl)]


def test_prediction_plot_tells_kinds_apart(page: bytes):
    (plot,) = re.findall(r'<svg class="figure" id="figure-predictions".*?</svg>', page.decode(), flags=re.DOTALL)
    for label in ("one role in int4_g128", "one role in int8_w", "one role as planned", "whole model"):
        assert f">{label}</text>" in plot
    assert "one site" not in plot and "other schemes" not in plot


def test_map_has_one_cell_per_site_and_none_overlaps():
    experts = [
        SiteChoice(
            **{
                **make_sites(1)[0].model_dump(),
                "name": f"model.layers.{layer}.mlp.experts.{expert}.down",
                "role": "expert.down",
            }
        )
        for layer in (0, 1)
        for expert in range(8)
    ]
    plan = make_plan(sites=(*make_sites(2), *experts))
    layout = build_layer_map(plan, dict.fromkeys({site.scheme for site in plan.sites}, "#000000"))
    assert len(layout.cells) + len(layout.outside) == len(plan.sites)
    assert [site.name for site in layout.outside] == ["lm_head"]
    area = {(cell.x, cell.y) for cell in layout.cells}
    assert len(area) == len(layout.cells)
    assert max(cell.x + cell.width for cell in layout.cells) <= layout.width
    assert max(cell.y + cell.height for cell in layout.cells) <= layout.axis_y


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.self_attn.q_proj", 12),
        ("transformer.h.0.attn.c_attn[q]", 0),
        ("model.layers.3.mlp.experts.7.gate_up", 3),
        ("lm_head", None),
    ],
)
def test_layer_of_a_site(name: str, layer: int | None):
    assert layer_of(make_sites(1)[0].model_copy(update={"name": name})) == layer


@given(st.integers(1, 30))
def test_every_scheme_has_its_own_colour(count: int):
    colours = scheme_colours([f"scheme{index}" for index in range(count)])
    assert len(set(colours.values())) == count
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours.values())


def test_ink_contrasts():
    assert ink_on("#ffffff") == "#16181d"
    assert ink_on("#000000") == "#ffffff"


def test_front_names_no_series_that_the_star_hides():
    plan = make_plan()
    assert "the same, measured" in render_report(plan).decode()
    front = tuple(p if p.chosen else p.model_copy(update={"measured_kl": None}) for p in plan.frontier)
    assert "the same, measured" not in render_report(plan.model_copy(update={"frontier": front})).decode()


# --- limits, comparisons, the front, robustness ----------------------------------------------------------------------


def test_no_line_parts_a_number_from_its_unit(page: bytes):
    text = page.decode("utf-8").partition("<main>")[2]
    assert "\u00a0%" in text and "\u00a0MiB" in text
    assert re.search(r">[^<]*\d (%|MiB|ms)[^<]*</(p|li|td)>", text) is None


def test_the_engine_that_was_asked_for_stands_at_the_top():
    plan = make_plan(num_layers=1)
    assert plan.options is not None
    asked = plan.replace(options=plan.options.model_copy(update={"engine": "vllm"}))
    head = render_report(asked).decode("utf-8").partition("</header>")[0]
    assert "engine vllm" in head and "engine" not in render_report(plan).decode("utf-8").partition("</header>")[0]


def test_a_plan_without_limits_says_so():
    plan = make_plan(num_layers=1).replace(budget=Budget(), limits=(), measured=None, met=False)
    text = " ".join(parse(render_report(plan)).text)
    assert "The plan has no limits." in text and "Not every limit" not in text
    assert "neither predicted nor measured" in text


def test_an_optimum_that_measurements_changed_is_told_from_the_plan():
    plan = make_plan(num_layers=1)
    study = LimitStudy(
        name="max_kl",
        limit=0.1,
        binds=True,
        objective="weight_bytes",
        before=98_776_064,
        alone=1.0,
        loosened=(Loosened(by=0.05, value=97_517_568),),
    )
    plan = plan.replace(limit_studies=(study,), summary=plan.summary.model_copy(update={"weight_bytes": 99_090_432}))
    (said,) = say_limits(plan)
    assert said == (
        "max_kl binds: the weights are 94.2 MiB at the optimum of the predictions, 94.5 MiB in the plan; "
        "5 % more would save 1.20 MiB"
    )


@pytest.mark.parametrize(
    ("count", "columns"), [(6, [2, 3, 3, 3, 6]), (7, [2, 3, 4, 4, 4]), (5, [2, 3, 3, 5, 5]), (1, [1] * 5)]
)
def test_rows_of_tiles_are_of_nearly_equal_length(count: int, columns: list[int]):
    assert [_balanced(count, most) for most in range(2, 7)] == columns


def test_what_binds_and_what_was_gained_is_said(page: bytes):
    text = " ".join(parse(page).text)
    assert (
        "effective_bits binds: the predicted KL is " in text
        and "5 % more would make it" in text
        and "max_kl does not bind" in text
    )
    assert "the plan is better beyond the noise" in text


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("within the noise", "no gain is claimed: the difference is within the noise"),
        ("worse", "the plan is worse beyond the noise"),
    ],
)
def test_words_follow_from_the_verdict(verdict: str, words: str):
    found = make_plan().uniform[0].model_copy(update={"verdict": verdict})
    text = " ".join(parse(render_report(make_plan(uniform=(found,)))).text)
    assert words in text and "better beyond" not in text


def test_out_of_reach_says_by_how_much():
    studies = (
        LimitStudy(
            name="max_memory_bytes",
            limit=100 * 2**20,
            binds=False,
            objective="kl",
            alone=125 * 2**20,
            given_others=None,
        ),
        LimitStudy(name="min_tokens_per_s", limit=200.0, binds=False, objective="kl", alone=150.0, given_others=100.0),
    )
    said = say_limits(make_plan(limit_studies=studies))
    assert "the best alone is 125 MiB (25 % over" in said[0] and "contradict each other" in said[0]
    assert "the best alone is 150 (25 % short" in said[1] and "with all others kept 100" in said[1]


def test_the_front_and_its_plot():
    points = [
        ParetoPoint(
            effective_bits=4 + i,
            weight_bytes=(80 + 10 * i) * 2**20,
            predicted_kl=0.1 / 2**i,
            kl=Interval(mean=0.11 / 2**i, low=0.1 / 2**i, high=0.12 / 2**i),
            decode_s_per_token=0.004 + 0.001 * i,
            prefill_s=0.02 - 0.001 * i,
            overflows=0.0 if i % 2 else 3.0,
            fallback_rate=0.0 if i % 2 else 0.002,
            counts={"int4_g128": 10 - i, "bf16": i},
            chosen=i == 2,
        )
        for i in range(5)
    ]
    plan = make_plan(pareto=tuple(points))
    page = render_report(plan)
    text = " ".join(parse(page).text)
    assert "The whole front" in text and b'id="figure-pareto"' in page
    assert render_report(plan) == page
    for point in points:
        assert spell_number(point.kl.mean) in text
    assert len({overflow_colour(value) for value in (0.0, 1.0, 1000.0)}) == 3


def test_robustness_is_told():
    interval = Interval(mean=-0.001, low=-0.002, high=0.001)
    found = Robustness(
        others=(
            OtherChoice(
                what="seed 1",
                same_choice=0.8,
                same_scheme=0.9,
                predicted_kl=0.1,
                kl=Interval(mean=0.1, low=0.09, high=0.11),
                weight_bytes=10**8,
                plan_kl=0.101,
                difference=interval,
                sequences=32,
            ),
        ),
        contexts=(LongerContext(sequence_length=512, kl=interval, tokens=4088, sequences=8),),
        notes=("nothing was measured at 1024 tokens",),
    )
    text = " ".join(parse(render_report(make_plan(robustness=found))).text)
    for wanted in ("seed 1", "80.0 %", "90.0 %", "512", "nothing was measured at 1024 tokens"):
        assert wanted in text


def test_values_that_stay_have_no_cell_and_those_that_are_rounded_have_one():
    cache = make_sites(num_layers=2)[0].model_copy(
        update={
            "name": "model.layers.0.self_attn:k_cache",
            "kind": "state",
            "role": "kv_cache",
            "scheme": "int8_token",
            "shape": (3, 64),
        }
    )
    plan = make_plan(num_layers=2)
    with_one = plan.replace(sites=(*plan.sites, cache))
    kept = cache.model_copy(update={"scheme": "as_loaded"})
    with_none = plan.replace(sites=(*plan.sites, kept))
    colours = {scheme: "#000000" for scheme in ("int4_g128", "int8_w", "bf16", "as_loaded", "int8_token")}
    count = [len(build_layer_map(p, colours).cells) for p in (plan, with_one, with_none)]
    assert count == [14, 15, 14]
