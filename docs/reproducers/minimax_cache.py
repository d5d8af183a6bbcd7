"""Reordering a cache, as beam search does, leaves the states of lightning attention where they were.

Row 0 goes on as row 1: its keys and values are row 1's, its linear state is still its own.
"""

import sys

import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

COVERS = {"cache": ["minimax"]}

torch.manual_seed(0)
config = MiniMaxConfig(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, block_size=4,
    layer_types=["full_attention", "linear_attention"],
)  # fmt: skip
model = MiniMaxForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
prompts = torch.randint(5, 99, (2, 5))
step = torch.tensor([[7], [8]])
order = torch.tensor([1, 0])

with torch.no_grad():
    want = model(torch.cat([prompts[order], step], 1), use_cache=False).logits[:, -1]
    cache = model(prompts, use_cache=True).cache
    cache.reorder_cache(order)
    got = model(step, cache=cache, use_cache=True).logits[:, 0]
    same = model(prompts[order], use_cache=True).cache
    unreordered = model(step, cache=same, use_cache=True).logits[:, 0]

print("after reorder_cache, against the same rows without a cache:", float((got - want).abs().max()))
print("through a cache that was not reordered:", float((unreordered - want).abs().max()))
sys.exit(float((got - want).abs().max()) > 1e-4)
