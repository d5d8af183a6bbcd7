"""One token at a time through the cache differs than the whole row: the two use other time steps.

The scan over a row raises time steps to ``time_step_min``, the step from a cache does not. Shown with a
``time_step_min`` that many steps fall below.
"""

import sys

import torch
from transformers import Zamba2Config, Zamba2ForCausalLM

COVERS = {"cache": ["zamba2"]}

torch.manual_seed(0)
config = Zamba2Config(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, n_mamba_heads=4,
    mamba_d_state=8, attention_hidden_size=64, attention_head_dim=16, adapter_rank=8, use_mamba_kernels=False,
    time_step_min=0.2, time_step_max=0.4,
    layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
)  # fmt: skip
model = Zamba2ForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids = torch.randint(5, 99, (1, 9))
with torch.no_grad():
    whole = model(ids, use_cache=False).logits
    cache, steps = None, []
    for slot in range(9):
        answer = model(ids[:, slot : slot + 1], cache=cache, use_cache=True)
        cache = answer.cache
        steps.append(answer.logits)
apart = (torch.cat(steps, 1) - whole).abs().amax(-1)[0]
print("one by one through the cache, against the whole row, slot by slot:", [f"{float(x):.1e}" for x in apart])
sys.exit(float(apart.max()) > 1e-3)
