"""The declared sliding window is not kept without a cache, and kept with one: the two answer differently.

Only the flash kernels are told of ``config.sliding_window``; eager and sdpa get a plain causal mask, while the cache
that the model makes forgets what lies behind the window.
"""

import sys

import torch
from transformers import MoshiConfig, MoshiForCausalLM

COVERS = {"window": ["moshi"], "cache": ["moshi"]}

torch.manual_seed(0)
config = MoshiConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_dim=48, sliding_window=3, max_position_embeddings=64,
)  # fmt: skip
model = MoshiForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
other = torch.tensor([[50, 6, 7, 8, 9, 10]])

with torch.no_grad():
    whole, changed = model(ids, use_cache=False).logits, model(other, use_cache=False).logits
    step = model(ids[:, 5:], cache=model(ids[:, :5], use_cache=True).cache, use_cache=True).logits

print(
    "one layer, window of 3: the output at 5 moves when token 0 changes by", float((whole - changed)[:, 5].abs().max())
)
print("the output at 5 through a cache, against no cache:", float((step - whole[:, 5:]).abs().max()))
sys.exit(float((whole - changed)[:, 5].abs().max()) > 1e-4)
