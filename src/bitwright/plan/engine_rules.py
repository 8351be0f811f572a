"""What an engine runs: a scheme has to fit one of its kinds, and the site's shape has to suit that kind.

Of kinds that a scheme does not fit, the one that it fits longest, fact after fact (format, inputs, who shares a scale,
group size, symmetry, format of the scales), is the one it was meant for: its first difference is the reason. Of kinds
that it fits, those count that have kernels on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright import formats
from bitwright.hardware import Device
from bitwright.plan.engine import Engine, ValueKind, WeightKind
from bitwright.plan.site_facts import SiteFacts, TransformFacts
from bitwright.quantize.scheme import Scaling, Scheme, TensorScheme
from bitwright.quantize.value_scheme import ValueScheme

#: Kind of device → as reasons call one.
_SPOKEN = {"gpu": "a GPU", "cpu": "a CPU", "accelerator": "an accelerator"}
#: Whether a fact fits, and what an engine has or runs in its place.
_Check = tuple[bool, str]


def engine_reason(
    site: SiteFacts, scheme: Scheme, weights: TensorScheme, engine: Engine, device: Device | None = None
) -> str | None:
    """Why an engine does not run a scheme's weights and inputs at a site, on a device if one is given; None if so."""
    if (nowhere := _engine_kernel_reason(engine, device)) is not None:
        return nowhere
    if weights.scaling is None:
        computed = weights.format if scheme.activations is None else scheme.activations.format
        return _plain_reason(weights.format, engine) or _plain_reason(computed, engine)
    if site.role in engine.kept_roles:
        return f"{engine.name} keeps {site.role} in {_either(engine.plain_formats)}"
    differences = [_difference(_weight_checks(kind, scheme, weights, weights.scaling)) for kind in engine.weights]
    fitting = [kind for kind, found in zip(engine.weights, differences, strict=True) if found is None]
    if fitting:
        return _first_unless_any_runs(
            [
                (_kernel_reason(kind, engine, device), _shape_reason(kind, weights.scaling, site, engine))
                for kind in fitting
            ]
        )
    return f"{engine.name} {_closest(differences, f'has no {weights.format} weights')}"


def engine_value_reason(
    site: SiteFacts, scheme: ValueScheme, engine: Engine, device: Device | None = None
) -> str | None:
    """Why an engine does not compute or keep values so, on a device if one is given; None if it does."""
    if (nowhere := _engine_kernel_reason(engine, device)) is not None:
        return nowhere
    values = scheme.values
    if values.scaling is None:
        if site.role in engine.fp32_roles and formats.FORMATS[values.format].bits < 32:
            return f"{engine.name} computes {site.role} in fp32"
        return _plain_reason(values.format, engine)
    kinds = [kind for kind in engine.values if site.role in kind.roles]
    if not kinds:
        return f"{engine.name} has no rounded {site.role}: it stays in {_either(engine.plain_formats)}"
    differences = [_difference(_value_checks(kind, scheme, values.scaling)) for kind in kinds]
    if None not in differences:
        return f"{engine.name} {_closest(differences, f'has no {values.format} there')}"
    fitting = [kind for kind, found in zip(kinds, differences, strict=True) if found is None]
    without_kernel = _first_unless_any_runs([(_kernel_reason(kind, engine, device), None) for kind in fitting])
    if without_kernel is not None:
        return without_kernel
    size, width = values.scaling.granularity.group_size, site.shape[1]
    # groups of a channel run over tokens
    if scheme.axis == "token" and 0 < size < width and width % size:
        return f"{engine.name} refuses groups of {size} in {width} numbers, which they do not divide"
    return None


def transform_reason(site: SiteFacts, transform: TransformFacts, engine: Engine) -> str | None:
    """Why an engine cannot change the inputs of a site as a transform asks; None if it can."""
    if not transform.parts:
        return None
    able = [kind for kind in engine.transforms if transform.parts <= set(kind.parts)]
    if not able:
        return f"{engine.name} cannot apply {transform.name} to the inputs of a layer"
    if any(not kind.roles or site.role in kind.roles for kind in able):
        return None
    return f"{engine.name} can apply {transform.name} at {', '.join(able[0].roles)} only ({able[0].how})"


def is_folded(transform: TransformFacts, engine: Engine | None) -> bool:
    """Say whether an engine has a transform only as factors in the norm before."""
    able = () if engine is None else tuple(k for k in engine.transforms if transform.parts <= set(k.parts))
    return bool(transform.parts) and bool(able) and all(kind.folded for kind in able)


