import bitwright
from bitwright.export import examine, export
from bitwright.models import load

plan = bitwright.load_plan("my-plan")
for refused in examine(plan, "compressed-tensors").refused:  # of the plan alone: nothing is loaded, nothing written
    print(refused.reason, refused.sites)

report = export(plan, load("my-model"), "safetensors-dequantized", "my-plain-model")
print(report.folder, report.files, report.notes)
