"""Text in, token ids out: the embedded `bytes` tokenizer, a `tokenizer.json`, a tokenizer's folder or a hub name.

The `bytes` tokenizer maps a text to its UTF-8 bytes, ids 0 to 255, with 256 for the end of a sequence and 257 for padding.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
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
        """Ids `[T]` and lengths `[D] int64` of a `large_string` array without nulls, without the appended EOS."""

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

    def decode(self, ids: np.ndarray) -> str:
        """See `Tokenizer.decode`; bytes that are no UTF-8 become U+FFFD."""
        names = {BYTES_EOS: b"<eos>", BYTES_PAD: b"<pad>"}
        parts = (bytes((id_,)) if id_ < BYTES_EOS else names.get(id_, b"<%d>" % id_) for id_ in ids.tolist())
        return b"".join(parts).decode("utf-8", "replace")


class FastTokenizer:
    """A tokenizer of the `tokenizers` package, without its truncation and padding: nothing may be lost or added."""

    def __init__(self, backend: Any, options: PackOptions, eos_token: str | None, pad_id: int | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        eos_id = _eos_id(options, eos_token, backend.token_to_id)
        digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self.info = TokenizerInfo(options.tokenizer, vocab_size, eos_id, pad_id, digest)

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode`; an empty text stays empty, without the tokens that the tokenizer would add."""
        strings = texts.to_pylist()
        encoded = iter(self._backend.encode_batch([text for text in strings if text]))
        return _flatten([next(encoded).ids if text else [] for text in strings])

    def decode(self, ids: np.ndarray) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._backend.decode(ids.tolist(), skip_special_tokens=False)
        return text


class SlowTokenizer:
    """A transformers tokenizer that is written in Python."""

    def __init__(self, tokenizer: Any, options: PackOptions) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        eos_id = _eos_id(options, tokenizer.eos_token, vocabulary.get)
        digest = hashlib.sha256(repr(sorted(vocabulary.items())).encode()).hexdigest()
        size = 1 + max(vocabulary.values(), default=0)
        self.info = TokenizerInfo(options.tokenizer, size, eos_id, tokenizer.pad_token_id, digest)

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode`."""
        strings = texts.to_pylist()
        return _flatten(
            [self._tokenizer(text, truncation=False, verbose=False)["input_ids"] if text else [] for text in strings]
        )

    def decode(self, ids: np.ndarray) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _flatten(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(ids) for ids in lists], np.int64)
    parts = [np.array(ids, np.int32) for ids in lists]
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
