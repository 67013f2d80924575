"""A million rows start within seconds and in bounded memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from conftest import ROOT, TINY

ROWS = 1_000_000
PROGRAM = r"""
import json, random, re, sys, time
from transformers import AutoTokenizer
from common.data import BatchSampler, load_prompts

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
start = time.process_time()
dataset = load_prompts([sys.argv[2]], tokenizer=tokenizer, max_prompt_length=256)
sampler = BatchSampler(len(dataset), 64, seed=1)
loading = time.process_time() - start
prompts = [dataset[i] for _ in range(10) for i in sampler.next_batch()]
# Not getrusage: its maximum goes back to before the exec, when this process still was a copy of pytest.
memory = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 2**20  # GiB
print(json.dumps([loading, memory, dataset.report, len(prompts)]))
"""


def write_million(path: Path) -> None:
    """Prompts of 100 to 200 characters in one row group; every thousandth has 400 and does not fit."""
    sizes = np.random.default_rng(0).integers(100, 200, size=ROWS)
    sizes[::1000] = 400
    text = "12 + 34 = 46 " * 40
    message = pa.StructArray.from_arrays(
        [pa.array(["user"] * ROWS), pa.array([text[:size] for size in sizes])], names=["role", "content"]
    )
    prompts = pa.ListArray.from_arrays(pa.array(np.arange(ROWS + 1), type=pa.int32()), message)
    answers = pa.array(np.arange(ROWS).astype(str))
    truths = pa.StructArray.from_arrays([pa.array(["rule"] * ROWS), answers], names=["style", "ground_truth"])
    table = pa.table({"data_source": ["tiny-arith"] * ROWS, "prompt": prompts, "reward_model": truths})
    pq.write_table(table, path, row_group_size=ROWS)


def test_a_million_rows(tmp_path: Path) -> None:
    write_million(tmp_path / "million.parquet")
    environment = dict(os.environ, PYTHONPATH=str(ROOT), SOLORL_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TINY / "model"), str(tmp_path / "million.parquet")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    loading, memory, report, drawn = json.loads(run.stdout.splitlines()[-1])
    assert report == {"read": ROWS, "kept": ROWS - ROWS // 1000, "dropped": {"longer than 256 tokens": ROWS // 1000}}
    assert drawn == 640
    assert loading < 10, f"{loading:.1f} s of CPU time to start"
    assert memory < 1, f"{memory:.2f} GiB"
