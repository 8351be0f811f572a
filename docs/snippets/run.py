import bitwright
from bitwright.inference import apply
from bitwright.models import load

plan = bitwright.load_plan("my-plan")
loaded = load("my-model")
planned = apply(plan, loaded, mode="auto")  # a copy: the loaded model stays as it is

ids = loaded.tokenizer("The scale of a group", return_tensors="pt").input_ids
text = planned.generate(ids, max_new_tokens=16, do_sample=False)  # a model of transformers like any other
print(loaded.tokenizer.decode(text[0]))
print(planned.bitwright_run.table())  # what runs as what, and why
