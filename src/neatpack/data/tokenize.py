"""Text in, token ids out: the embedded `bytes` tokenizer, a `tokenizer.json`, a tokenizer's folder or a hub name.

The `bytes` tokenizer maps a text to its UTF-8 bytes, ids 0 to 255, with 256 for the end of a sequence and 257 for padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from neatpack.data.columns import text_parts
from neatpack.data.options import PackOptions
from neatpack.errors import MissingDependencyError, SourceError

BYTES = "bytes"
BYTES_EOS = 256
BYTES_PAD = 257

PROBES = 100
"""Words of a vocabulary to try, to see what a tokenizer puts around a text."""


@dataclass(frozen=True)
class TokenizerInfo:
    """What the rest of the pipeline, and the reader of the manifest, needs to know of a tokenizer.

    Attributes:
        name: as the user gave it.
        vocab_size: one more than the largest id.
        eos_id: id that ends a document, or None where none is appended.
        pad_id: id for padding, or None where the tokenizer has none.
        fingerprint: digest of the tokenizer's definition.
    """

    name: str
    vocab_size: int
    eos_id: int | None
    pad_id: int | None
    fingerprint: str


class Tokenizer(Protocol):
    """Texts in, ids out."""

    info: TokenizerInfo

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Ids `[T]` and lengths `[D] int64` of a `large_string` array without nulls, without the appended EOS.

        What the tokenizer puts around every text (a first token, a last one) is there; the last one not under `eos=False`.
        """

    def spelled_out(self, ids: np.ndarray, lengths: np.ndarray) -> dict[str, int]:
        """Special tokens that the texts themselves spell out, in what `encode` gave: in how many documents, by name.

        An EOS token that ends its text is none of them: such texts bring their own.
        """

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids `[n]`, special tokens by name: for reading, since not every id sequence is text."""


def load_tokenizer(options: PackOptions) -> Tokenizer:
    """Load the tokenizer that the options name.

    Raises:
        SourceError: it cannot be loaded, or it does not say which token ends a sequence.
        MissingDependencyError: the package that reads it is not installed.
    """
    if options.tokenizer == BYTES:
        if options.eos_token is not None:
            raise SourceError(f"the bytes tokenizer ends documents with id {BYTES_EOS}; it has no token {options.eos_token!r}.")
        return BytesTokenizer(eos=options.eos)
    if options.tokenizer.endswith(".json"):
        return FastTokenizer(_read_tokenizer_json(options.tokenizer), options, None, None)
    return _load_pretrained(options)


def append_eos(ids: np.ndarray, lengths: np.ndarray, eos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Append the end-of-sequence id to every document that is not empty and does not end with it."""
    ends = np.cumsum(lengths)
    needs = lengths > 0
    needs[needs] = ids[ends[needs] - 1] != eos_id
    longer = lengths + needs
    total = int(longer.sum())
    dtype = np.promote_types(ids.dtype, np.min_scalar_type(eos_id))
    out = np.empty(total, dtype)
    is_eos = np.zeros(total, bool)
    is_eos[np.cumsum(longer)[needs] - 1] = True
    out[is_eos] = eos_id
    out[~is_eos] = ids
    return out, longer


