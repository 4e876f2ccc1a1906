"""Every example runs as it is documented, offline, and prints numbers that show isolation before it trains."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBER = r"([\d.]+(?:e[-+]?\d+)?)"


def run(name, *options, launcher=()):
    """What `python examples/NAME` prints; its probe is checked here, for all of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / name), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    influence, control, difference, tolerance = probe(done.stdout)
    assert influence == 0
    assert control > 0.1
    assert difference <= tolerance < 1e-3
    return done.stdout


def probe(output):
    """Influence, control, difference and tolerance of the first report; nothing about a loss comes before it."""
    assert "loss" not in output.partition("isolated:")[0]
    [influence, control] = numbers(rf"influence of one document on another: {NUMBER} \({NUMBER} with", output)
    [difference] = numbers(rf"difference from the document alone: +{NUMBER}", output)
    [tolerance] = numbers(rf"tolerance {NUMBER}", output)
    return influence, control, difference, tolerance


def numbers(pattern, output):
    found = re.search(pattern, output)
    assert found, f"{pattern!r} is not in:\n{output}"
    return [float(number) for number in found.groups()]


def assert_learns(output, by):
    first, last = numbers(rf"loss {NUMBER} -> {NUMBER}", output)
    assert last < first - by


def test_hf_trainer():
    assert_learns(run("hf_trainer.py"), by=0.5)


def test_trl_sft():
    assert_learns(run("trl_sft.py"), by=0.5)


def test_trl_reward_equals_the_padded_trainer():
    output = run("trl_reward.py")
    [packed] = numbers(rf"packed: [0-9]+ slots, loss {NUMBER}", output)
    [padded] = numbers(rf"padded: [0-9]+ slots, loss {NUMBER}", output)
    assert abs(packed - padded) < 2e-6
    assert_learns(output, by=0.1)


def test_dpo_equals_answers_run_alone():
    output = run("dpo.py")
    loss, gradients, largest = numbers(rf"loss differs by {NUMBER}, gradients by {NUMBER} of {NUMBER}", output)
    assert loss < 1e-5  # a margin of sums of hundreds of log-probabilities, in float32
    assert gradients < 1e-4 * largest
    assert_learns(output, by=0.3)


TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_ddp_takes_the_step_of_one_process():
    output = run("ddp.py", launcher=TWO_RANKS)
    loss, gradients, largest = numbers(rf"loss differs by {NUMBER}, gradients by {NUMBER} of {NUMBER}", output)
    [naive] = numbers(rf"mean of the ranks' means would be off by {NUMBER}", output)
    assert loss < 1e-5
    assert gradients < 1e-5 * largest
    assert naive > 1e-3 * largest  # the comparison sees a divisor of each rank alone
    assert_learns(output, by=0.5)


def test_context_parallel_ranks_take_the_step_of_one_process():
    output = run("context_parallel.py", launcher=TWO_RANKS)
    mine, all_tokens = numbers(rf"2 ranks with {NUMBER} of {NUMBER} tokens each", output)
    assert 2 * mine == all_tokens
    loss, gradients, largest = numbers(rf"loss differs by {NUMBER}, gradients by {NUMBER} of {NUMBER}", output)
    assert loss < 1e-5
    assert gradients < 1e-5 * largest
    assert_learns(output, by=0.5)


def test_accelerate_loop_sees_every_document_once():
    output = run("accelerate_loop.py", launcher=TWO_RANKS)
    tokens, of = numbers(rf"an epoch on 2 ranks: {NUMBER} of {NUMBER} tokens", output)
    assert of - 3 * 256 <= tokens <= of  # all but the rows that fill no last step
    assert_learns(output, by=0.5)


def test_torch_compile_is_one_program_for_any_documents():
    output = run("torch_compile.py", "aot_eager")
    fewest, most, graphs, breaks = numbers(
        rf"batches of {NUMBER} to {NUMBER} segments: {NUMBER} graphs compiled, {NUMBER} breaks", output
    )
    assert most > fewest  # other batches do hold other numbers of documents
    assert graphs <= 2
    assert breaks == 0
    loss, gradients = numbers(rf"loss differs by {NUMBER}, gradients by {NUMBER} of the largest", output)
    assert loss < 1e-5
    assert gradients < 1e-5
    assert_learns(output, by=0.5)
