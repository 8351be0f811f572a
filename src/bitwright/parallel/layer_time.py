"""One layer of a decoder on one GPU: its products, attention, elementwise work, codes and collectives, both ways.

With T tokens of a GPU, h hidden, q and kv columns of the heads, f columns of the MLP, t GPUs of tensor parallelism:

    forward      q·k·v [T, (q+2kv)/t, h], out [T, h, q/t], gate and up [T, 2f/t, h] (or f), down [T, h, f/t]
    backward     dgrad [T, in, out] and wgrad [out, in, T] of each; wgrad adds to fp32 sums where there are several
                 micro-batches
    experts      E/ep of them side by side, each with T·k·ep/E tokens: one grouped product
    attention    4·q/t·pairs operations forward, 2.5 times as many backward where fused (scores once more), 2 times
                 where stored; causal: half of the pairs where fused. Stored scores are also moved: about 13 bytes a
                 score forward and 20 backward at 16 bits (written, softmax read and written, dropped, read)
    elementwise  10·h + 3·f (2·f without a gate) + 2·(q + kv) values a token read or written, twice that backward
    tp           2 all-reduces of T·h activations each way; with sequence parallelism as many bytes in all-gathers and
                 reduce-scatters, and two more gathers backward
    host         what starting a layer of experts takes beyond all that
    cp           keys and values around a ring, and backward their gradients: what a block's hop adds to the attention
                 that it runs beside (`overlap.both_s`)
    ep           2 all-to-alls of T·k·h each way; where a token goes to a GPU, or across nodes to a node, only once, of
                 T·h·E(distinct places), p·(1-(1-1/p)^k) of p places

Sources: Korthikanti et al., arXiv:2205.05198, section 4 (tp); Dao, arXiv:2307.08691 (attention); Narayanan et al.,
arXiv:2104.04473, section 3. Everything is *predicted*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from bitwright.hardware.roofline import compute_format, matmul_tflops
from bitwright.parallel.gemm_time import gemm_time, move_time_s, quantize_time_s
from bitwright.parallel.job import Job
from bitwright.parallel.overlap import both_s

#: Bytes moved per score and bit of a score, where scores are stored: 13 and 20 bytes at 16 bits.
_STORED_FORWARD, _STORED_BACKWARD = 13 / 16, 20 / 16
#: Values read or written per token, expert visited and column of the model: sorted before and after each of the two
#: exchanges, and summed.
_ROUTED = 10
#: A head that is no multiple of this wide cannot use 16-bit matrix units (cuBLAS's rule of 16 bytes).
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """Seconds of one pass over one layer, by what takes them."""

    linear: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    quantize: float = 0.0
    #: Waiting for the host, beyond the device's own work.
    host: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def compute(self) -> float:
        """Without collectives."""
        return self.linear + self.attention + self.elementwise + self.quantize + self.host

    @property
    def exposed(self) -> float:
        """Collectives on the critical path."""
        return self.tp + self.cp + self.ep

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.exposed

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def times(self, factor: float) -> PassTime:
        """Return this pass, so many times."""
        return PassTime(**{f.name: factor * getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A linear layer on one GPU: y [m, n] = x [m, k] · Wᵀ, `count` of them side by side."""

    name: str
    m: int
    n: int
    k: int
    count: int = 1


