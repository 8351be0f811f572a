"""Bytes of everything that must fit on a device. The only place with such formulas; all are *predicted*.

weights.py                 one matrix: codes, scales, offsets
serving.py                 a decoder that serves: weights, KV cache, activations, workspace
training_states.py         bits of every parameter in training: itself, copies, gradients, moments; who holds what
training_activations.py    what the forward pass leaves for the backward pass, tensor by tensor
training.py                a training step on each of many GPUs, at the three moments when it is largest
adapters.py                the same with adapters (LoRA) on a frozen base
"""

from bitwright.hardware.memory.adapters import adapter_parameters
from bitwright.hardware.memory.serving import (
    MATMUL_WORKSPACE_BYTES,
    RUNTIME_BYTES,
    STEP_TOKENS,
    ServingMemory,
    activation_bytes,
    cache_bytes,
    kv_cache_bytes,
    serving_memory,
    workspace_bytes,
)
from bitwright.hardware.memory.training import MemoryLine, TrainingMemory, training_memory
from bitwright.hardware.memory.training_activations import ActivationSetup, SavedTensor, layer_tensors
from bitwright.hardware.memory.training_states import MOMENTS, Sharding, StateBits
from bitwright.hardware.memory.weights import weight_bytes

__all__ = [
    "MATMUL_WORKSPACE_BYTES",
    "MOMENTS",
    "RUNTIME_BYTES",
    "STEP_TOKENS",
    "ActivationSetup",
    "MemoryLine",
    "SavedTensor",
    "ServingMemory",
    "Sharding",
    "StateBits",
    "TrainingMemory",
    "activation_bytes",
    "adapter_parameters",
    "cache_bytes",
    "kv_cache_bytes",
    "layer_tensors",
    "serving_memory",
    "training_memory",
    "weight_bytes",
    "workspace_bytes",
]
