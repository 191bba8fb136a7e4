"""Preparing the data of a run: from its files to sequences on disk."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import CHATML, MISTRAL, save_tokenizer, vocab_size, write_jsonl

from triweave.config.schema import DataConfig, ModelConfig, Run
from triweave.data.cache import PreparedData, prepare
from triweave.data.dataset import Dataset, count_trained_tokens
from triweave.data.split import content_hash, held_out
from triweave.data.summary import warnings
from triweave.errors import InputError, RunFailed


def chats(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}?"},
                {"role": "assistant", "content": f"{n} is a number. " * (1 + n % 5)},
            ]
        }
        for n in range(start, start + count)
    ]


def make_run(tmp_path: Path, records: list[dict[str, Any]] | None = None, **data: Any) -> Run:
    save_tokenizer(tmp_path / "model")
    path = write_jsonl(tmp_path / "train.jsonl", chats(50) if records is None else records)
    config = DataConfig(**{"train": (str(path),), "seq_len": 128, **data})
    return Run(ModelConfig(str(tmp_path / "model")), config, output_dir=str(tmp_path / "run"), seed=3)


def prepared(run: Run) -> PreparedData:
    return prepare(run, vocab_size())


def documents(dataset: Dataset) -> list[tuple[list[int], list[bool]]]:
    """Tokens and training marks of every document, in the order in which they were read."""
    order = np.argsort(dataset.examples, kind="stable")
    starts = dataset.document_starts
    return [
        (dataset.tokens[starts[d] : starts[d + 1]].tolist(), dataset.trained[starts[d] : starts[d + 1]].tolist())
        for d in order
    ]


def refusal(run: Run) -> str:
    with pytest.raises(InputError) as raised:
        prepared(run)
    return str(raised.value)


def call_prepare(run: Run, queue: Any) -> None:
    calls: list[str] = []
    made = prepare(run, vocab_size(), lambda what, count: calls.append(what))
    queue.put((calls.count("tokenised") > 0, made.summary.fingerprint, made.train().num_sequences))


def test_data_is_prepared_once(tmp_path: Path) -> None:
    """The second call finds the first one's work, equal in every number."""
    run = make_run(tmp_path)
    calls: list[tuple[str, int]] = []
    first = prepare(run, vocab_size(), lambda what, count: calls.append((what, count)))
    assert calls[-1] == ("tokenised", 50)
    assert prepare(run, vocab_size(), lambda what, count: pytest.fail("built again")) == first
    assert [path.name for path in (tmp_path / "run" / "data").iterdir()] == [first.folder.name]


def test_four_processes_prepare_once(tmp_path: Path) -> None:
    """The ranks of a node start together: one of them builds, all get the same data."""
    run = make_run(tmp_path)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=call_prepare, args=(run, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(built for built, _, _ in results) == [False, False, False, True]
    assert len({result[1:] for result in results}) == 1


def test_packed_and_unpacked_hold_the_same_examples(tmp_path: Path) -> None:
    """Packing moves examples about and changes none."""
    run = make_run(tmp_path, validation=0.0)
    packed, unpacked = prepared(run), prepared(replace(run, data=replace(run.data, packing=False)))
    assert documents(packed.train()) == documents(unpacked.train())
    assert unpacked.train().num_sequences == 50 == unpacked.summary.train.sequences
    assert packed.summary.train.sequences < 25
    assert packed.summary.train.efficiency > 0.9
    assert packed.summary.train.trained_tokens == unpacked.summary.train.trained_tokens


def test_numbers_of_the_summary_are_those_of_the_arrays(tmp_path: Path) -> None:
    """Tokens, trained tokens, sequences and their room, counted again from the arrays."""
    made = prepared(make_run(tmp_path))
    dataset, summary = made.train(), made.summary.train
    assert summary.examples == len(dataset.examples) == 50 - made.summary.validation.examples  # type: ignore[union-attr]
    assert summary.tokens == len(dataset.tokens)
    assert summary.trained_tokens == int(dataset.trained.sum()) == int(dataset.trained_counts.sum())
    assert summary.efficiency == pytest.approx(summary.tokens / (summary.sequences * 128))
    for number in range(dataset.num_sequences):
        edges = dataset.boundaries(number)
        assert 0 < edges[-1] - edges[0] <= 128
        assert not dataset.trained[edges[:-1]].any()
        assert count_trained_tokens(dataset, [number]) == int(dataset.trained[edges[0] : edges[-1]].sum())
    assert count_trained_tokens(dataset, [0, 0, -1]) == 2 * count_trained_tokens(dataset, [0])


def test_validation_share_is_held_out_by_content(tmp_path: Path) -> None:
    """A fifth, spread over the file and not its tail; another seed holds out others; none is in both."""
    run = make_run(tmp_path, validation=0.2)
    made = prepared(run)
    held = made.validation()
    assert held is not None
    assert sorted([*held.examples.tolist(), *made.train().examples.tolist()]) == list(range(50))
    assert len(held.examples) == 10
    assert held.examples.max() - held.examples.min() > 20
    other = prepared(replace(run, seed=4)).validation()
    assert other is not None
    assert set(other.examples.tolist()) != set(held.examples.tolist())


def test_validation_path_is_prepared_apart(tmp_path: Path) -> None:
    """A path is held out whole, in its own format."""
    path = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "What is 7?", "completion": "A number."}] * 3)
    made = prepared(make_run(tmp_path, validation=str(path)))
    assert made.summary.train.examples == 50
    assert made.summary.validation is not None
    assert made.summary.validation.examples == 3
    assert made.summary.validation_source is not None
    assert made.summary.validation_source.format == "prompt"


