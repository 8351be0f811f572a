import torch

from bitwright.quantize import SCHEMES, TensorScheme, dequantize, fake_quantize, pack, quantize, unpack
from bitwright.quantize.select import select_scaled

weight = torch.randn(256, 1024)
mxfp4 = SCHEMES["mxfp4"].weights

values = fake_quantize(weight, mxfp4)  # what hardware running mxfp4 would see
q = quantize(weight, mxfp4)  # codes and scales …
assert torch.equal(dequantize(q), values)
packed = pack(weight, mxfp4)  # … as bits
assert torch.equal(unpack(packed), values)
print(packed.nbytes, "bytes instead of", weight.nbytes)

fp8 = TensorScheme(format="fp8_e5m2")  # numbers by themselves, without a scale
drawn = fake_quantize(weight.bfloat16(), fp8, rounding="stochastic", seed=0)

print(select_scaled(mxfp4, "cpu", torch.float32).reason)
