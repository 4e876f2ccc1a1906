"""The Trainer's packed steps are the unpacked ones: loss and gradients, for any batch split, accumulation and ranks."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from trainer_loss_run import LEARNING_RATE, packed_rows, run, tiny_model
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from neatpack.errors import ContractError
from neatpack.hf.loss import PackedLoss, PackedLossMixin
from neatpack.train import PackedCollator, packed_cross_entropy

REDUCTIONS = ["token", "document", "sqrt_document"]
TOLERANCE = 1e-10
SCRIPT = Path(__file__).parent / "trainer_loss_run.py"


def documents_of(row):
    """Each document of a row as it is without packing: its ids, and its labels with prompts out."""
    labels = [token if keep else -100 for token, keep in zip(row["input_ids"], row["loss_mask"], strict=True)]
    start = 0
    for length in row["seq_lengths"]:
        yield torch.tensor(row["input_ids"][start : start + length]), torch.tensor(labels[start : start + length])
        start += length


def unpacked_loss(model, rows, reduction):
    """Every document through the model alone, and the reduction by its definition."""
    found = []
    for row in rows:
        for ids, labels in documents_of(row):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            count = int((labels[1:] != -100).sum())
            if count:
                found.append((F.cross_entropy(logits[:-1], labels[1:]), count))
    weight = {"token": float, "document": lambda n: 1.0, "sqrt_document": math.sqrt}[reduction]
    return sum(weight(n) * mean for mean, n in found) / sum(weight(n) for _, n in found)


def differences(steps, reduction):
    """Largest difference of loss and of gradient, over all steps, from a run of documents alone with the same updates."""
    model, rows = tiny_model("eager"), packed_rows()
    model.train()
    worst_loss = worst_gradient = 0.0
    for step in steps:
        model.zero_grad()
        loss = unpacked_loss(model, [rows[number] for number in step["rows"]], reduction)
        loss.backward()
        worst_loss = max(worst_loss, abs(step["loss"] - loss.item()))
        for name, parameter in model.named_parameters():
            worst_gradient = max(worst_gradient, (step["grads"][name] - parameter.grad).abs().max().item())
            parameter.data -= LEARNING_RATE * parameter.grad
    return worst_loss, worst_gradient


@pytest.mark.parametrize(("rows_a_batch", "accumulation", "steps"), [(12, 1, 1), (4, 1, 3), (2, 3, 2), (1, 4, 3), (5, 2, 2)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_step_is_that_of_its_documents_alone(reduction, rows_a_batch, accumulation, steps):
    recorded = run(reduction, rows_a_batch, accumulation)
    assert len(recorded) == steps
    assert sorted(number for step in recorded for number in step["rows"]) == list(range(12))
    loss, gradient = differences(recorded, reduction)
    print(f"{reduction} {rows_a_batch} x {accumulation}: loss {loss:.1e}, gradient {gradient:.1e}")
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


@pytest.mark.parametrize(("rows_a_batch", "accumulation"), [(4, 1), (2, 3), (5, 2)])
def test_a_mean_over_tokens_needs_no_more_than_a_compute_loss_func(rows_a_batch, accumulation):
    loss, gradient = differences(run("token", rows_a_batch, accumulation, mixed_in=False), "token")
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


def test_stock_attention_gives_the_same_steps():
    loss, gradient = differences(run("document", 2, 3, attention="sdpa"), "document")
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


def test_the_comparison_sees_a_wrong_reduction():
    recorded = run("document", 4, 1)
    for other in ("token", "sqrt_document"):
        loss, gradient = differences(recorded, other)
        assert loss > 1e7 * TOLERANCE
        assert gradient > 1e7 * TOLERANCE


def test_the_comparison_sees_a_divisor_of_each_batch_alone():
    """What a mean of the micro-batches' means gives: the fault that a divisor of the step avoids."""
    rows, model = packed_rows(), tiny_model("eager")
    with torch.no_grad():
        whole = unpacked_loss(model, rows[:6], "document")
        parts = [unpacked_loss(model, rows[split], "document") for split in (slice(0, 1), slice(1, 3), slice(3, 6))]
    assert abs(sum(parts) / 3 - whole) > 1e7 * TOLERANCE


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_on_ranks(folder, rows_a_batch, accumulation, ranks=2):
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
    processes = []
    for rank in range(ranks):
        command = [sys.executable, SCRIPT, folder / f"{rank}.pt", str(rows_a_batch), str(accumulation), *REDUCTIONS]
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=own, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output.decode()
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_on_ranks(tmp_path_factory.mktemp("ranks"), 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("run_as", "reduction"), [*zip(REDUCTIONS, REDUCTIONS, strict=True), ("compute_loss_func", "token")])
def test_two_ranks_take_the_step_of_all_their_documents(run_as, reduction, two_ranks):
    first, second = (recorded[run_as] for recorded in two_ranks)
    assert len(first) == len(second) == 12 // (2 * 2 * 2) + 1  # the last step is half a step
    merged = []
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one["grads"][name], other["grads"][name]) for name in one["grads"])
        # Each rank's loss is scaled by the ranks, as its gradient is averaged over them.
        merged.append({"loss": (one["loss"] + other["loss"]) / 2, "rows": one["rows"] + other["rows"], "grads": one["grads"]})
    loss, gradient = differences(merged, reduction)
    print(f"{reduction} on two ranks: loss {loss:.1e}, gradient {gradient:.1e}")
    assert loss < TOLERANCE
    assert gradient < TOLERANCE
    alone = differences([{**step, "rows": step["rows"][: len(step["rows"]) // 2]} for step in merged], reduction)
    assert min(alone) > 1e7 * TOLERANCE  # the comparison sees a rank left out


def test_evaluation_reports_the_loss_of_documents(tmp_path):
    class PackedTrainer(PackedLossMixin, Trainer):
        pass

    rows = [{key: value for key, value in row.items() if key != "number"} for row in packed_rows()]
    trainer = PackedTrainer(
        tiny_model("sdpa"),
        arguments(tmp_path, per_device_eval_batch_size=12),
        eval_dataset=rows,
        data_collator=PackedCollator(),
        packed_loss=PackedLoss(reduction="document"),
    )
    with torch.no_grad():
        expected = unpacked_loss(tiny_model("eager"), rows, "document").item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=TOLERANCE)


def arguments(folder, **options):
    return TrainingArguments(
        folder, use_cpu=True, remove_unused_columns=False, report_to=[], disable_tqdm=True, save_strategy="no", **options
    )


@pytest.mark.parametrize(
    ("options", "training", "message"),
    [
        ({"compute_loss_func": PackedLoss()}, {}, "either compute_loss_func or packed_loss"),
        ({}, {"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0\.1.*PackedLoss\(label_smoothing"),
    ],
)
def test_a_setting_that_would_compute_another_loss_is_refused(options, training, message, tmp_path):
    class PackedTrainer(PackedLossMixin, Trainer):
        pass

    with pytest.raises(ContractError, match=message):
        PackedTrainer(tiny_model("sdpa"), arguments(tmp_path, **training), packed_loss=PackedLoss(), **options)


def test_a_trainer_that_divides_gradients_by_accumulation_once_more_is_refused(tmp_path):
    """As transformers 5.4 does: losses are right there, and gradients a fraction of what they should be."""

    class OlderTrainer(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.gradient_accumulation_steps = 3

    class PackedTrainer(PackedLossMixin, OlderTrainer):
        pass

    with pytest.raises(ContractError, match="divide gradients by the 3 steps of accumulation"):
        PackedTrainer(tiny_model("sdpa"), arguments(tmp_path), packed_loss=PackedLoss())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seq_lens_q": None}, "the batch has no cu_seq_lens_q"),
        ({"labels": None}, "the batch has no labels"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8], dtype=torch.int32)}, "does not describe labels of shape"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)}, r"open every row \(form A\)"),
    ],
)
def test_a_batch_without_its_boundaries_is_refused(change, message, tmp_path):
    class PackedTrainer(PackedLossMixin, Trainer):
        pass

    rows = [{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}, {"input_ids": [1, 2, 3, 4, 5, 6], "seq_lengths": [1, 2, 3]}]
    trainer = PackedTrainer(tiny_model("sdpa"), arguments(tmp_path), packed_loss=PackedLoss(reduction="document"))
    batch = {**PackedCollator()(rows), **change}
    with pytest.raises(ContractError, match=message):
        trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))


