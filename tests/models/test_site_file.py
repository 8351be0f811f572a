"""Sites named by hand: what a file says is what there is, and what it cannot mean is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bitwright.errors import ModelError
from bitwright.models import find_sites, from_memory, site_weight
from bitwright.models.site_file import matches


class Odd(nn.Module):
    """Matrices under names that no table has, one fused and stored [in, out], one a stack of two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"alpha": nn.Linear(8, 4), "beta": nn.Linear(4, 8)}) for _ in range(2)]
        )
        self.fused = nn.Parameter(torch.arange(8.0 * 12).reshape(8, 12))
        self.stack = nn.Parameter(torch.arange(2.0 * 3 * 8).reshape(2, 3, 8))
        self.filters = nn.Parameter(torch.zeros(2, 2, 3, 3))


@pytest.fixture
def sites_of(tmp_path: Path):
    def find(text: str, model: nn.Module | None = None):
        path = tmp_path / "sites.toml"
        path.write_text(text, encoding="utf-8")
        return find_sites(model or Odd(), path)

    return find


def test_patterns_name_modules_and_parameters(sites_of) -> None:
    found = sites_of(
        '[[site]]\nmodule = "blocks.*.alpha"\nrole = "mlp.up"\n[[site]]\nparameter = "blocks.1.beta.weight"\n'
    )
    assert [(site.name, site.role, site.parameter, site.shape) for site in found] == [
        ("blocks.0.alpha", "mlp.up", "blocks.0.alpha.weight", (4, 8)),
        ("blocks.1.alpha", "mlp.up", "blocks.1.alpha.weight", (4, 8)),
        ("blocks.1.beta", "other", "blocks.1.beta.weight", (8, 4)),
    ]


def test_rows_of_a_transposed_matrix_are_columns_of_what_is_stored(sites_of) -> None:
    entry = '[[site]]\nparameter = "fused"\ntransposed = true\nrole = "attn.{0}"\npart = "{0}"\nrows = [{1}, {2}]\n'
    model = Odd()
    found = sites_of(entry.format("q", 0, 4) + entry.format("k", 4, 8), model)
    assert [site.name for site in found] == ["fused[q]", "fused[k]"]
    assert {site.tied_group for site in found} == {"fused"}
    assert torch.equal(site_weight(model, found[1]), model.fused[:, 4:8].T)


def test_a_stack_of_matrices_is_one_site_each(sites_of) -> None:
    model = Odd()
    found = sites_of('[[site]]\nparameter = "stack"\nrole = "expert.up"\n', model)
    assert [(site.name, site.expert, site.shape) for site in found] == [("stack.0", 0, (3, 8)), ("stack.1", 1, (3, 8))]
    assert torch.equal(site_weight(model, found[1]), model.stack[1])


def test_a_tied_group_is_told_by_what_lies_around(sites_of) -> None:
    found = sites_of('[[site]]\nmodule = "blocks.*.*"\ntied_group = "{parent}.all"\n')
    assert {site.name: site.tied_group for site in found} == {
        f"blocks.{layer}.{name}": f"blocks.{layer}.all" for layer in range(2) for name in ("alpha", "beta")
    }


def test_what_is_kept_is_no_site_and_an_empty_file_names_none(sites_of) -> None:
    found = sites_of('[[site]]\nmodule = "blocks.0.**"\nkeep = true\n[[site]]\nmodule = "blocks.1.alpha"\n')
    assert [site.name for site in found] == ["blocks.1.alpha"]
    assert sites_of("") == ()


def test_tied_weights_are_one_site_with_all_their_uses(sites_of) -> None:
    model = Odd()
    model.blocks[1]["alpha"].weight = model.blocks[0]["alpha"].weight
    (site,) = sites_of('[[site]]\nmodule = "blocks.1.alpha"\n', model)
    assert site.parameter == "blocks.0.alpha.weight"
    assert site.uses == ("blocks.0.alpha", "blocks.1.alpha")
    with pytest.raises(ModelError, match=r"entry 1 \('blocks.0.alpha'\) and entry 2 \('blocks.1.alpha'\)"):
        sites_of('[[site]]\nmodule = "blocks.0.alpha"\n[[site]]\nmodule = "blocks.1.alpha"\n', model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[site]]\nmodule = "block.*.alpha"\n', r"entry 1 \('block.\*.alpha'\).*matches no module.*blocks.0.alpha"),
        ('[[site]]\nmodule = "blocks.*"\n', "matches no module with a weight matrix"),
        ('[[site]]\nparameter = "filters"\n', "matches no parameter that is a matrix"),
        (
            '[[site]]\nmodule = "blocks.**"\n[[site]]\nmodule = "*.1.beta"\nkeep = true\n',
            r"entry 1 \('blocks.\*\*'\) and entry 2 \('\*.1.beta'\) of the sites file both claim blocks.1.beta.weight",
        ),
        ('[[site]]\nparameter = "fused"\nrows = [0, 12]\n', r"rows \[0, 12\) of fused, which has 8 .*transposed"),
        ('[[site]]\nparameter = "fused"\nrows = [4, 4]\n', "first < last"),
        ('[[site]]\nparameter = "fused"\nrows = [4]\n', "entry 1, rows"),
        ('[[site]]\nrole = "attn.q"\n', "either a module or a parameter"),
        ('[[site]]\nmodule = "a"\nparameter = "b"\n', "either a module or a parameter"),
        ('[[site]]\nmodule = "a"\nrole = "attn.w"\n', r"role 'attn.w'; did you mean 'attn\..'\? Roles: "),
        ('[[site]]\nmodule = "a"\nrolle = "attn.q"\n', "rolle.*did you mean 'role'"),
        ('[[site]]\nmodule = "a"\nkeep = true\nrole = "attn.q"\n', "nothing else can be said"),
        ('[[site]]\nmodule = "a"\npart = "q"\n', "no rows that it is"),
        ('[site]\nmodule = "a"\n', r"\[\[site\]\]"),
        ('[[sites]]\nmodule = "a"\n', "has 'sites'"),
        ("[[site]\n", "no valid TOML"),
    ],
)
def test_what_a_file_cannot_mean_is_refused(sites_of, text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        sites_of(text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ModelError, match=r"nowhere\.toml cannot be read: No such file"):
        find_sites(Odd(), "nowhere.toml")


def test_a_pattern_is_anchored_and_stays_within_components() -> None:
    assert matches("blocks.*.fc1", "blocks.0.fc1")
    assert not matches("blocks.*.fc1", "blocks.0.mlp.fc1")
    assert not matches("fc1", "blocks.0.fc1")
    assert not matches("blocks.0.fc", "blocks.0.fc1")
    assert matches("blocks.**.fc1", "blocks.0.mlp.fc1") and matches("**", "a.b") and matches("blocks.**", "blocks")
    assert matches("h[12].w", "h1.w") and not matches("h[12].w", "h3.w")


def test_a_model_without_a_site_of_its_own_is_loaded_with_a_file(tmp_path: Path) -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stuff = nn.ParameterDict({"w": nn.Parameter(torch.ones(32, 32))})

    with pytest.raises(ModelError, match=r"matrices: stuff\.w \[32, 32\]; .*--sites"):
        from_memory(Strange(), None, name="strange")
    path = tmp_path / "sites.toml"
    path.write_text('[[site]]\nparameter = "stuff.*"\n', encoding="utf-8")
    loaded = from_memory(Strange(), None, name="strange", site_file=path)
    assert [site.name for site in find_sites(loaded.model, path)] == ["stuff.w"]
