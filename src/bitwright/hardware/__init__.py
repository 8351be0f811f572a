"""What a chip can do: one TOML file a device, detection of the machine at hand, roofline times, bytes of memory.

    from bitwright import hardware

    l4 = hardware.get("l4")
    l4.matmul_tflops["fp8_e4m3"]                             # 242.0, dense
    hardware.detect()                                        # (Device(name="x86-avx512-bf16", …), "the processor …")
    hardware.roofline.matmul_time(l4, tokens=1, out_features=4096, in_features=4096, weight_bits=4.5,
                                  compute_format="bf16")     # OperationTime(seconds=…, bound="memory", …), predicted
    hardware.memory.kv_cache_bytes(num_layers=32, num_kv_heads=8, head_dim=128, num_tokens=8192)
    hardware.KNOWN_MODELS.get("llama-65b").shape             # ModelShape(…), whose training memory can be counted
    hardware.latency.attention_time(l4, batch=1, query_tokens=1, context=8192, num_heads=32, num_kv_heads=8,
                                    head_dim=128, kv_bits=8.25)
    hardware.profile.measure(name="here").device             # this machine, measured

Apart from `profile`, nothing here runs a kernel: every time is *predicted* from a device file's figures. Imports
neither torch nor a model.
"""

from bitwright.hardware import latency, memory, profile, roofline
from bitwright.hardware.decoder_shape import DecoderShape
from bitwright.hardware.detect import detect
from bitwright.hardware.device import Device, Link, MatmulRule
from bitwright.hardware.device_catalog import devices, get, names
from bitwright.hardware.device_file import read_device_file, write_device_text
from bitwright.hardware.model_shape import ModelShape
from bitwright.hardware.model_shape_file import KNOWN_MODELS

__all__ = [
    "KNOWN_MODELS",
    "DecoderShape",
    "Device",
    "Link",
    "MatmulRule",
    "ModelShape",
    "detect",
    "devices",
    "get",
    "latency",
    "memory",
    "names",
    "profile",
    "read_device_file",
    "roofline",
    "write_device_text",
]
