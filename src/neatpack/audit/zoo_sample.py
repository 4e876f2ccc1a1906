"""The third of the matrix that tests measure again: a few models of every mechanism that decides how boundaries are honoured.

Chosen by hand once and named here, so that every run measures the same models. A model stands where its most unusual trait is;
a test holds that the sample is a third of all, and that every reason for a refusal which the page states occurs in it.
"""

MECHANISMS: dict[str, tuple[str, ...]] = {
    "plain decoders: positions reach the mask builder": ("llama", "qwen3", "glm4", "phi", "gpt_neox", "starcoder2"),
    "mask builders that never see positions": ("opt", "biogpt"),
    "encoders configured as decoders, with a 4-D mask": ("bert", "electra"),
    "positions counted from the padding id on": ("roberta", "xlm-roberta-xl", "xmod"),
    "one sliding window": ("mistral", "ministral", "moshi"),
    "windows by layer type": ("gemma3_text", "olmo3", "modernbert-decoder", "exaone4"),
    "windows by layer type, masks without positions": ("afmoe",),
    "chunks": ("llama4_text",),
    "attention sinks": ("gpt_oss", "granite_swa", "mimo_v2_flash"),
    "soft-capped scores": ("gemma2", "vaultgemma"),
    "one key head for all queries, or few": ("gpt_bigcode", "gemma"),
    "latent attention": ("deepseek_v3", "minicpm3"),
    "selected keys": ("deepseek_v32", "hy_v4", "dots3_note_text"),
    "selection in code of its own, or in blocks": ("doge", "minimax_m3_vl_text"),
    "mixtures of experts": ("mixtral", "dbrx", "longcat_flash"),
    "differential attention": ("diffllama",),
    "learned positions, Conv1D projections": ("gpt2",),
    "layers that lose keyword arguments": ("nemotron",),
    "attention classes of its own, by name": ("falcon", "gpt_neo"),
    "attention in code of its own": ("xglm", "gpt_neox_japanese", "megatron-bert", "big_bird", "roformer"),
    "masks in code of its own": ("openai-gpt", "xlm", "reformer"),
    "ALiBi": ("mpt", "bloom"),
    "state spaces": ("mamba2", "bamba", "jamba"),
    "linear attention and short convolutions": ("qwen3_next", "lfm2", "minimax", "recurrent_gemma", "rwkv"),
    "decoders of encoder-decoder models, positions along the row": ("bart", "whisper", "trocr"),
    "several models, or another one's keys": ("gemma4", "gemma3", "gemma4_assistant", "fuyu"),
}

SAMPLE: tuple[str, ...] = tuple(sorted(name for names in MECHANISMS.values() for name in names))
"""The models of all mechanisms, sorted."""
