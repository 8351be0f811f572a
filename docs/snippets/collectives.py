import numpy as np

from bitwright.comms import all_reduced, collective_time, schedule, simulate, topology, wire_format

ring = schedule("all_reduce", "ring", 4)
print(ring.num_steps, "steps, the first transfer is", ring.transfers[0])
print(simulate(ring, np.outer([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])))  # a row for each rank

gradients = np.random.default_rng(0).standard_normal((64, 1024))
exact = gradients.sum(axis=0)
for algorithm in ("ring", "two_shot"):
    found = all_reduced(gradients, wire_format("bf16"), algorithm)[0]
    print(algorithm, np.linalg.norm(found - exact) / np.linalg.norm(exact))

cost = collective_time("all_reduce", 64 << 20, topology("h100x8x2"))
print(f"{1e3 * cost.time_s:.2f} ms by {cost.algorithm}: {cost.reason}")
