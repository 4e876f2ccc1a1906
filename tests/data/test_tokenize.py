"""Tokenizers: the embedded one, tokenizer.json, a folder; EOS once; nothing truncated; the same on any number of workers."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizer

from data.corpora import TEXTS, encoded, pieces, same_documents, write_jsonl
from neatpack.data import PackOptions, pack, verify
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


def spelling_tokenizer(template: str | None = "<s> $A </s>") -> Tokenizer:
    """Splits into characters; knows `<s>` and `</s>` as special tokens, and puts them where the template says."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{letter: index for index, letter in enumerate("abc<>/s ", 3)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


class SpellingPythonTokenizer(PreTrainedTokenizer):
    """The same, written in Python."""

    def __init__(self, **options):
        self._ids = spelling_tokenizer().get_vocab()
        super().__init__(unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options)

    @property
    def vocab_size(self):
        return len(self._ids)

    def get_vocab(self):
        return dict(self._ids)

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._ids.get(token, 0)

    def _convert_id_to_token(self, index):
        return {id_: token for token, id_ in self._ids.items()}[index]

    def build_inputs_with_special_tokens(self, ids, pair=None):
        return [1, *ids, 2]

    def get_special_tokens_mask(self, ids, pair=None, already_has_special_tokens=False):
        return [1, *[0] * len(ids), 1]


@pytest.fixture(params=["file", "python"])
def spelling(request, monkeypatch, tmp_path):
    """Pack texts with a tokenizer that surrounds them; their documents, and the summary."""
    spelling_tokenizer().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: SpellingPythonTokenizer())
    name = str(tmp_path / "tokenizer.json") if request.param == "file" else "in-python"

    def packed(texts, **options):
        path = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
        if request.param == "file" and options.get("eos", True):
            options["eos_token"] = "</s>"
        summary = pack(path, tmp_path / "out", 64, tokenizer=name, overwrite=True, seed=None, **options)
        return sorted(pieces(tmp_path / "out")), summary

    return packed


def test_without_eos_what_a_tokenizer_appends_by_itself_is_left_off(spelling):
    texts = ["ab", "c", ""]
    assert spelling(texts)[0] == [(1, 3, 4, 2), (1, 5, 2)]
    assert spelling(texts, eos=False)[0] == [(1, 3, 4), (1, 5)]


def test_special_tokens_that_a_text_spells_out_are_counted_by_name_or_split(spelling):
    texts = ["a</s>b", "a</s>b</s>c<s>", "ab", "a<s>", "ab</s>"]
    documents, summary = spelling(texts)
    assert documents == [(1, 3, 1, 2), (1, 3, 2, 4, 2), (1, 3, 2, 4, 2, 5, 1, 2), (1, 3, 4, 2), (1, 3, 4, 2, 2)]
    # An EOS of its own at the end of a text is no surprise; where the tokenizer adds one too, there are two.
    assert summary.spelled == {"</s>": 2, "<s>": 2}
    documents, summary = spelling(texts, split_special_tokens=True)
    assert documents == sorted((1, *(spelling_tokenizer().get_vocab()[letter] for letter in text), 2) for text in texts)
    assert summary.spelled == {}


def test_what_texts_spell_out_is_in_the_manifest_and_the_same_from_any_number_of_workers(tmp_path):
    spelling_tokenizer(None).save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer": str(tmp_path / "tokenizer.json"), "eos_token": "</s>"}
    (tmp_path / "texts").mkdir()
    for number in range(3):
        write_jsonl(tmp_path / "texts" / f"{number}.jsonl", [{"text": "a</s>b"}, {"text": "<s>" * number}, {"text": "a</s>"}])
    manifests = []
    for workers in (1, 2):
        summary = pack(tmp_path / "texts", tmp_path / f"out{workers}", 64, workers=workers, **options)
        assert summary.spelled == {"</s>": 3, "<s>": 2}
        manifests.append((tmp_path / f"out{workers}" / "manifest.json").read_text())
        assert verify(tmp_path / f"out{workers}", [tmp_path / "texts"]).source
    assert manifests[0] == manifests[1]
    assert json.loads(manifests[0])["counts"]["spelled"] == {"</s>": 3, "<s>": 2}
    assert json.loads(manifests[0])["options"]["split_special_tokens"] is False


def test_a_tokenizer_that_cannot_say_every_text_is_looked_at_with_one_that_it_can(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("a")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": "b"}])
    pack(path, tmp_path / "out", 8, tokenizer=str(tmp_path / "tokenizer.json"), eos=False)
    assert pieces(tmp_path / "out") == [(2,)]