class BytesTokenizer:
    """One token a byte; needs no download."""

    def __init__(self, *, eos: bool = True) -> None:
        self.info = TokenizerInfo(BYTES, BYTES_PAD + 1, BYTES_EOS if eos else None, BYTES_PAD, "bytes-1")

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode`; the ids are the Arrow buffer itself."""
        data, offsets = text_parts(texts)
        return data, np.diff(offsets)

    def spelled_out(self, ids: np.ndarray, lengths: np.ndarray) -> dict[str, int]:
        """See `Tokenizer.spelled_out`; no text spells a token that is no byte."""
        return {}

    def decode(self, ids: np.ndarray) -> str:
        """See `Tokenizer.decode`; bytes that are no UTF-8 become U+FFFD."""
        names = {BYTES_EOS: b"<eos>", BYTES_PAD: b"<pad>"}
        plain, *after_special = np.split(ids, np.flatnonzero(ids >= BYTES_EOS))
        parts = [plain.astype(np.uint8).tobytes()]
        for run in after_special:
            parts += [names.get(int(run[0]), b"<%d>" % run[0]), run[1:].astype(np.uint8).tobytes()]
        return b"".join(parts).decode("utf-8", "replace")


@dataclass(frozen=True)
class Surroundings:
    """The special tokens of a tokenizer, and how many of them it puts around every text by itself.

    Attributes:
        names: those that a text can spell out, by id.
        before: how many it puts before a text, and `after` how many behind it.
        eos_id: the one that ends a document, or None.
    """

    names: Mapping[int, str]
    before: int
    after: int
    eos_id: int | None

    @classmethod
    def read(
        cls, names: Mapping[int, str], vocabulary: Mapping[str, int], added: Callable[[str], Sequence[int]], eos_id: int | None
    ) -> Surroundings:
        """Look at a short text: `added` says 1 of each of its tokens that the tokenizer added. The first that has others."""
        for text in ("a", *[word for word, id_ in islice(vocabulary.items(), PROBES) if id_ not in names]):
            try:
                mask = list(added(text))
            except Exception:  # the packages raise plain Exception on a text that the vocabulary cannot say
                continue
            if 0 in mask:
                return cls(names, mask.index(0), mask[::-1].index(0), eos_id)
        return cls(names, 0, 0, eos_id)

    def spelled_out(self, ids: np.ndarray, lengths: np.ndarray) -> dict[str, int]:
        """See `Tokenizer.spelled_out`."""
        special = np.flatnonzero(np.isin(ids, list(self.names)))
        ends = np.cumsum(lengths)
        owners = np.searchsorted(ends, special, side="right")
        last = ends[owners] - self.after - 1
        inside = (special - (ends - lengths)[owners] >= self.before) & (special <= last)
        inside &= (special < last) | (ids[special] != (-1 if self.eos_id is None else self.eos_id))
        pairs = np.unique(np.stack([ids[special[inside]].astype(np.int64), owners[inside]]), axis=1)
        return {self.names[id_]: count for id_, count in zip(*_counted(pairs[0]), strict=True)}


def _counted(values: np.ndarray) -> tuple[list[int], list[int]]:
    distinct, counts = np.unique(values, return_counts=True)
    return distinct.tolist(), counts.tolist()


class _Surrounded:
    """What tokenizers with special tokens have in common."""

    def __init__(self, around: Surroundings, options: PackOptions) -> None:
        self._around = around
        self._cut = 0 if options.eos else around.after

    def spelled_out(self, ids: np.ndarray, lengths: np.ndarray) -> dict[str, int]:
        """See `Tokenizer.spelled_out`."""
        return self._around.spelled_out(ids, lengths)


class FastTokenizer(_Surrounded):
    """A tokenizer of the `tokenizers` package, without its truncation and padding: nothing may be lost or added."""

    def __init__(self, backend: Any, options: PackOptions, eos_token: str | None, pad_id: int | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = options.split_special_tokens
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        vocab_size = 1 + max(vocabulary.values(), default=0)
        eos_id = _eos_id(options, eos_token, backend.token_to_id)
        digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self.info = TokenizerInfo(options.tokenizer, vocab_size, eos_id, pad_id, digest)
        names = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items() if token.special}
        around = Surroundings.read(names, vocabulary, lambda text: backend.encode(text).special_tokens_mask, eos_id)
        super().__init__(around, options)

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode`; an empty text stays empty, without the tokens that the tokenizer would add."""
        strings = texts.to_pylist()
        encoded = iter(self._backend.encode_batch([text for text in strings if text]))
        return _flatten([next(encoded).ids if text else [] for text in strings], self._cut)

    def decode(self, ids: np.ndarray) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._backend.decode(ids.tolist(), skip_special_tokens=False)
        return text


class SlowTokenizer(_Surrounded):
    """A transformers tokenizer that is written in Python."""

    def __init__(self, tokenizer: Any, options: PackOptions) -> None:
        self._tokenizer = tokenizer
        self._options = {"truncation": False, "verbose": False, "split_special_tokens": options.split_special_tokens}
        vocabulary = tokenizer.get_vocab()
        eos_id = _eos_id(options, tokenizer.eos_token, vocabulary.get)
        digest = hashlib.sha256(repr(sorted(vocabulary.items())).encode()).hexdigest()
        size = 1 + max(vocabulary.values(), default=0)
        self.info = TokenizerInfo(options.tokenizer, size, eos_id, tokenizer.pad_token_id, digest)
        names = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        super().__init__(Surroundings.read(names, vocabulary, self._added, eos_id), options)

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode`."""
        strings = texts.to_pylist()
        return _flatten([self._tokenizer(text, **self._options)["input_ids"] if text else [] for text in strings], self._cut)

    def _added(self, text: str) -> list[int]:
        mask: list[int] = self._tokenizer(text, return_special_tokens_mask=True, **self._options)["special_tokens_mask"]
        return mask

    def decode(self, ids: np.ndarray) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _flatten(lists: list[list[int]], cut: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and lengths of documents, the last `cut` tokens of each left off."""
    parts = [np.array(ids[: len(ids) - cut] if ids else ids, np.int32) for ids in lists]
    lengths = np.array([len(ids) for ids in parts], np.int64)
    return np.concatenate(parts) if parts else np.empty(0, np.int32), lengths


def _eos_id(options: PackOptions, own: str | None, to_id: Any) -> int | None:
    if not options.eos:
        return None
    token = options.eos_token or own
    if token is None:
        raise SourceError(
            f"{options.tokenizer}: the tokenizer does not say which token ends a document. Name it with --eos-token, pass "
            "--no-eos, or pass the tokenizer's folder, whose configuration says it."
        )
    eos_id: int | None = to_id(token)
    if eos_id is None:
        raise SourceError(f"{options.tokenizer}: the end-of-sequence token {token!r} is not in the vocabulary.")
    return eos_id


def _read_tokenizer_json(path: str) -> Any:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise MissingDependencyError("tokenizers", f"the tokenizer {path}", "neatpack[hf]") from error
    if not Path(path).is_file():
        raise SourceError(
            f"{path}: no such tokenizer file. Pass 'bytes', a tokenizer.json, a tokenizer's folder or a hub name."
        )
    try:
        return Backend.from_file(path)
    except Exception as error:  # the package raises plain Exception
        raise SourceError(f"{path}: not a tokenizer ({error}).") from error


def _load_pretrained(options: PackOptions) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", f"the tokenizer {options.tokenizer!r}", "neatpack[hf]") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise SourceError(
            f"tokenizer {options.tokenizer!r} cannot be loaded ({first_line}). Pass 'bytes', a tokenizer.json, a "
            "tokenizer's folder or a hub name."
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return SlowTokenizer(tokenizer, options)
    return FastTokenizer(backend, options, tokenizer.eos_token, tokenizer.pad_token_id)
