import torch

from bitwright.quantize import SCHEMES, dequantize, quantize

weight = torch.randn(256, 576)
codes = quantize(weight, SCHEMES["int4_g64"].weights)
print((dequantize(codes) - weight).abs().max())