def test_a_compute_loss_func_refuses_what_it_cannot_know():
    logits, labels = torch.zeros(1, 4, 7), torch.tensor([[-100, 1, 2, 3]])
    with pytest.raises(ContractError, match=r"reduction='document' needs each batch's document boundaries.*PackedLossMixin"):
        PackedLoss(reduction="document")({"logits": logits}, labels, 3)
    with pytest.raises(ContractError, match="first label of a row is not -100"):
        PackedLoss()({"logits": logits}, labels + 101, 3)
    with pytest.raises(ContractError, match="no labels"):
        PackedLoss()({"logits": logits}, None)
    with pytest.raises(ContractError, match="have no logits"):
        PackedLoss()({"loss": logits}, labels)
    with pytest.raises(ContractError, match="reduction='none' is none"):
        PackedLoss(reduction="none")


@pytest.mark.parametrize("router_loss", [0.0, 0.02])
def test_a_router_loss_is_added_by_its_share_of_the_step_or_refused(router_loss):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        output_router_logits=True,
    )
    model = MixtralForCausalLM(config)
    batch = PackedCollator(return_params=True)([{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}])
    params, labels = batch.pop("packed_seq_params"), batch.pop("labels")
    outputs = model(**batch)
    loss = PackedLoss(router_loss=router_loss).of_batch(outputs, labels, params, num_items=6)
    plain = packed_cross_entropy(outputs.logits, labels, params, num_items=6)
    torch.testing.assert_close(loss, plain + router_loss * outputs.aux_loss * 3 / 6, rtol=0, atol=1e-6)
    with pytest.raises(ContractError, match="returned a router loss"):
        PackedLoss().of_batch(outputs, labels, params)
