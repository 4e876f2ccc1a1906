"""transformers: packed attention that isolates documents on any device, through its public interfaces only."""

from neatpack.hf.collator import collator_for as collator_for
from neatpack.hf.context_parallel import ContextParallel as ContextParallel
from neatpack.hf.context_parallel import context_parallel as context_parallel
from neatpack.hf.contracts import Contract as Contract
from neatpack.hf.contracts import contract_for as contract_for
from neatpack.hf.register import register as register
from neatpack.hf.register import use_packed_varlen as use_packed_varlen
from neatpack.hf.trainer import isolation_callback as isolation_callback
from neatpack.hf.trainer import require_isolation as require_isolation

__all__ = [
    "ContextParallel",
    "Contract",
    "collator_for",
    "context_parallel",
    "contract_for",
    "isolation_callback",
    "register",
    "require_isolation",
    "use_packed_varlen",
]
