"""What the ranks of a test need, imported once: conftest.run_forked starts them as copies of a process that has it."""

import pytest  # noqa: F401  (conftest, which some workers import)

from algos import grpo  # noqa: F401
from common.device import get_device

with get_device().starting_engine():
    from vllm import LLM  # noqa: F401