def negative_scales_allowed(scheme: Scheme, engine: Engine) -> bool:
    """Say whether the kind that a weight scheme is to an engine stores negative scales."""
    return any(kind.negative_scales for kind in _kinds_of(scheme, engine))


def runs_alone(scheme: Scheme, engine: Engine) -> bool:
    """Say whether the kind that a weight scheme is to an engine goes with no other scheme of a model."""
    kinds = _kinds_of(scheme, engine)
    return bool(kinds) and all(kind.alone for kind in kinds)


def _kinds_of(scheme: Scheme, engine: Engine) -> list[WeightKind]:
    """The kinds of an engine's that a scheme is."""
    weights = scheme.weights
    if weights is None or weights.scaling is None:
        return []
    checked = ((kind, _weight_checks(kind, scheme, weights, weights.scaling)) for kind in engine.weights)
    return [kind for kind, checks in checked if _difference(checks) is None]


def runs_on(engine: Engine, device: Device) -> bool:
    """Say whether an engine runs on a device's kind at all."""
    return not engine.device_kinds or device.kind in engine.device_kinds


def _engine_kernel_reason(engine: Engine, device: Device | None) -> str | None:
    if device is None or runs_on(engine, device):
        return None
    return f"{engine.name} runs on {_either([_SPOKEN[kind] for kind in engine.device_kinds])}, and not on {device.name}"


def _kernel_reason(kind: WeightKind | ValueKind, engine: Engine, device: Device | None) -> str | None:
    """Why an engine has no kernel for a kind on a device; None if it has, or if the device's file does not tell."""
    if device is None:
        return None
    least, most, has = kind.min_compute_capability, kind.max_compute_capability, device.compute_capability
    if kind.device_kinds and device.kind not in kind.device_kinds:
        return f"{engine.name} has no kernel for {kind.name} on {_SPOKEN[device.kind]} ({device.name})"
    lacking = [flag for flag in kind.cpu_flags if flag not in device.cpu_flags]
    if device.kind == "cpu" and device.cpu_flags and lacking:
        return f"{engine.name} has no kernel for {kind.name} on {device.name}: it needs {', '.join(lacking)}"
    if has is not None and ((least is not None and has < least) or (most is not None and has > most)):
        return (
            f"{engine.name} has no kernel for {kind.name} on {device.name}: it needs a compute capability "
            f"{spell_capabilities(least, most)}, not {has:.1f}"
        )
    return None


def spell_capabilities(least: float | None, most: float | None) -> str:
    """ "of 8.9 or more", "of 9.0" …"""
    if least is not None and least == most:
        return f"of {least:.1f}"
    ends = [(least, "or more"), (most, "or less")]
    return " and ".join(f"of {end:.1f} {word}" for end, word in ends if end is not None)


def _first_unless_any_runs(reasons: Sequence[tuple[str | None, str | None]]) -> str | None:
    """Of (no kernel, no such shape) of several kinds: None where one has neither, else the nearest to running."""
    shapes = [shape for kernel, shape in reasons if kernel is None]
    if None in shapes:
        return None
    return shapes[0] if shapes else reasons[0][0]


def _difference(checks: Sequence[_Check]) -> tuple[int, str] | None:
    """The first fact that does not fit, as (how many did before it, what is there instead)."""
    return next(((index, text) for index, (fits, text) in enumerate(checks) if not fits), None)


def _closest(differences: Sequence[tuple[int, str] | None], without_kinds: str) -> str:
    found = [difference for difference in differences if difference is not None]
    return max(found, key=lambda difference: difference[0], default=(0, without_kinds))[1]


def _plain_reason(name: str, engine: Engine) -> str | None:
    if name in engine.plain_formats:
        return None
    return f"{engine.name} has no {name} without scales; it has {_either(engine.plain_formats)}"


