"""The families that run on stand-in layers."""

import pytest

from hf.stand_ins import FAMILIES
from neatpack.audit.zoo_models import small_model
from neatpack.hf import use_packed_varlen


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A name, the model on transformers' own attention, and the same model on packed_varlen."""
    return request.param, small_model(request.param, None, 32), use_packed_varlen(small_model(request.param, None, 32))
