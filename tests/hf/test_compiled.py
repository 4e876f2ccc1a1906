"""packed_varlen in one compiled graph: what it is uncompiled, whatever documents a batch has, and as strict."""

import pytest
import torch

import neatpack.hf
from neatpack.errors import ContractError
from neatpack.train import PackedCollator
from tiny_models import documents_of, packed_batch, tiny_model

neatpack.hf.register()

ROW = 24
PACKINGS = [
    [[5, 7, 12], [24]],
    [[24], [3, 21]],
    [[1, 2, 3, 4, 5, 6], [8, 8, 8]],
    [[2] * 12, [20]],
    [[23], [11, 13]],
    [[9, 4, 1], [6, 6, 6, 6]],
]


class CountingBackend:
    """Compiles with another backend, and counts the graphs."""

    def __init__(self, name="aot_eager"):
        self.graphs, self._compile = [], torch._dynamo.lookup_backend(name)

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return self._compile(graph, inputs)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def collated(lengths_of_rows, seed=0):
    """A batch as the collator makes it from rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        {"input_ids": torch.randint(3, 128, (sum(lengths),), generator=generator).tolist(), "seq_lengths": lengths}
        for lengths in lengths_of_rows
    ]
    return PackedCollator(row_length=ROW, pad_token_id=0)(rows)


def doc_ids_of(lengths_of_rows):
    rows = [[number for number, length in enumerate(lengths, 1) for _ in range(length)] for lengths in lengths_of_rows]
    return [row + [0] * (ROW - len(row)) for row in rows]


def loss_and_gradients(run, model, batch):
    model.zero_grad()
    output = run(**batch)
    output.loss.backward()
    return output.logits.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_compiled_equals_eager(model, compiled, batch):
    logits, gradients = loss_and_gradients(compiled, model, batch)
    expected, reference = loss_and_gradients(model, model, batch)
    torch.testing.assert_close(logits, expected, atol=1e-5 * max(1.0, expected.abs().max().item()), rtol=0)
    scale = max(1.0, *(gradient.abs().max().item() for gradient in reference.values()))
    assert gradients.keys() == reference.keys()
    for name, gradient in reference.items():
        assert (gradients[name] - gradient).abs().max() < 1e-5 * scale, name


def influences(compiled, batch, doc_ids):
    """Per document: how far its logits move when every other token of the batch changes."""
    before, moved = compiled(**batch).logits.detach(), []
    for row, start, end in documents_of(doc_ids):
        changed = (batch["input_ids"] - 3 + 61) % 125 + 3
        changed[row, start:end] = batch["input_ids"][row, start:end]
        after = compiled(**{**batch, "input_ids": changed}).logits.detach()
        moved.append((after - before)[row, start:end].abs().max().item())
    return moved


@pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen3", "gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "llama4"))],
)
def test_one_graph_and_one_recompile_over_changing_documents(architecture):
    model, backend = tiny_model(architecture), CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed, lengths in enumerate(PACKINGS):
        assert_compiled_equals_eager(model, compiled, collated(lengths, seed))
    assert len(backend.graphs) <= 2
    moved = influences(compiled, collated(PACKINGS[0]), doc_ids_of(PACKINGS[0]))
    assert max(moved) < 1e-4 if architecture == "llama4" else moved == [0.0] * 4
    assert len(backend.graphs) <= 2
    called = {str(node.target) for graph in backend.graphs for node in graph.graph.nodes}
    assert {"neatpack.batch_offsets", "neatpack.varlen_attention"} <= called


def test_without_boundaries_the_same_compiled_model_leaks():
    batch = collated(PACKINGS[0])
    rows = {"input_ids": batch["input_ids"], "use_cache": False}
    compiled = torch.compile(tiny_model("llama"), backend="aot_eager", fullgraph=True)
    moved = influences(compiled, rows, doc_ids_of(PACKINGS[0]))
    assert min(moved[1], moved[2]) > 0.1  # every document but the first of its row
    assert max(moved[0], moved[3]) < 1e-4


def wrong(batch, **changes):
    return {**batch, **changes}


def test_a_compiled_model_refuses_what_an_uncompiled_one_refuses():
    """One compiled program, real batches that contradict themselves: the checks are part of the program."""
    batch = packed_batch()
    compiled = torch.compile(tiny_model("mistral"), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(**batch)
        for changed, message in [
            ([0, 5, 12, 16, 22, 26, 31], "must run from 0 to the 48 tokens"),
            ([0, 5, 12, 18, 22, 26, 48], "crosses the start of row 1"),
            ([0, 12, 5, 16, 22, 26, 48], "decreases at segment 1"),
            ([0, 6, 12, 16, 22, 26, 32, 48], "restart at row 0, position 5"),
        ]:
            offsets = torch.tensor(changed, dtype=torch.int32)
            with pytest.raises(ContractError, match=message):
                compiled(**wrong(batch, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets))
        with pytest.raises(ContractError, match="differ"):
            compiled(**wrong(batch, cu_seq_lens_k=batch["cu_seq_lens_k"].flip(0)))


def test_a_wrong_maximum_can_do_no_harm_in_a_compiled_program():
    """Its value is not read, since a program would be compiled anew for each; the row's length stands in for it."""
    model, batch = tiny_model("llama"), packed_batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        short = compiled(**wrong(batch, max_length_q=4, max_length_k=4)).logits
        torch.testing.assert_close(short, model(**batch).logits, atol=1e-5, rtol=0)


def test_positions_alone_work_compiled_and_are_refused_where_a_cache_turns_them_off():
    batch = packed_batch()
    bare = {key: batch[key] for key in ("input_ids", "position_ids")}
    model = tiny_model("llama")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**bare, use_cache=False).logits, model(**batch).logits, atol=1e-5, rtol=0)
        with pytest.raises(ContractError, match="from 4 to 0 at row 0, position 5"):
            compiled(**bare, use_cache=True)


def test_a_mask_that_lets_positions_see_later_ones_is_refused_when_the_program_runs():
    from neatpack.hf.mask import PackedMask
    from neatpack.hf.segments_op import traced_offsets

    query = torch.randn(1, 2, 4, 8)
    mask = PackedMask(torch.tensor([[True, False, True, False]]), from_positions=True, sees_later=torch.tensor(False))
    assert traced_offsets(query, mask, None, None, None).tolist() == [0, 2, 4, 4, 4]
    seen = PackedMask(mask.starts, from_positions=True, sees_later=torch.tensor(True))
    with pytest.raises(ContractError, match="lets positions see later ones"):
        traced_offsets(query, seen, None, None, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # from torch's own modules
def test_inductor_gives_the_same_logits_and_gradients():
    import shutil

    if not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    model = tiny_model("llama")
    backend = CountingBackend("inductor")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed, lengths in enumerate(PACKINGS):
        assert_compiled_equals_eager(model, compiled, collated(lengths, seed))
    assert len(backend.graphs) <= 2
