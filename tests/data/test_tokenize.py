"""Tokenizers: the embedded one, tokenizer.json, a folder; EOS once; nothing truncated; the same on any number of workers."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data.corpora import TEXTS, encoded, pieces, same_documents, write_jsonl
from neatpack.data import PackOptions, pack
from neatpack.data.tokenize import BytesTokenizer, append_eos, load_tokenizer
from neatpack.errors import SourceError


def word_tokenizer(*, ends: bool = False) -> Tokenizer:
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {"<unk>": 0, "<end>": 1, "<pad>": 2, **{word: index for index, word in enumerate(words, 3)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    return tokenizer


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])


def test_bytes_map_a_text_to_its_bytes():
    ids, lengths = BytesTokenizer().encode(pa.array(TEXTS, pa.large_string()))
    assert bytes(ids.astype(np.uint8)).decode() == "".join(TEXTS)
    assert lengths.tolist() == [len(text.encode()) for text in TEXTS]


def test_eos_ends_every_document_once_and_leaves_an_empty_one_empty():
    ids, lengths = append_eos(np.array([5, 7, 9, 5], np.uint8), np.array([2, 0, 1, 1]), 9)
    assert (ids.tolist(), lengths.tolist()) == ([5, 7, 9, 9, 5, 9], [3, 0, 1, 2])
    ids, lengths = append_eos(np.zeros(0, np.uint8), np.zeros(3, np.int64), 300)
    assert (ids.tolist(), lengths.tolist()) == ([], [0, 0, 0])


def test_without_eos_the_text_is_all_there_is(tmp_path, source):
    pack(source, tmp_path / "out", 64, eos=False)
    assert same_documents(tmp_path / "out", [encoded(text, eos=False) for text in TEXTS])


@pytest.mark.parametrize("ends", [False, True])
def test_a_tokenizer_file_gets_its_end_token_once(tmp_path, source, ends):
    tokenizer = word_tokenizer(ends=ends)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pack(source, tmp_path / "out", 64, tokenizer=str(tmp_path / "tokenizer.json"), eos_token="<end>")
    plain = word_tokenizer()
    assert same_documents(tmp_path / "out", [[*plain.encode(text).ids, 1] for text in TEXTS if text])


def test_truncation_and_padding_of_a_tokenizer_file_are_off(tmp_path, source):
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    summary = pack(source, tmp_path / "out", 64, tokenizer=str(tmp_path / "tokenizer.json"), eos=False)
    assert summary.tokens == sum(len(text.split()) for text in TEXTS)


def test_a_tokenizer_file_does_not_say_what_ends_a_document(tmp_path):
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SourceError, match=r"--eos-token"):
        load_tokenizer(PackOptions(seq_len=8, tokenizer=str(tmp_path / "tokenizer.json")))
    with pytest.raises(SourceError, match=r"'<nope>' is not in the vocabulary"):
        load_tokenizer(PackOptions(seq_len=8, tokenizer=str(tmp_path / "tokenizer.json"), eos_token="<nope>"))


def test_a_tokenizer_folder_says_it_itself(tmp_path, source):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), eos_token="<end>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "folder")
    twin = tmp_path / "twin.jsonl"
    twin.write_bytes(source.read_bytes())
    for workers in (1, 2):
        pack([source, twin], tmp_path / f"out{workers}", 64, tokenizer=str(tmp_path / "folder"), workers=workers)
    assert pieces(tmp_path / "out1") == pieces(tmp_path / "out2")
    assert same_documents(tmp_path / "out1", 2 * [[*word_tokenizer().encode(text).ids, 1] for text in TEXTS if text])
    manifest = json.loads((tmp_path / "out1" / "manifest.json").read_text())
    assert (manifest["tokenizer"]["eos_id"], manifest["tokenizer"]["pad_id"]) == (1, 2)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such tokenizer file"), ("{}", "not a tokenizer"), ("nonsense", "not a tokenizer")]
)
def test_a_broken_tokenizer_is_named(tmp_path, content, message):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SourceError, match=message):
        load_tokenizer(PackOptions(seq_len=8, tokenizer=str(path)))


def test_an_unknown_tokenizer_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="cannot be loaded"):
        load_tokenizer(PackOptions(seq_len=8, tokenizer=str(tmp_path / "empty")))


def test_text_ids_past_the_given_vocabulary_are_refused(tmp_path, source):
    with pytest.raises(SourceError, match=r"vocab_size=100 .* tokenizer .* 258"):
        pack(source, tmp_path / "out", 64, vocab_size=100)