def test_no_validation_is_no_data_set(tmp_path: Path) -> None:
    """A share of 0 holds out nothing, and one example cannot be shared out, which is said."""
    assert prepared(make_run(tmp_path, validation=0)).validation() is None
    lonely = prepared(make_run(tmp_path, chats(1)))
    assert lonely.validation() is None
    assert any("one example cannot be shared out" in warning for warning in warnings(lonely.summary))


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 256},
        {"packing": False},
        {"loss_on": "all"},
        {"too_long": "drop"},
        {"validation": 0.1},
        {"format": "messages"},
    ],
)
def test_every_setting_that_matters_makes_other_data(tmp_path: Path, change: dict[str, Any]) -> None:
    """No cached data is taken for another setting's."""
    run = make_run(tmp_path)
    assert prepared(replace(run, data=replace(run.data, **change))).folder != prepared(run).folder


def test_changed_file_tokenizer_template_and_vocabulary_make_other_data(tmp_path: Path) -> None:
    """The content counts: one changed byte is other data; a touched or copied file is not."""
    run = make_run(tmp_path)
    folders = [prepared(run).folder]
    os.utime(tmp_path / "train.jsonl", (0, 0))
    assert prepared(run).folder == folders[0]
    assert prepared(replace(run, optimizer=replace(run.optimizer, learning_rate=1.0))).folder == folders[0]
    folders.append(prepare(run, vocab_size() + 1).folder)
    write_jsonl(tmp_path / "train.jsonl", chats(50, start=1))
    folders.append(prepared(run).folder)
    save_tokenizer(tmp_path / "model", pad_token="</s>")  # noqa: S106
    folders.append(prepared(run).folder)
    save_tokenizer(tmp_path / "model", chat_template=MISTRAL)
    folders.append(prepared(run).folder)
    folders.append(prepared(replace(run, seed=4)).folder)
    assert len(set(folders)) == len(folders)


def test_chat_template_travels_with_the_data(tmp_path: Path) -> None:
    """The exact template that was trained with is kept, for the exported folder; text has none."""
    assert prepared(make_run(tmp_path)).chat_template() == CHATML
    assert prepared(make_run(tmp_path, [{"text": "The fox"}])).chat_template() is None


def test_every_wrong_setting_is_named_at_once(tmp_path: Path) -> None:
    """Files, sizes, shares and the tokenizer: one message for all of them, and nothing is written."""
    run = make_run(tmp_path, train=("nowhere.jsonl",), seq_len=1, validation=1.5, tokenizer=str(tmp_path / "none"))
    lines = refusal(replace(run, seed=-1)).splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "data.seq_len",
        "data.validation",
        "seed",
        "data.train",
        "data.tokenizer",
    ]
    assert not (tmp_path / "run").exists()


def test_empty_data_set_is_refused(tmp_path: Path) -> None:
    """No record, and no example short enough, are both the end of it."""
    assert "holds no records" in refusal(make_run(tmp_path, []))
    message = refusal(make_run(tmp_path, seq_len=4, too_long="drop"))
    assert "every example is longer than seq_len = 4 tokens and was dropped" in message


def test_conversations_are_not_cut_into_pieces(tmp_path: Path) -> None:
    """The second half of a conversation would answer what it does not hold."""
    message = refusal(make_run(tmp_path, too_long="split"))
    assert message.startswith("data.too_long = split: cuts text and tokens only")
    assert message.endswith("nearest: truncate or drop")


def test_bad_rows_of_all_kinds_are_named_together(tmp_path: Path) -> None:
    """A broken line, a bad message and a conversation that the template refuses, found in one reading."""
    run = make_run(tmp_path)
    save_tokenizer(tmp_path / "model", chat_template=MISTRAL)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[1] = "{"
    lines[2] = '{"messages": []}'
    lines[3] = '{"messages": [{"role": "assistant", "content": "first"}]}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    found = refusal(run).splitlines()
    assert sorted(line.split(": ")[0].rpartition(":")[2] for line in found) == ["2", "3", "4"]


