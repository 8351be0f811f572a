"""Where a GGUF file has a model's weights: tensor names, and the order of rows.

Names are those of the ``gguf`` package, rows are in transformers' order: its tensor processors bring a stored matrix
into a parameter's layout (llama's q and k have their rows interleaved for ggml's rotary embedding). What they do to
rows is asked of them with row numbers in place of weights, so no architecture is told apart here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, eq=False)
class GgufLayout:
    """Names and rows of one model's tensors."""

    #: Tensor name → parameter name.
    parameter_of: Mapping[str, str]
    #: transformers' tensor processor of the architecture.
    processor: Any
    #: The model's config as a dictionary.
    settings: Mapping[str, Any]

    def rows_of(self, tensor_name: str, num_rows: int) -> npt.NDArray[np.int64] | None:
        """For each row of the parameter, the row of the stored matrix that it is; None where rows do not correspond."""
        numbers = np.arange(num_rows, dtype=np.float32)
        found = self.bring(tensor_name, numbers[:, None])
        if found is None or not np.array_equal(np.sort(found.reshape(-1)), numbers):
            return None
        return found.reshape(-1).astype(np.int64)

    def bring(self, tensor_name: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float32] | None:
        """A stored tensor's values, rows first, in the parameter's layout; None where it becomes a part of another."""
        result = self.processor.process(
            weights=values,
            name=tensor_name,
            tensor_key_mapping=dict(self.parameter_of),
            parsed_parameters={"config": dict(self.settings), "tensors": {}},
        )
        return None if result.name is None else np.array(result.weights, dtype=np.float32)


def tensor_keys(tensor_name: str) -> tuple[str, str]:
    """Names under which a tensor may stand in `parameter_of`: 3-D experts have no ``.weight`` in transformers."""
    return tensor_name, tensor_name.removesuffix(".weight")
