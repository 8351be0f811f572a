from bitwright.comms import fsdp_advice

for num_ranks in (8, 512):
    advice = fsdp_advice(num_ranks)  # for: fully_shard(module, mp_policy=advice.policy)
    print(f"{num_ranks} ranks: param_dtype {advice.policy.param_dtype}, reduce_dtype {advice.policy.reduce_dtype}")
    print(*advice.reasons, sep="\n")
