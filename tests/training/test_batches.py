"""The stream of rows: each once an epoch, one number as its position, the same rows whatever the number of ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from bitwright.errors import DataError
from bitwright.training.data.batch_check import checked_batches, raise_if_unusable
from bitwright.training.data.batches import Batches, order_of_epoch
from bitwright.training.data.token_rows import IGNORED, TokenRows


def numbered_rows(num_rows: int, *, hash: str = "h", padded: bool = False) -> TokenRows:
    """Row n holds n, n, n, n."""
    ids = torch.arange(num_rows, dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
    padding = torch.zeros(num_rows, 4, dtype=torch.bool)
    padding[:, 3] = padded
    return TokenRows(
        source="numbers", input_ids=ids, labels=ids.clone(), padding=padding if padded else None, hash=hash
    )


def rows_of(batches: Batches, num_batches: int) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in itertools.islice(batches, num_batches)]


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order() -> None:
    first, second = order_of_epoch(0, 0, 1000), order_of_epoch(0, 1, 1000)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert list(first) != list(second) != list(range(1000))
    assert list(order_of_epoch(0, 0, 1000)) == list(first)
    assert list(order_of_epoch(1, 0, 1000)) != list(first)


def test_orders_look_drawn_at_random() -> None:
    """The place of row 0 over many epochs is uniform: mean (n−1)/2, standard error √((n²−1)/12)/√epochs."""
    places = [list(order_of_epoch(7, epoch, 100)).index(0) for epoch in range(400)]
    assert abs(sum(places) / 400 - 49.5) < 4 * math.sqrt((100**2 - 1) / 12) / math.sqrt(400)


def test_a_batch_may_cross_the_end_of_an_epoch() -> None:
    seen = list(itertools.chain(*rows_of(Batches(numbered_rows(10), batch=4), 5)))
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_a_batch_may_be_larger_than_the_data() -> None:
    (batch,) = rows_of(Batches(numbered_rows(3), batch=7), 1)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]


def test_ranks_together_read_what_one_process_reads() -> None:
    alone = rows_of(Batches(numbered_rows(13), batch=6), 7)
    ranks = [rows_of(Batches(numbered_rows(13), batch=2, rank=rank, world_size=3), 7) for rank in range(3)]
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == alone


def test_going_on_gives_the_rows_that_would_have_come() -> None:
    whole = Batches(numbered_rows(11), batch=3, seed=5)
    expected = rows_of(whole, 9)
    stopped = Batches(numbered_rows(11), batch=3, seed=5)
    assert rows_of(stopped, 4) == expected[:4]
    state = stopped.state_dict()
    assert state["num_taken"] == 12
    again = Batches(numbered_rows(11), batch=3, seed=5).load_state_dict(state)
    assert rows_of(again, 5) == expected[4:]
    assert again.epoch == 27 / 11


def test_the_position_of_other_data_is_refused() -> None:
    state = Batches(numbered_rows(11), batch=3, seed=5).state_dict()
    with pytest.raises(DataError, match="rows_hash is 'other', not 'h'; num_rows is 12, not 11"):
        Batches(numbered_rows(12, hash="other"), batch=3, seed=5).load_state_dict(state)
    with pytest.raises(DataError, match="seed is 6, not 5"):
        Batches(numbered_rows(11), batch=3, seed=6).load_state_dict(state)


def test_padding_becomes_an_attention_mask() -> None:
    assert set(next(Batches(numbered_rows(3), batch=1))) == {"input_ids", "labels"}
    batch = next(Batches(numbered_rows(3, padded=True), batch=1))
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_no_rows_and_empty_batches_are_refused() -> None:
    with pytest.raises(DataError, match="'numbers' has no row to train on"):
        Batches(numbered_rows(0), batch=1)
    with pytest.raises(DataError, match="batch is 0"):
        Batches(numbered_rows(1), batch=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 2.5}, "batch is 2.5, but a batch has a whole number of rows, at least one; give 1 or more"),
        ({"batch": "4"}, "batch is '4'"),
        ({"batch": True}, "batch is True"),
        ({"rank": 2, "world_size": 2}, "rank is 2, but the ranks of 2 processes are 0 to 1; give this process's"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": 0.0}, "rank is 0.0"),
        ({"world_size": 0}, "world_size is 0, but there is at least one process"),
        ({"world_size": 1.5}, "world_size is 1.5"),
        ({"seed": "a"}, "seed is 'a'; give a whole number"),
        ({"seed": None}, "seed is None"),
    ],
)
def test_numbers_that_no_batch_can_have_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Batches(numbered_rows(3), **{"batch": 1, **options})


def test_numbers_of_numpy_are_whole_numbers() -> None:
    batches = Batches(numbered_rows(3), batch=np.int64(2), seed=np.int64(1), rank=np.int64(0))  # type: ignore[arg-type]
    assert len(rows_of(batches, 1)[0]) == 2
    assert {type(value) for value in batches.state_dict().values()} == {int, str}


@pytest.mark.parametrize("batch", [[1, 2], torch.ones(2), "input_ids", None])
def test_a_batch_that_is_no_mapping_is_refused(batch: Any) -> None:
    with pytest.raises(
        DataError, match=rf"batch 5 is of type {type(batch).__name__}, but .* a mapping of names to tensors"
    ):
        list(checked_batches([batch], first=5))


def test_one_batch_is_not_batches() -> None:
    with pytest.raises(DataError, match="batches is a single batch; give an iterable of them"):
        list(checked_batches({"input_ids": torch.ones(2)}))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batches is of type int, which cannot be iterated over"):
        list(checked_batches(5))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_named_with_its_place(value: float) -> None:
    good = {"pixel_values": torch.ones(2, 3), "note": "text"}
    bad = {"pixel_values": torch.ones(2, 3).index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(value))}
    passed = []
    with pytest.raises(DataError, match=rf"batch 7: 'pixel_values'\[1, 2\] is {value}, .*leave this sample out"):
        passed.extend(checked_batches([good, good, bad, good], first=5))
    assert len(passed) == 2
    assert len(list(checked_batches([good, good]))) == 2


@pytest.mark.parametrize(("name", "value"), [("input_ids", 10), ("input_ids", IGNORED), ("labels", 10), ("labels", -1)])
def test_a_token_that_no_embedding_has_is_named_with_its_place(name: str, value: int) -> None:
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.full((2, 3), IGNORED)}
    raise_if_unusable(batch, number=3, vocabulary_size=10)
    batch[name][1, 0] = value
    with pytest.raises(DataError, match=rf"batch 3: '{name}'\[1, 0\] is {value}, .*the ids 0 to 9"):
        raise_if_unusable(batch, number=3, vocabulary_size=10)
    raise_if_unusable(batch, number=3)
