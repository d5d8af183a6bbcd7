"""``torch.compile``: the same answers, and no new graph for a new length beyond those that are documented."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from helpers.spread import SPREAD, asked, spread_model
from helpers.tiny import assert_agree

SIX = ["llama", "gpt2", "gemma2", "deepseek", "bert", "t5"]
