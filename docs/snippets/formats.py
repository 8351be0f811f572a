from bitwright import formats

print(formats.get("fp8_e4m3").max)  # 448.0
print(formats.round("fp8_e4m3", [0.1, 500.0]))  # [0.1015625, 448.0]: nearest even, saturating
print(formats.resolve("torch.float8_e4m3fn"))  # fp8_e4m3