def layer_products(job: Job) -> tuple[Product, ...]:
    """Return the linear layers of one decoder layer as one GPU computes them."""
    shape, layout, tokens = job.shape, job.layout, job.tokens
    tp, hidden = layout.tp, shape.hidden_size
    queries, kv = shape.num_heads * shape.head_dim // tp, max(1, shape.num_kv_heads * shape.head_dim // tp)
    columns = shape.intermediate_size // tp
    m, count = tokens, 1
    if shape.num_experts > 1:
        count = shape.num_experts // layout.ep
        m = max(1, tokens * shape.experts_per_token * layout.ep // shape.num_experts)
    return (
        Product(name="qkv", m=tokens, n=queries + 2 * kv, k=hidden),
        Product(name="out", m=tokens, n=hidden, k=queries),
        Product(name="up", m=m, n=(1 + shape.is_gated) * columns, k=hidden, count=count),
        Product(name="down", m=m, n=hidden, k=columns, count=count),
    )


def forward_time(job: Job) -> PassTime:
    """Return the seconds of a forward pass over one layer."""
    share = 1 - job.numerics.kept_share
    linear = sum(_mixed(job, p.m, p.n, p.k, p.count, job.numerics.forward, share) for p in layer_products(job))
    return _tuned(
        job,
        PassTime(
            linear=linear,
            attention=attention_time(job, is_backward=False),
            elementwise=_elementwise(job),
            quantize=share * sum(_codes(job, is_backward=False)),
            tp=_tensor_parallel(job, linear, is_backward=False),
            cp=_context_parallel(job, times=1),
            ep=_expert_parallel(job),
        ),
        job.software.expert_host_s,
    )


def backward_time(job: Job) -> PassTime:
    """Return the seconds of a backward pass over one layer, what is recomputed included."""
    share, backward = 1 - job.numerics.kept_share, job.numerics.backward
    products = layer_products(job)
    linear = sum(_mixed(job, p.m, p.k, p.n, p.count, backward, share) for p in products)
    linear += _weight_gradients(job)
    found = _tuned(
        job,
        PassTime(
            linear=linear,
            attention=attention_time(job, is_backward=True),
            elementwise=2 * _elementwise(job),
            quantize=share * sum(_codes(job, is_backward=True)),
            tp=_tensor_parallel(job, linear, is_backward=True),
            cp=_context_parallel(job, times=2),
            ep=_expert_parallel(job),
        ),
        2 * job.software.expert_host_s,
    )
    return found + recomputed_time(job)


def recomputed_time(job: Job) -> PassTime:
    """Return the seconds of what a backward pass over one layer computes again."""
    if job.layout.recompute == "none":
        return PassTime()
    again = forward_time(job)
    repeated = {
        "selective": PassTime(attention=again.attention),
        "operations": PassTime(linear=again.linear / 2, elementwise=again.elementwise, quantize=again.quantize / 2),
        "full": again,
    }
    return repeated[job.layout.recompute]


def weight_gradient_time(job: Job) -> PassTime:
    """Return the seconds of a layer's gradients of weights, a part of its backward pass that no other stage needs."""
    return _tuned(job, PassTime(linear=_weight_gradients(job)), 0.0)


def _weight_gradients(job: Job) -> float:
    share = 1 - job.numerics.kept_share
    y_bits = 64.0 if job.num_micro_batches > 1 else job.numerics.gradient_bits
    products = layer_products(job)
    return sum(_mixed(job, p.n, p.k, p.m, p.count, job.numerics.backward, share, y_bits) for p in products)


def attention_time(job: Job, *, is_backward: bool) -> float:
    """Return the seconds of one layer's attention between its projections."""
    shape, layout = job.shape, job.layout
    is_fused = job.software.attention == "fused"
    scores = layout.micro_batch * shape.num_heads / layout.tp * job.sequence**2 / layout.cp
    flops = 4 * shape.head_dim * scores * (0.5 if is_fused else 1.0)
    record = job.efficiency
    if is_fused:
        share = record.attention_backward_share if is_backward else record.attention_forward_share
        share, times = share * job.software.attention_speed, 2.5 if is_backward else 1.0
    else:
        share, times = record.attention_stored_share, 2.0 if is_backward else 1.0
    if shape.head_dim % _ALIGNMENT:
        share = min(share, record.unaligned_share)
    unit, _ = compute_format(job.device, job.numerics.compute)
    seconds = times * flops / (share * matmul_tflops(job.device, unit) * 1e12)
    if is_fused:
        return seconds + job.efficiency.launch_s
    moved = scores * job.numerics.activation_bits * (_STORED_BACKWARD if is_backward else _STORED_FORWARD)
    return seconds + move_time_s(job.device, record, moved, launches=8 if is_backward else 4)


def _mixed(
    job: Job, m: int, n: int, k: int, count: int, format: str, share: float, y_bits: float | None = None
) -> float:
    """A product in the recipe's format, in those layers that it is for, and in the policy's own in the others."""
    bits = job.numerics.activation_bits if y_bits is None else y_bits

    def one(name: str) -> float:
        time = gemm_time(job.device, job.efficiency, m=m, n=n, k=k, count=count, format=name, y_bits=bits)
        return time.seconds

    low = one(format) if share else 0.0
    return share * low + ((1 - share) * one(job.numerics.compute) if share < 1 else 0.0)


def _codes(job: Job, *, is_backward: bool) -> Iterator[float]:
    """Turning the operands of every linear layer into codes; W once a step, x and g once a micro-batch."""
    numerics, bits = job.numerics, job.numerics.activation_bits
    for p in layer_products(job):
        sizes = [(numerics.g, p.m * p.n * p.count, 1.0)] if is_backward else [(numerics.x, p.m * p.k * p.count, 1.0)]
        if not is_backward:
            sizes.append((numerics.w, p.n * p.k * p.count, 1.0 / job.num_micro_batches))
        for cost, values, times in sizes:
            if cost is not None:
                yield times * quantize_time_s(
                    job.device,
                    job.efficiency,
                    values=values,
                    from_bits=bits,
                    to_bits=cost.bits,
                    writes=2,
                    needs_amax_pass=cost.needs_amax_pass,
                )


def _elementwise(job: Job) -> float:
    shape, layout = job.shape, job.layout
    whole = 10 * shape.hidden_size / (layout.tp if layout.is_sequence_parallel else 1)
    visited = shape.experts_per_token
    cut = (3 if shape.is_gated else 2) * shape.intermediate_size * visited
    cut += 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    routed = _ROUTED * shape.hidden_size * visited if shape.num_experts > 1 else 0
    values = job.software.elementwise_passes * job.tokens * (whole + cut / layout.tp + routed)
    return move_time_s(job.device, job.efficiency, values * job.numerics.activation_bits / 8, launches=8)


def _tensor_parallel(job: Job, linear_s: float, *, is_backward: bool) -> float:
    tp = job.layout.tp
    if tp == 1:
        return 0.0
    num_bytes = job.tokens * job.shape.hidden_size * job.numerics.activation_bits / 8
    network = job.tuned_network
    if job.layout.is_sequence_parallel:
        gather = network.seconds("all_gather", num_bytes, ranks=tp)
        seconds = 2 * (gather + network.seconds("reduce_scatter", num_bytes, ranks=tp)) + 2 * is_backward * gather
    else:
        seconds = 2 * network.seconds("all_reduce", num_bytes, ranks=tp)
    return seconds - job.software.hidden_tp_share * min(seconds, linear_s)


def _context_parallel(job: Job, *, times: int) -> float:
    cp = job.layout.cp
    if cp == 1:
        return 0.0
    shape = job.shape
    columns = max(1, shape.num_kv_heads * shape.head_dim // job.layout.tp)
    num_bytes = 2 * job.tokens * columns * job.numerics.activation_bits / 8
    hop = job.tuned_network.seconds("send_recv", num_bytes, ranks=2, stride=job.layout.stride("cp"))
    block = attention_time(job, is_backward=times > 1) / cp
    return (cp - 1) * (both_s(block, times * hop, job.efficiency.contention) - block)


def exchanged_bytes(job: Job) -> float:
    """Return the bytes of tokens that one all-to-all of a layer's experts takes from a GPU, to itself included."""
    ep = job.layout.ep
    visited: float = job.shape.experts_per_token
    stride, node = job.layout.stride("ep"), job.network.gpus_per_node
    if job.software.sends_tokens_once:
        inside = max(1, min(ep, node // stride))
        places = ep // inside if ep > inside else ep
        visited = places * (1 - (1 - 1 / places) ** visited)
    return job.tokens * visited * job.shape.hidden_size * job.numerics.activation_bits / 8


def _expert_parallel(job: Job) -> float:
    ep = job.layout.ep
    if ep == 1:
        return 0.0
    stride = job.layout.stride("ep")
    return 2 * job.tuned_network.seconds("all_to_all", exchanged_bytes(job), ranks=ep, stride=stride)


def _tuned(job: Job, found: PassTime, host_s: float) -> PassTime:
    """As slow as the calibration found it; and no faster than the host starts it."""
    tuning = job.tuning
    times = tuning.compute / job.efficiency.sustained_share
    slower = PassTime(
        linear=times * found.linear,
        attention=times * tuning.attention * found.attention,
        elementwise=tuning.compute * found.elementwise,
        quantize=tuning.compute * found.quantize,
        tp=found.tp,
        cp=found.cp,
        ep=found.ep,
    )
    if job.shape.num_experts == 1:
        return slower
    return replace(slower, host=max(0.0, host_s - slower.seconds))
