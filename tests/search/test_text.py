"""Splits of text: sizes, disjointness, determinism, and every sentence a user may meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from text_inputs import LENGTH, byte_tokenizer, split
from transformers import PreTrainedTokenizerFast

from bitwright.errors import DataError, UnknownName
from bitwright.search.text import Splits, TextSet


class FakeTokenizer:
    """A tokenizer that does what it is told; not a fast one."""

    is_fast = False
    chat_template = None

    def __init__(self, ids: list[int] | Exception, size: int = 100) -> None:
        self.ids, self.size = ids, size

    def __len__(self) -> int:
        return self.size

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        if isinstance(self.ids, Exception):
            raise self.ids
        return {"input_ids": self.ids * len(text)}


def write_documents(path: Path, num_documents: int = 60, chars: int = 300) -> Path:
    """Documents that repeat their number and count, so each window is unique and tells its document."""
    texts = ["".join(f"<{index:04d}>{place:04d}" for place in range(chars // 10)) for index in range(num_documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents_of(tokenizer: PreTrainedTokenizerFast, text_set: TextSet) -> set[str]:
    text = "".join(tokenizer.decode(row) for row in text_set.input_ids)
    return {part[:4] for part in text.split("<") if len(part) >= 5 and part[4] == ">"}


def windows(text_set: TextSet) -> set[bytes]:
    return {row.numpy().tobytes() for row in text_set.input_ids}


def assert_disjoint(splits: Splits) -> None:
    sets = [windows(splits.calibrate), windows(splits.repair), windows(splits.final)]
    assert (
        len(set.union(*sets))
        == sum(map(len, sets))
        == sum(text_set.num_sequences for text_set in (splits.calibrate, splits.repair, splits.final))
    )


class TestSplits:
    def test_sizes_are_rounded_up_and_evaluation_has_64_sequences(self, tmp_path: Path) -> None:
        path = write_documents(tmp_path / "a.jsonl")
        splits = split(byte_tokenizer(), path, calibration_tokens=10 * LENGTH + 1)
        assert splits.calibrate.input_ids.shape == (11, LENGTH)
        assert splits.repair.num_sequences == splits.final.num_sequences == 64
        assert splits.calibrate.input_ids.dtype == torch.int64
        assert splits.calibrate.num_tokens == 11 * (LENGTH - 1)
        assert not splits.calibrate.scored[:, 0].any() and splits.calibrate.scored[:, 1:].all()
        assert not splits.calibrate.padding.any()
        assert splits.calibrate.source == "a.jsonl"

    def test_fewer_than_64_where_the_text_allows_no_more(self, tmp_path: Path) -> None:
        splits = split(byte_tokenizer(), write_documents(tmp_path / "a.jsonl", num_documents=12))
        assert 20 <= splits.final.num_sequences < 64

    def test_no_document_is_in_two_splits(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer()
        splits = split(tokenizer, write_documents(tmp_path / "a.jsonl"))
        sets = [documents_of(tokenizer, s) for s in (splits.calibrate, splits.repair, splits.final)]
        assert all(sets)
        assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
        assert_disjoint(splits)

    def test_the_seed_decides_and_the_global_generator_is_left_alone(self, tmp_path: Path) -> None:
        path = write_documents(tmp_path / "a.jsonl")
        state = torch.get_rng_state()
        first, again, other = (split(byte_tokenizer(), path, seed=seed) for seed in (3, 3, 4))
        assert torch.equal(torch.get_rng_state(), state)
        assert first.final.hash == again.final.hash and torch.equal(first.final.input_ids, again.final.input_ids)
        assert first.final.hash != other.final.hash

    def test_more_evaluation_tokens_never_reach_a_document_that_calibrated(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer()
        path = write_documents(tmp_path / "a.jsonl")
        small, large = (split(tokenizer, path, evaluation_tokens=n * LENGTH) for n in (10, 150))
        assert torch.equal(small.calibrate.input_ids, large.calibrate.input_ids)
        assert not documents_of(tokenizer, small.calibrate) & documents_of(tokenizer, large.final)

    def test_the_first_sequences_are_those_of_a_smaller_set(self, tmp_path: Path) -> None:
        path = write_documents(tmp_path / "a.jsonl")
        small, large = (split(byte_tokenizer(), path, calibration_tokens=n * LENGTH).calibrate for n in (6, 12))
        assert large.first(6).hash == small.hash and large.first(6).num_tokens == small.num_tokens
        assert large.first(99).hash == large.hash

    @pytest.mark.parametrize("wanted", [12, 10_000])
    def test_further_text_comes_from_the_documents_that_calibrate(self, tmp_path: Path, wanted: int) -> None:
        """The other splits stay as they are; of more than there is, all that is left is taken."""
        tokenizer, path = byte_tokenizer(), write_documents(tmp_path / "a.jsonl")
        without, splits = (split(tokenizer, path, further_tokens=n * LENGTH) for n in (0, wanted))
        assert without.further is None and splits.further is not None
        for name in ("calibrate", "repair", "final"):
            assert getattr(splits, name).hash == getattr(without, name).hash
        assert splits.further.num_sequences == wanted or wanted == 10_000
        for proof in (splits.repair, splits.final):
            assert not documents_of(tokenizer, splits.further) & documents_of(tokenizer, proof)
        assert not windows(splits.further) & windows(splits.calibrate)
        joined = splits.calibrate.joined(splits.further)
        assert windows(joined) == windows(splits.calibrate) | windows(splits.further)
        assert joined.num_tokens == splits.calibrate.num_tokens + splits.further.num_tokens
        used_up = split(tokenizer, path, calibration_tokens=joined.input_ids.numel(), further_tokens=LENGTH)
        assert (used_up.further is None) == (wanted == 10_000)

    def test_two_sources_share_nothing(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer()
        first = write_documents(tmp_path / "a.jsonl", num_documents=30)
        second = write_documents(tmp_path / "b.jsonl", num_documents=80)  # the first 30 are the same
        splits = split(tokenizer, first, evaluation=second)
        assert (splits.calibrate.source, splits.final.source) == ("a.jsonl", "b.jsonl")
        assert max(documents_of(tokenizer, splits.calibrate)) < "0030" <= min(documents_of(tokenizer, splits.final))
        assert_disjoint(splits)

    def test_two_spellings_of_one_path_are_one_source(self, tmp_path: Path) -> None:
        path = write_documents(tmp_path / "a.jsonl")
        (tmp_path / "folder").mkdir()
        splits = split(byte_tokenizer(), path, evaluation=tmp_path / "folder" / ".." / "a.jsonl")
        assert splits.final.hash == split(byte_tokenizer(), path).final.hash

    def test_a_copy_of_the_text_proves_nothing(self, tmp_path: Path) -> None:
        first, second = (write_documents(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
        with pytest.raises(DataError, match=r"every document of 'b\.jsonl' also stands in 'a\.jsonl'.*name the same"):
            split(byte_tokenizer(), first, evaluation=second)

    def test_equal_windows_of_different_documents_are_taken_once(self, tmp_path: Path) -> None:
        shared = "the same beginning in every text" * 4  # four windows of 32 bytes
        rows = [{"text": shared + f"<{index:04d}>" * 60} for index in range(40)]
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        assert_disjoint(split(byte_tokenizer(), tmp_path / "a.jsonl", evaluation_tokens=64 * LENGTH))

    def test_long_documents_do_not_fill_a_split_alone(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer()
        splits = split(tokenizer, write_documents(tmp_path / "a.jsonl", num_documents=20, chars=20_000))
        assert len(documents_of(tokenizer, splits.final)) >= 6

    def test_only_what_is_needed_is_tokenised(self, tmp_path: Path) -> None:
        class Counting(FakeTokenizer):
            count = 0

            def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
                self.count += 1
                return {"input_ids": [ord(char) % 100 for char in text]}

        tokenizer = Counting([])
        split(tokenizer, write_documents(tmp_path / "a.jsonl", num_documents=1000))
        assert tokenizer.count < 60

    def test_every_sequence_starts_with_the_tokenizers_own_token(self, tmp_path: Path) -> None:
        splits = split(byte_tokenizer(adds_bos=True), write_documents(tmp_path / "a.jsonl"))
        assert (splits.final.input_ids[:, 0] == 256).all() and not (splits.final.input_ids[:, 1:] == 256).any()
        assert splits.final.scored[:, 1].all() and splits.final.num_tokens == 64 * (LENGTH - 1)

    @pytest.mark.parametrize("source", ["docs", "code"])
    def test_built_in_sets_are_large_enough_for_the_defaults(self, source: str) -> None:
        options = {"calibration_tokens": 4096, "evaluation_tokens": 8192, "sequence_length": 128}
        splits = split(byte_tokenizer(), source, **options)
        assert splits.calibrate.input_ids.shape == (32, 128) and splits.final.input_ids.shape == (64, 128)
        assert splits.final.source == source and "Python 3." in splits.final.description
        assert_disjoint(splits)

    def test_calibration_on_docs_and_proof_on_a_file(self, tmp_path: Path) -> None:
        splits = split(byte_tokenizer(), "docs", evaluation=write_documents(tmp_path / "a.jsonl"))
        assert (splits.calibrate.source, splits.repair.source) == ("docs", "a.jsonl")


class TestRefusals:
    def test_too_short_says_what_there_is_and_what_is_needed(self, tmp_path: Path) -> None:
        path = write_documents(tmp_path / "a.jsonl", num_documents=5, chars=100)
        says = r"repair split \(40% of the documents\) has \d+ tokens of the source's 510.*640 tokens in 20 sequences"
        with pytest.raises(DataError, match=says + r".*--sequence-length.*1600 tokens of text"):
            split(byte_tokenizer(), path, calibration_tokens=1)

    def test_fewer_tokens_are_no_advice_where_the_least_number_of_sequences_rules(self, tmp_path: Path) -> None:
        path = write_documents(tmp_path / "a.jsonl", num_documents=20, chars=100)
        with pytest.raises(DataError, match=r"64 sequences are needed; lower --sequence-length, or give"):
            split(byte_tokenizer(), path, calibration_tokens=1, evaluation_tokens=64 * LENGTH)
        with pytest.raises(DataError, match=r"65 sequences are needed; lower --tokens or --sequence-length, or give"):
            split(byte_tokenizer(), path, calibration_tokens=1, evaluation_tokens=65 * LENGTH)

    def test_too_few_documents(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"has 2 document\(s\), but 3 splits"):
            split(byte_tokenizer(), write_documents(tmp_path / "a.jsonl", num_documents=2))

    @pytest.mark.parametrize(
        ("option", "value", "says"),
        [
            ("sequence_length", 1, "--sequence-length is 1, but must be at least 2"),
            ("calibration_tokens", 0, "--tokens is 0, but must be at least 1"),
            ("evaluation_tokens", -3, "evaluation tokens is -3"),
        ],
    )
    def test_impossible_numbers(self, tmp_path: Path, option: str, value: int, says: str) -> None:
        with pytest.raises(DataError, match=says):
            split(byte_tokenizer(), write_documents(tmp_path / "a.jsonl"), **{option: value})

    def test_unknown_task_and_set_name_those_that_exist(self) -> None:
        with pytest.raises(UnknownName, match=r"'chatt'; did you mean 'chat'\? Known tasks: chat, embedding, text"):
            split(byte_tokenizer(), "docs", task="chatt")
        with pytest.raises(
            UnknownName, match=r"unknown calibration set 'doc'; did you mean 'docs'\?.*code, docs, self; or"
        ):
            split(byte_tokenizer(), "docs", evaluation="doc")

    def test_no_tokenizer(self) -> None:
        with pytest.raises(DataError, match="cannot be tokenised: the model has no tokenizer"):
            split(None, "docs")

    def test_ids_outside_the_vocabulary(self, tmp_path: Path) -> None:
        path = write_documents(tmp_path / "a.jsonl")

        class Outside(FakeTokenizer):
            def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
                return {"input_ids": [ord(char) + 1000 for char in text]}

        with pytest.raises(DataError, match=r"cannot be tokenised.*token id 1062.*ids 0 to 99; use the tokenizer"):
            split(Outside([]), path)
        with pytest.raises(DataError, match=r"token id 32\d|ids 0 to 9"):
            split(byte_tokenizer(), path, vocabulary_size=10)

    def test_no_tokens_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"cannot be tokenised: .* makes no token of 'a\.jsonl'"):
            split(FakeTokenizer([]), write_documents(tmp_path / "a.jsonl"))

    def test_mostly_unknown_tokens(self, tmp_path: Path) -> None:
        class HalfBlind(FakeTokenizer):
            unk_token_id = 99

            def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
                return {"input_ids": [int(char) if char.isdigit() and char > "0" else 99 for char in text]}

        with pytest.raises(DataError, match=r"\d\d% of the tokens of 'a\.jsonl' are the tokenizer's unknown token"):
            split(HalfBlind([]), write_documents(tmp_path / "a.jsonl", num_documents=600))

    @pytest.mark.parametrize(
        "error", [Exception("WordLevel error: Missing [UNK] token"), ValueError("no"), KeyError("x")]
    )
    def test_a_tokenizer_that_fails(self, error: Exception) -> None:
        with pytest.raises(DataError, match=r"cannot be tokenised: the model's tokenizer fails on 'a'"):
            split(FakeTokenizer(error), "docs")

    def test_defects_are_not_hidden(self) -> None:
        with pytest.raises(ZeroDivisionError):
            split(FakeTokenizer(ZeroDivisionError()), "docs")
