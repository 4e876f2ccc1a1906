"""A flash_attn stand-in on the CPU, so that transformers' real flash path runs: its own code down to the kernel call.

The kernel computes what FlashAttention-2 documents, from the definition, and is as strict as the real one where it matters
here: int32 offsets, and NaN in every output position that the offsets do not cover. Nothing in transformers is replaced:
`install` puts a `flash_attn` package where imports find it, beside the metadata that transformers looks for, and lets the
cached availability probe run once while CUDA is reported available.
"""

import importlib
import importlib.machinery
import itertools
import sys
import types

import torch
from torch.nn import functional


def attend(query, key, value, causal, scale, window, softcap):
    """`[n, H, D]`, `[m, Hkv, D]`: one sequence, causal from the bottom right."""
    queries, keys = len(query), len(key)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("nhd,mhd->hnm", query.float(), key.float()) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)
    left, right = window
    hidden = (ahead > 0) if causal else torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= (ahead < -left) if left >= 0 else False
    hidden |= (ahead > right) if right >= 0 else False
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, value.float()).to(query.dtype)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    rows = zip(q, k, v, strict=True)
    return torch.stack([attend(*row, causal, softmax_scale, window_size, softcap) for row in rows])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    if cu_seqlens_q.dtype != torch.int32 or cu_seqlens_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q and cu_seqlens_k must have dtype int32")
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    longest = max((end - start for start, end in itertools.pairwise(queries)), default=0)
    if longest > int(max_seqlen_q):
        raise RuntimeError("max_seqlen_q is less than the longest sequence")
    pieces = [torch.full_like(q[: queries[0]], float("nan"))]
    for index in range(len(queries) - 1):
        mine, theirs = slice(*queries[index : index + 2]), slice(*keys[index : index + 2])
        pieces.append(attend(q[mine], k[theirs], v[theirs], causal, softmax_scale, window_size, softcap))
    return torch.cat([*pieces, torch.full_like(q[queries[-1] :], float("nan"))])


def flash_attn_with_kvcache(q, k_cache, v_cache, **options):
    raise NotImplementedError("the stand-in computes whole sequences only")


def pad_input(hidden_states, indices, batch, seqlen):
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    offsets = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), lengths


def module(name, *functions):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    made.__path__ = []
    for function in functions:
        setattr(made, function.__name__, function)
    return made


def write_metadata(folder, package, version):
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{package}\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n")


def clear_probes():
    from transformers.utils import import_utils

    probes = ("_package_distribution_mapping", "is_flash_attn_2_available", "is_torch_cuda_available")
    for name in (*probes, "is_flash_attn_greater_or_equal"):
        getattr(getattr(import_utils, name, None), "cache_clear", lambda: None)()


def install(monkeypatch, folder):
    """Make `attn_implementation="flash_attention_2"` loadable for one test; `monkeypatch` takes everything back."""
    from transformers.utils import import_utils

    package = module("flash_attn", flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    package.__version__ = "2.8.3"
    package.bert_padding = module("flash_attn.bert_padding", pad_input, unpad_input)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", package.bert_padding)
    write_metadata(folder, "flash_attn", "2.8.3")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    clear_probes()
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, "is_available", lambda: True)
        assert import_utils.is_flash_attn_2_available()
    import_utils.is_torch_cuda_available.cache_clear()
