"""What a device allows: matrix units, widening without loss, shapes, and scales along in_features.

    rounded inputs    their format needs a matrix unit: widened again, they would be less exact and no faster
    plain formats     may be widened (bf16 to fp32) unless another plain format is faster than that
    shapes, groups    as the device's matmul rules say (`hardware/device.py`)

Weights that alone are quantised need no unit: they are widened on the way to the multiplier.
"""

from __future__ import annotations

from bitwright import formats
from bitwright.formats import FloatFormat
from bitwright.hardware import Device, MatmulRule, roofline
from bitwright.plan.site_facts import SiteFacts
from bitwright.quantize.scheme import Scaling, Scheme, TensorScheme
from bitwright.quantize.value_scheme import ValueScheme

#: Value sites whose operands a matrix unit multiplies.
PRODUCT_ROLES = frozenset({"attn.qk", "attn.pv"})
#: Bits from which on a product counts as plain.
_PLAIN_BITS = 16


def device_reason(site: SiteFacts, scheme: Scheme, device: Device) -> str | None:
    """Why a device does not multiply a scheme's weights and inputs at a site; None if it does."""
    activations = scheme.activations
    if activations is None:
        return None
    if activations.scaling is None:
        return _widening_reason(activations.format, device)
    return _no_unit_reason(activations.format, device) or _shape_reason(site, activations, activations.scaling, device)


def device_value_reason(site: SiteFacts, scheme: ValueScheme, device: Device) -> str | None:
    """Why a device does not compute so at a value site: only products need a unit, other values are widened."""
    if site.role not in PRODUCT_ROLES:
        return None
    if scheme.values.scaling is None:
        return _widening_reason(scheme.values.format, device)
    return _no_unit_reason(scheme.values.format, device)


def _no_unit_reason(name: str, device: Device) -> str | None:
    if name in device.matmul_tflops:
        return None
    number = formats.FORMATS[name]
    relatives = [
        known
        for known in device.matmul_tflops
        if formats.FORMATS[known].bits == number.bits
        and isinstance(formats.FORMATS[known], FloatFormat) == isinstance(number, FloatFormat)
    ]
    instead = f"; its formats of that width are {', '.join(relatives)}" if relatives else ""
    return f"{device.name} has no matrix unit for {name}{instead}"


def _widening_reason(name: str, device: Device) -> str | None:
    """A plain format without a unit is refused where widening it costs speed that another plain format has."""
    if name in device.matmul_tflops:
        return None
    rates = {known: device.matmul_tflops[known] for known in plain_formats(device)}
    holding = [known for known in roofline.wider_formats(device, name) if known in rates]
    if not holding:
        return f"{device.name} has no matrix unit for {name}, nor for a wider format that holds it"
    fastest = max(rates, key=lambda known: rates[known])
    if rates[holding[0]] < rates[fastest]:
        return (
            f"{device.name} has no matrix unit for {name}: it would be computed in {holding[0]} at "
            f"{rates[holding[0]]:g} TFLOP/s, while {fastest} runs at {rates[fastest]:g}"
        )
    return None


def plain_formats(device: Device) -> list[str]:
    """Formats of at least 16 bits that the device multiplies in."""
    return [name for name in device.matmul_tflops if formats.FORMATS[name].bits >= _PLAIN_BITS]


def _shape_reason(site: SiteFacts, activations: TensorScheme, scaling: Scaling, device: Device) -> str | None:
    rule = rule_of(device, activations)
    if rule is None:
        group_size = scaling.granularity.group_size
        if not group_size:
            return None
        return (
            f"{device.name} applies no {scaling.scale_format} scales per {group_size} along in_features to "
            f"{activations.format} products"
        )
    out_features, in_features = site.shape
    for what, size, multiple in (
        ("in_features", in_features, rule.in_features_multiple),
        ("out_features", out_features, rule.out_features_multiple),
    ):
        if size % multiple:
            scales = f" with scales per {rule.group_size}" if rule.group_size else ""
            return (
                f"{device.name} multiplies {activations.format}{scales} for {what} that are multiples of {multiple}, "
                f"not {size}"
            )
    return None


def rule_of(device: Device, activations: TensorScheme) -> MatmulRule | None:
    """The rule for products of these activations: by format and by the scales along in_features, if there are any."""
    scaling = activations.scaling
    assert scaling is not None
    group_size = scaling.granularity.group_size or None
    for rule in device.matmul_rules:
        fits_scales = group_size is None or scaling.scale_format in rule.scale_formats
        if activations.format in rule.formats and rule.group_size == group_size and fits_scales:
            return rule
    return None