def test_long_text_is_split_and_its_pieces_stay_on_one_side(tmp_path: Path) -> None:
    """Pieces of a document are held out together; a lone document is shared out by pieces."""
    texts = [{"text": " ".join(f"{n} {i}" for i in range(200))} for n in range(10)]
    made = prepared(make_run(tmp_path, texts, too_long="split", validation=0.2))
    held = made.validation()
    assert held is not None
    assert made.summary.source.split == 10
    pieces = np.concatenate([held.examples, made.train().examples])
    assert sorted(pieces.tolist()) == list(range(len(pieces)))
    assert len(held.examples) == pytest.approx(len(pieces) / 5, abs=2)
    # Two whole documents: their pieces stand in two unbroken rows of the order in which they were read.
    assert (np.diff(np.sort(held.examples)) > 1).sum() <= 1
    lone = prepared(make_run(tmp_path, texts[:1], too_long="split", validation=0.2)).validation()
    assert lone is not None
    assert len(lone.examples) > 0


def test_prepared_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    """Data that was tokenised before is taken as it is."""
    run = make_run(tmp_path, [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}] * 4, format="tokens", validation=0)
    run = replace(run, model=ModelConfig(str(tmp_path / "nowhere")))
    assert documents(prepared(run).train()) == [([1, 2, 3], [False, True, False])] * 4


def test_warnings_say_what_is_worth_a_look(tmp_path: Path) -> None:
    """Untrained, cut, unanswered and repeated examples are counted, each with its consequence."""
    records = [*chats(5), *chats(1), {"messages": [{"role": "user", "content": "Hello?"}]}]
    records.append({"messages": [*chats(1)[0]["messages"], {"role": "user", "content": "More"}]})
    made = prepared(make_run(tmp_path, records, seq_len=60, too_long="truncate"))
    text = "\n".join(warnings(made.summary))
    assert f"1 of 8 examples dropped: none of their tokens is trained (first: {tmp_path}/train.jsonl:7)" in text
    assert "of 8 examples cut off at seq_len = 60 tokens" in text
    assert "2 of 8 examples do not end with the assistant" in text
    assert "1 of 8 examples repeat an earlier example" in text
    assert warnings(prepared(make_run(tmp_path, chats(5))).summary) == []


def test_damaged_data_is_noticed(tmp_path: Path) -> None:
    """A file that is cut short, swapped or missing is named, with what to do about it."""
    made = prepared(make_run(tmp_path))
    tokens = made.folder / "train" / "tokens.npy"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-8])
    with pytest.raises(RunFailed, match=r"damaged data .* delete it and it is made again"):
        made.train()
    tokens.write_bytes((made.folder / "validation" / "tokens.npy").read_bytes())
    with pytest.raises(RunFailed, match="files of different data sets"):
        made.train()
    tokens.unlink()
    with pytest.raises(RunFailed, match="damaged data"):
        made.train()


def test_pickles_are_never_read(tmp_path: Path) -> None:
    """An array of objects would be one: it is refused."""
    made = prepared(make_run(tmp_path))
    np.save(made.folder / "train" / "tokens.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(RunFailed, match="damaged"):
        made.train()


def test_disk_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A file where the folder should be: one sentence, no traceback."""
    run = make_run(tmp_path)
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(RunFailed, match="cannot prepare the data in"):
        prepared(run)


def test_damaged_summary_is_said(tmp_path: Path) -> None:
    """The mark of a finished folder is read back with care."""
    made = prepared(make_run(tmp_path))
    (made.folder / "meta.json").write_text('{"seq_len": 3}')
    with pytest.raises(RunFailed, match=r"meta.json is damaged .* delete"):
        prepared(make_run(tmp_path))


def test_hash_depends_on_content_and_seed_alone() -> None:
    """Equal examples have equal hashes, and another seed orders them anew."""
    ids = np.array([1, 2, 3], dtype=np.int32)
    assert content_hash(ids, 1) == content_hash(ids.copy(), 1)
    assert len({content_hash(ids, 1), content_hash(ids, 2), content_hash(ids[::-1].copy(), 1)}) == 3


def test_few_examples_still_leave_one_on_each_side() -> None:
    """A tiny share holds out one, a huge one leaves one."""
    hashes = [5, 3, 9, 1]
    assert held_out(hashes, [0, 1, 2, 3], 0.01).tolist() == [False, False, False, True]
    assert held_out(hashes, [0, 1, 2, 3], 0.99).sum() == 3
    assert not held_out(hashes, [0, 1, 2, 3], 0.0).any()
    assert not held_out([5], [0], 0.5).any()


def test_added_row_moves_few_others() -> None:
    """The split is decided by content: appending a row to a file changes the side of hardly any other."""
    hashes = [content_hash(np.array([n], dtype=np.int32), 0) for n in range(1001)]
    before = held_out(hashes[:1000], range(1000), 0.1)
    after = held_out(hashes, range(1001), 0.1)[:1000]
    assert (before != after).sum() <= 1
