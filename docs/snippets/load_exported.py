from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("my-model-vllm")  # needs the package compressed-tensors
ids = AutoTokenizer.from_pretrained("my-model-vllm")("The scale of a group", return_tensors="pt").input_ids
print(model.generate(ids, max_new_tokens=8, do_sample=False))
