"""What torch's autocast does on each kind of device, as data: which operators it casts, and to what.

The lists differ. CUDA's has softmax, the norms and what leaves fp16's range; the CPU's has losses, and neither softmax
nor the norms. So a model that is safe under one is not under the other, and islands in fp32 follow from our own list
(`operations.py`); these only tell what is left to do.

    compute   inputs are cast to autocast's dtype
    fp32      inputs are cast to fp32, or the sum is told to be kept in fp32
    widest    inputs are cast to the widest dtype among them

Names are those of ATen operators. Operators that no language model has (FFTs, factorisations, pooling) are left out of
the CPU's list. Source: torch 2.13, ATen/autocast_mode.h and autocast_mode.cpp; held against both by
tests/training/test_autocast_lists.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AutocastLists:
    """Which ATen operators autocast casts on a kind of device."""

    compute: frozenset[str]
    fp32: frozenset[str]
    widest: frozenset[str]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CUDA = AutocastLists(
    compute=_names(
        "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution "
        "prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
        "linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
        "_scaled_dot_product_flash_attention scaled_dot_product_attention"
    ),
    fp32=_names(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
        "native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
        "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
        "mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
        "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
        "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa prod softmax log_softmax cumprod cumsum linalg_vector_norm "
        "linalg_matrix_norm sum norm"
    ),
    widest=_names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"),
)

_CPU = AutocastLists(
    compute=_names(
        "conv1d conv2d conv3d bmm mm linalg_vecdot baddbmm addmm addbmm linear _convolution matmul conv_tbc "
        "conv_transpose1d conv_transpose2d conv_transpose3d prelu scaled_dot_product_attention "
        "_native_multi_head_attention mkldnn_rnn_layer"
    ),
    fp32=_names(
        "binary_cross_entropy prod quantile nanquantile cdist trace mse_loss cosine_embedding_loss nll_loss nll_loss2d "
        "hinge_embedding_loss poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss "
        "margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss kl_div "
        "multilabel_margin_loss binary_cross_entropy_with_logits"
    ),
    widest=_names("stack cat index_copy"),
)

_NOTHING = AutocastLists(compute=frozenset(), fp32=frozenset(), widest=frozenset())

#: Kind of device → its lists.
AUTOCAST_LISTS: Mapping[str, AutocastLists] = {"cuda": _CUDA, "cpu": _CPU}


def lists_of(device_type: str) -> AutocastLists:
    """The lists of a kind of device; empty where they are not known, so that every island is ours."""
    return AUTOCAST_LISTS.get(device_type, _NOTHING)
