"""The GPU script runs on the CPU too, and notices what it is there to notice."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(program):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, cwd=BENCHMARKS, env=environment, check=False
    )


def test_every_claim_holds_on_the_cpu():
    done = run(["gpu_check.py", "--tokens", "384", "--repeats", "1"])
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("isolated, float32, plain, compiled", "syncs: need a GPU", "equal losses", "packed_varlen", "equal BlockMask"):
        assert part in done.stdout
    assert "FAILED" not in done.stdout
    held = done.stdout.count("    ok  ")
    assert done.stdout.endswith(f"\nheadline: gpu_check on CPU: {held} claims hold, 0 failed\n")


def test_attention_that_mixes_documents_fails_the_check():
    program = """
import torch, gpu_check
from neatpack.attention import varlen_attention
wrong = torch.tensor([0, 384], dtype=torch.int32)
report = gpu_check.Report()
leaky = lambda q, k, v, offsets, longest, **options: varlen_attention(q, k, v, wrong, 384, **options)
gpu_check.report_isolation(report, "leaky", leaky, gpu_check.random_inputs(384, 4), gpu_check.documents(384), {})
print(report.failed)
"""
    done = run(["-c", program])
    assert done.returncode == 0, done.stderr
    assert "isolated, float32, leaky" in done.stdout.splitlines()[-1]
