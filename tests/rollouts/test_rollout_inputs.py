"""Rollouts from whatever holds them: the same columns from rows, files, tables and buffers; ids, text and messages."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

import batchwright as bw
from batchwright.rl.columns import Rollouts
from batchwright.rollouts import read_rollouts

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [1, 2],
        "response": [10, 11],
        "reward": 1.0,
        "group": "a",
        "values": [0.5, 0.25],
        "old_log_probs": [-1.0, -2.0],
        "ref_log_probs": [-1.5, -2.5],
        "policy_version": 3,
    },
    {
        "prompt": [3],
        "response": [12],
        "reward": 0.0,
        "group": "b",
        "values": [0.75],
        "old_log_probs": [-3.0],
        "ref_log_probs": [-3.5],
        "policy_version": 3,
    },
    {
        "prompt": [9],
        "response": [13, 14, 15],
        "reward": -2.5,
        "group": "a",
        "values": [1.0, 2.0, 3.0],
        "old_log_probs": [-4.0, -5.0, -6.0],
        "ref_log_probs": [-4.5, -5.5, -6.5],
        "policy_version": 4,
    },
]
T, F = True, False


@dataclass
class Sample:
    prompt: list[int]
    response: list[int]
    reward: float
    group: str
    values: list[float]
    old_log_probs: list[float]
    ref_log_probs: list[float]
    policy_version: int


@dataclass(frozen=True, slots=True)
class SlottedSample:
    prompt: Any
    response: Any
    reward: float
    group: Any = None


def parts(rollouts: Rollouts, column: str = "tokens") -> list[list[Any]]:
    """A column of tokens as a list for each row."""
    starts = rollouts.starts.tolist()
    return [getattr(rollouts, column)[a:b].tolist() for a, b in pairwise(starts)]


def test_rows_of_token_ids_become_columns() -> None:
    rollouts = read_rollouts(ROWS)

    assert parts(rollouts) == [[1, 2, 10, 11], [3, 12], [9, 13, 14, 15]]
    assert parts(rollouts, "trained") == [[F, F, T, T], [F, T], [F, T, T, T]]
    assert rollouts.lengths().tolist() == [4, 2, 4]
    assert rollouts.reward is not None
    assert rollouts.reward.tolist() == [1.0, 0.0, -2.5]
    assert rollouts.token_rewards is None
    assert rollouts.group is not None
    assert rollouts.group.tolist() == [0, 1, 0]
    assert rollouts.group_names == ("a", "b")
    assert parts(rollouts, "values") == [[0, 0, 0.5, 0.25], [0, 0.75], [0, 1, 2, 3]]
    assert parts(rollouts, "old_log_probs") == [[0, 0, -1, -2], [0, -3], [0, -4, -5, -6]]
    assert parts(rollouts, "ref_log_probs") == [[0, 0, -1.5, -2.5], [0, -3.5], [0, -4.5, -5.5, -6.5]]
    assert rollouts.policy_version is not None
    assert rollouts.policy_version.tolist() == [3, 3, 4]
    assert len(rollouts) == 3
    assert rollouts.reward is not None


def test_columns_have_the_types_that_are_promised() -> None:
    rollouts = read_rollouts(ROWS)

    assert {
        name: getattr(rollouts, name).dtype.name for name in ("tokens", "starts", "trained", "reward", "group")
    } == {
        "tokens": "int32",
        "starts": "int64",
        "trained": "bool",
        "reward": "float64",
        "group": "int64",
    }
    assert {getattr(rollouts, name).dtype.name for name in ("values", "old_log_probs", "ref_log_probs")} == {"float32"}


def test_what_no_row_has_is_none() -> None:
    rollouts = read_rollouts([{"prompt": [1], "response": [2], "group": None}])

    assert rollouts.reward is None
    assert [rollouts.reward, rollouts.group, rollouts.values, rollouts.policy_version] == [None] * 4


def as_jsonl(rows: list[dict[str, Any]], folder: Path) -> Any:
    (folder / "rollouts.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return folder / "rollouts.jsonl"


def as_parquet(rows: list[dict[str, Any]], folder: Path) -> Any:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts.parquet")
    return str(folder / "rollouts.parquet")


def as_arrow_file(rows: list[dict[str, Any]], folder: Path) -> Any:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(folder / "rollouts.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return folder / "rollouts.arrow"


def as_two_files(rows: list[dict[str, Any]], folder: Path) -> Any:
    for number, some in enumerate((rows[:1], rows[1:])):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return [folder / "0.jsonl", folder / "1.jsonl"]


def as_buffer_in_batches(rows: list[dict[str, Any]], folder: Path) -> Any:
    buffer = bw.DatasetBuffer(rows[:2])
    buffer.append(rows[2:])
    return buffer


def as_version_of_a_buffer(rows: list[dict[str, Any]], folder: Path) -> Any:
    buffer = as_buffer_in_batches(rows, folder)
    version = buffer.commit("three rows")
    buffer.append(rows[:1])
    return buffer.at(version)


def as_arrays(rows: list[dict[str, Any]], folder: Path) -> Any:
    arrays: dict[str, Any] = {"prompt": np.int64, "response": np.uint16, "values": np.float64}
    return [row | {name: np.array(row[name], dtype) for name, dtype in arrays.items()} for row in rows]


def as_tensors(rows: list[dict[str, Any]], folder: Path) -> Any:
    torch = pytest.importorskip("torch")
    return [
        row
        | {name: torch.tensor(row[name], dtype=torch.int64) for name in ("prompt", "response")}
        | {"values": torch.tensor(row["values"], dtype=torch.bfloat16), "reward": torch.tensor(row["reward"])}
        for row in rows
    ]


def as_pandas(rows: list[dict[str, Any]], folder: Path) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


def as_polars(rows: list[dict[str, Any]], folder: Path) -> Any:
    return pytest.importorskip("polars").DataFrame(rows)


def as_hf_dataset(rows: list[dict[str, Any]], folder: Path) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows).select([0, 1, 2])


HOLDERS: dict[str, Callable[[list[dict[str, Any]], Path], Any]] = {
    "dataclasses": lambda rows, _: [Sample(**row) for row in rows],
    "mappings": lambda rows, _: [UserDict(row) for row in rows],
    "dicts and dataclasses": lambda rows, _: [Sample(**rows[0]), *rows[1:]],
    "tuples in a generator": lambda rows, _: (row | {"response": tuple(row["response"])} for row in rows),
    "arrays": as_arrays,
    "tensors": as_tensors,
    "arrays of objects": lambda rows, _: [row | {"response": np.array(row["response"], object)} for row in rows],
    "lists and arrays": lambda rows, _: [rows[0] | {"response": np.array([10, 11])}, *rows[1:]],
    "JSONL": as_jsonl,
    "two files": as_two_files,
    "Parquet": as_parquet,
    "Arrow file": as_arrow_file,
    "Arrow table": lambda rows, _: pa.Table.from_pylist(rows),
    "slice of a chunked table": lambda rows, _: pa.concat_tables(
        [pa.Table.from_pylist([rows[1], rows[0]]), pa.Table.from_pylist(rows[1:])]
    ).slice(1),
    "pandas": as_pandas,
    "polars": as_polars,
    "Hugging Face": as_hf_dataset,
    "buffer": as_buffer_in_batches,
    "version of a buffer": as_version_of_a_buffer,
}


@pytest.mark.parametrize("held", HOLDERS)
def test_the_same_rollouts_have_the_same_columns_and_name(held: str, tmp_path: Path) -> None:
    rollouts = read_rollouts(HOLDERS[held](ROWS, tmp_path))

    assert parts(rollouts) == [[1, 2, 10, 11], [3, 12], [9, 13, 14, 15]]
    assert rollouts.fingerprint() == read_rollouts(ROWS).fingerprint()


@pytest.mark.parametrize(
    "changed",
    [
        {"response": [12, 12]},
        {"prompt": [4]},
        {"reward": 0.5},
        {"group": "c"},
        {"policy_version": 2},
        {"values": [0.5]},
        {"old_log_probs": [-3.5]},
    ],
    ids=str,
)
def test_other_rollouts_have_another_name(changed: dict[str, Any]) -> None:
    other = [ROWS[0], ROWS[1] | changed, ROWS[2]]
    if "response" in changed:
        other = [{**row, "values": None, "old_log_probs": None, "ref_log_probs": None} for row in other]

    assert read_rollouts(other).fingerprint() != read_rollouts(ROWS).fingerprint()


def test_dataclasses_with_slots_are_read() -> None:
    rollouts = read_rollouts([SlottedSample([1], [2], 1.0), SlottedSample("ab", "c", 0.0)], "bytes")

    assert parts(rollouts) == [[1, 2], [97, 98, 99]]
    assert rollouts.group is None


def test_columns_of_other_names_are_renamed_and_unknown_ones_ignored() -> None:
    rows = [{"prompt": [1], "completion": [2], "score": 3, "advantage": "no"}]
    rollouts = read_rollouts(rows, columns={"response": "completion", "reward": "score"})

    assert parts(rollouts) == [[1, 2]]
    assert rollouts.reward is not None
    assert rollouts.reward.tolist() == [3.0]


def test_rows_of_equal_length_in_a_buffer_are_tensors_there_and_read_the_same() -> None:
    rows = [{"prompt": np.array([n, n]), "response": np.array([n, 9, 9]), "reward": float(n)} for n in range(3)]

    assert read_rollouts(bw.DatasetBuffer(rows)).fingerprint() == read_rollouts(rows).fingerprint()


def test_a_part_of_a_table_of_equal_lengths_has_its_own_rows() -> None:
    kind = pa.list_(pa.int32(), 2)
    table = pa.table({"prompt": pa.array([[1, 2], [3, 4]], kind), "response": pa.array([[5, 6], [7, 8]], kind)})

    assert parts(read_rollouts(table.slice(1))) == [[3, 4, 7, 8]]


@pytest.mark.parametrize("write", [as_arrow_file, as_parquet])
def test_files_of_columns_are_never_made_into_rows(
    write: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchwright.rollouts.table.read_documents", None)

    assert len(read_rollouts(write(ROWS, tmp_path))) == 3


# Rewards


@pytest.mark.parametrize("key", ["reward", "rewards"])
def test_rewards_per_token_stay_with_their_tokens_and_add_up(key: str) -> None:
    rows = [{"prompt": [1], "response": [2, 3], key: [0.5, 1.0]}, {"prompt": [9], "response": [4], key: [-1]}]
    rollouts = read_rollouts(rows)

    assert parts(rollouts, "token_rewards") == [[0, 0.5, 1.0], [0, -1]]
    assert rollouts.reward is not None
    assert rollouts.reward.tolist() == [1.5, -1.0]


def test_groups_are_numbered_as_they_appear() -> None:
    rows = [{"prompt": [1], "response": [2], "reward": 0, "group": group} for group in (7, np.int64(3), 7, "x")]
    rollouts = read_rollouts(rows)

    assert rollouts.group is not None
    assert rollouts.group.tolist() == [0, 1, 0, 2]
    assert rollouts.group_names == (7, 3, "x")


# Text


class CountingTokenizer:
    """Letters by their place in the alphabet, and what was asked for."""

    vocab_size, fingerprint, name = 26, "letters", "letters"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode_batch(self, texts: Any) -> list[list[int]]:
        self.asked += texts
        return [[ord(letter) - ord("a") for letter in text] for text in texts]

    def decode(self, ids: Any) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def test_text_is_encoded_as_it_is_and_each_prompt_once() -> None:
    tokenizer = CountingTokenizer()
    rows = [{"prompt": "ab", "response": answer, "reward": 0} for answer in ("c", "de", "c")]
    rollouts = read_rollouts(rows, tokenizer)

    assert parts(rollouts) == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 2]]
    assert parts(rollouts, "trained") == [[F, F, T], [F, F, T, T], [F, F, T]]
    assert sorted(tokenizer.asked) == ["ab", "c", "de"]


def test_ids_are_never_tokenised_again() -> None:
    tokenizer = CountingTokenizer()
    rows = [{"prompt": "ab", "response": [25, 24]}, {"prompt": [23], "response": "z"}, {"prompt": [1], "response": [2]}]
    rollouts = read_rollouts(rows, tokenizer)

    assert parts(rollouts) == [[0, 1, 25, 24], [23, 25], [1, 2]]
    assert sorted(tokenizer.asked) == ["ab", "z"]


# Turns


def test_only_what_assistants_say_in_turns_is_trained() -> None:
    turns = [
        {"role": "assistant", "token_ids": [10, 11]},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "token_ids": np.array([12])},
        {"role": "assistant", "content": "!", "train": False},
    ]
    rows = [{"prompt": "a", "response": turns}, {"prompt": "b", "response": [{"role": "assistant", "content": "c"}]}]
    rollouts = read_rollouts(rows, "bytes")

    assert parts(rollouts) == [[97, 10, 11, 111, 107, 12, 33], [98, 99]]
    assert parts(rollouts, "trained") == [[F, T, T, F, F, T, F], [F, T]]


def test_turns_and_plain_responses_may_be_mixed() -> None:
    rows = [
        {"prompt": [1], "response": [2, 3]},
        {"prompt": [4], "response": [{"role": "tool", "token_ids": [5]}, {"role": "assistant", "token_ids": [6]}]},
        {"prompt": [7], "response": [8]},
    ]
    rollouts = read_rollouts(rows)

    assert parts(rollouts) == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert parts(rollouts, "trained") == [[F, T, T], [F, F, T], [F, T]]


def test_a_mask_says_which_ids_of_a_response_are_trained() -> None:
    rows = [{"prompt": [1], "response": [2, 3, 4], "response_mask": [1, 0, 1]}]
    rows += [{"prompt": [1], "response": [5], "response_mask": [False]}]

    assert parts(read_rollouts(rows), "trained") == [[F, T, F, T], [F, F]]


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [1.0, 3.0]], ids=["every token", "trained tokens"])
def test_values_are_for_every_token_of_a_response_or_for_the_trained_ones(values: list[float]) -> None:
    rows = [{"prompt": [1], "response": [2, 3, 4], "response_mask": [1, 0, 1], "values": values, "reward": 1}]
    found = parts(read_rollouts(rows), "values")

    assert found == [[0, 1, 2, 3]] if len(values) == 3 else found == [[0, 1, 0, 3]]


# Messages


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json whose ids are words: 0 [UNK], 1 user, 2 assistant, 3 tool, 4 hi, 5 yes, 6 no, 7 <, 8 |; and the
    markers of chatml, 9 and 10."""
    vocab = {word: n for n, word in enumerate(["[UNK]", "user", "assistant", "tool", "hi", "yes", "no", "<", "|"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


START, END, USER, ASSISTANT, TOOL, HI, YES, NO = 9, 10, 1, 2, 3, 4, 5, 6
ASKED = [START, USER, HI, END, START, ASSISTANT]
HI_MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("answer", ["yes", {"role": "assistant", "content": "yes"}], ids=["text", "message"])
def test_messages_go_through_the_template_and_the_answer_with_its_end_is_trained(words: Path, answer: Any) -> None:
    rollouts = read_rollouts([{"prompt": HI_MESSAGES, "response": answer}], words, chat_template="chatml")

    assert parts(rollouts) == [[*ASKED, YES, END]]
    assert parts(rollouts, "trained") == [[F] * 6 + [T, T]]


def test_a_response_ends_with_its_end_of_turn() -> None:
    rollouts = read_rollouts([{"prompt": HI_MESSAGES, "response": "yes"}], "bytes", chat_template="chatml")

    assert bytes(parts(rollouts)[0]).endswith(b"<|im_start|>assistant\nyes<|im_end|>")  # chatml writes a line end after
    assert int(rollouts.trained.sum()) == len("yes<|im_end|>")


def test_token_ids_follow_a_prompt_written_up_to_where_an_answer_begins(words: Path) -> None:
    rows = [{"prompt": HI_MESSAGES, "response": ids} for ids in ([5, 10], [6])]
    rollouts = read_rollouts(rows, words, chat_template="chatml")

    assert parts(rollouts) == [[*ASKED, 5, 10], [*ASKED, 6]]
    assert parts(rollouts, "trained") == [[F] * 6 + [T, T], [F] * 6 + [T]]


def test_markers_inside_of_a_prompt_are_plain_text(words: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi <|im_end|>"}], "response": answer} for answer in ([5], "yes")]
    rollouts = read_rollouts(rows, words, chat_template="chatml")

    assert [row[:5] for row in parts(rollouts)] == [[START, USER, HI, 0, END]] * 2  # 0 is what is no word


def test_tool_output_between_turns_is_not_trained(words: Path) -> None:
    turns = [
        {"role": "assistant", "content": "yes <"},  # a call, as some models write it
        {"role": "tool", "content": "hi"},
        {"role": "assistant", "content": "no"},
    ]
    rows = [{"prompt": HI_MESSAGES, "response": turns, "old_log_probs": [-1, -2, -3, -4, -5]}]
    rollouts = read_rollouts(rows, words, chat_template="chatml")

    assert parts(rollouts) == [[*ASKED, YES, 7, END, START, TOOL, HI, END, START, ASSISTANT, NO, END]]
    assert parts(rollouts, "trained") == [[F] * 6 + [T, T, T] + [F] * 6 + [T, T]]
    assert parts(rollouts, "old_log_probs") == [[0] * 6 + [-1, -2, -3] + [0] * 6 + [-4, -5]]


def test_what_assistants_say_in_a_prompt_is_not_trained(words: Path) -> None:
    prompt = [*HI_MESSAGES, {"role": "assistant", "content": "no"}, *HI_MESSAGES]
    rollouts = read_rollouts([{"prompt": prompt, "response": "yes"}], words, chat_template="chatml")

    assert int(rollouts.trained.sum()) == 2


def test_messages_in_a_table_are_messages_too(words: Path) -> None:
    rows = [{"prompt": HI_MESSAGES, "response": "yes"}, {"prompt": HI_MESSAGES, "response": "no"}]
    table = pa.Table.from_pylist(rows)
    from_rows, from_table = (read_rollouts(data, words, chat_template="chatml") for data in (rows, table))

    assert from_table.fingerprint() == from_rows.fingerprint()


# By definition

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "array": lambda ids: np.array(ids, np.int16),
    "text": lambda ids: bytes(ids).decode("ascii"),
    "turns": lambda ids: [
        {"role": "tool" if n % 3 == 1 else "assistant", "token_ids": ids[n : n + 1]} for n in range(len(ids))
    ],
}
IDS = st.lists(st.integers(0, 127), min_size=1, max_size=70)


@given(
    st.lists(
        st.tuples(IDS, st.sampled_from(["list", "array", "text"]), IDS, st.sampled_from(list(FORMS))),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_every_mix_of_forms_is_what_one_row_after_the_other_would_give(samples: Any, random: Any) -> None:
    written = [[b != "turns" or n % 3 != 1 for n in range(len(said))] for _, _, said, b in samples]
    rewards = [
        [n / 2 * mine for n, mine in zip(said, masks, strict=True)]
        for (_, _, said, _), masks in zip(samples, written, strict=True)
    ]
    rows = [
        {"prompt": FORMS[a](asked), "response": FORMS[b](said), "reward": reward, "values": said}
        for (asked, a, said, b), reward in zip(samples, rewards, strict=True)
    ]
    rollouts = read_rollouts(rows, "bytes")

    assert parts(rollouts) == [asked + said for asked, _, said, _ in samples]
    assert parts(rollouts, "trained") == [
        [F] * len(asked) + masks for (asked, *_), masks in zip(samples, written, strict=True)
    ]
    assert parts(rollouts, "values") == [[0] * len(asked) + said for asked, _, said, _ in samples]
    assert rollouts.reward is not None
    assert rollouts.reward.tolist() == [sum(reward) for reward in rewards]
    some = random.choices(range(len(rows)), k=3)
    assert rollouts.take(some).fingerprint() == read_rollouts([rows[n] for n in some], "bytes").fingerprint()


# Rows of rollouts


def test_take_gives_rows_in_the_order_asked_and_numbers_groups_anew() -> None:
    taken = read_rollouts(ROWS).take([1, 0])

    assert taken.fingerprint() == read_rollouts([ROWS[1], ROWS[0]]).fingerprint()
    assert taken.group_names == ("b", "a")


def test_take_counts_from_the_end_and_takes_a_mask() -> None:
    rollouts = read_rollouts(ROWS)

    assert parts(rollouts.take([-1])) == [[9, 13, 14, 15]]
    assert parts(rollouts.take(np.array([True, False, True]))) == [[1, 2, 10, 11], [9, 13, 14, 15]]


def test_take_of_long_rows_is_the_same_as_reading_them() -> None:
    rows = [{"prompt": [n] * 60, "response": [n] * (n + 50), "reward": n} for n in range(5)]

    assert read_rollouts(rows).take([4, 2]).fingerprint() == read_rollouts([rows[4], rows[2]]).fingerprint()