def _weight_checks(kind: WeightKind, scheme: Scheme, weights: TensorScheme, scaling: Scaling) -> list[_Check]:
    name, granularity, activations = weights.format, scaling.granularity, scheme.activations
    inputs = () if activations is None else (activations.format,)
    return [
        (name in kind.formats, f"has no {name} weights"),
        (
            set(inputs) <= set(kind.activations) and bool(inputs) == bool(kind.activations),
            f"runs {name} weights with {_inputs(kind.activations)}, not with {_inputs(inputs)}",
        ),
        (
            granularity.scope in kind.scopes,
            f"runs {name} with scales per {_either(kind.scopes)}, not per {granularity}",
        ),
        (
            _is_listed(granularity.group_size, kind.group_sizes),
            f"runs {name} in groups of {_either(kind.group_sizes)}, not of {granularity.group_size}",
        ),
        (
            _is_listed(granularity.block_rows, kind.block_rows),
            f"runs {name} in blocks of {_either(kind.block_rows)} rows, not of {granularity.block_rows}",
        ),
        (
            scaling.symmetry in kind.symmetries,
            f"runs {name} {_spell(kind.symmetries)}, not {_spell((scaling.symmetry,))}",
        ),
        (
            not kind.scale_formats or scaling.scale_format in kind.scale_formats,
            f"runs {name} with scales in {_either(kind.scale_formats)}, not in {scaling.scale_format}",
        ),
        (scaling.tensor_scale == kind.tensor_scale, f"runs {name} with other levels of scales"),
        *_input_checks(kind, scheme),
    ]


def _input_checks(kind: WeightKind, scheme: Scheme) -> list[_Check]:
    activations = scheme.activations
    if activations is None or activations.scaling is None:
        return []
    granularity = activations.scaling.granularity
    timing = "static" if scheme.static_activations else "dynamic"
    return [
        (
            granularity.scope in kind.activation_scopes,
            f"runs {activations.format} inputs scaled per {_either(kind.activation_scopes)}, not per {granularity}",
        ),
        (
            _is_listed(granularity.group_size, kind.activation_group_sizes),
            f"runs inputs in groups of {_either(kind.activation_group_sizes)}, not of {granularity.group_size}",
        ),
        (
            timing in kind.activation_timings,
            f"runs {activations.format} inputs with {_either(kind.activation_timings)} scales, not {timing} ones",
        ),
    ]


def _value_checks(kind: ValueKind, scheme: ValueScheme, scaling: Scaling) -> list[_Check]:
    name, size = scheme.values.format, scaling.granularity.group_size
    return [
        (name in kind.formats, f"runs its {kind.name} in {_either(kind.formats)}, not in {name}"),
        (
            scheme.axis in kind.axes,
            f"runs its {kind.name} with scales per {_either(kind.axes)}, not per {scheme.axis}",
        ),
        (
            not kind.group_sizes or size in kind.group_sizes,
            f"runs its {kind.name} in groups of {_either(kind.group_sizes)}, not {f'of {size}' if size else 'without'}",
        ),
        (
            scaling.symmetry in kind.symmetries,
            f"runs its {kind.name} {_spell(kind.symmetries)}, not {_spell((scaling.symmetry,))}",
        ),
        (
            not kind.scale_formats or scaling.scale_format in kind.scale_formats,
            f"runs its {kind.name} with scales in {_either(kind.scale_formats)}, not in {scaling.scale_format}",
        ),
        (
            scheme.rounding in kind.roundings,
            f"rounds its {kind.name} {_either(kind.roundings)}, not {scheme.rounding}",
        ),
    ]


def _shape_reason(kind: WeightKind, scaling: Scaling, site: SiteFacts, engine: Engine) -> str | None:
    out_features, in_features = site.shape
    if site.role in kind.refused_roles:
        return f"{engine.name} does not run {kind.name} at {site.role}"
    group_size = scaling.granularity.group_size
    if group_size and not kind.ragged_groups and in_features % group_size:
        return f"{engine.name} refuses groups of {group_size} in {in_features} columns, which they do not divide"
    if in_features % kind.in_features_multiple:
        return (
            f"{engine.name} takes {kind.name} with in_features a multiple of {kind.in_features_multiple}, "
            f"not {in_features}"
        )
    if out_features % kind.out_features_multiple:
        return (
            f"{engine.name} takes {kind.name} with out_features a multiple of {kind.out_features_multiple}, "
            f"not {out_features}"
        )
    return None


def _is_listed(size: int, sizes: Sequence[int]) -> bool:
    """Whether a size that matters is one of those listed; no list allows any."""
    return not size or not sizes or size in sizes


def _inputs(names: Sequence[str]) -> str:
    return f"inputs in {_either(names)}" if names else "inputs that are not rounded"


def _spell(symmetries: Sequence[str]) -> str:
    words = {"zero_point": "with a zero point", "minimum": "with a minimum"}
    return _either([words.get(symmetry, symmetry) for symmetry in symmetries])


def _either(options: Sequence[object]) -> str:
    *most, last = map(str, options or ("none",))
    return f"{', '.join(most)} or {last}" if most else last
