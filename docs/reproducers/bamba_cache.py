"""Going on from a cache without position ids counts from 0 again: the class does not ask its cache how far it is."""

import sys

import torch
from transformers import BambaConfig, BambaForCausalLM

COVERS = {"cache": ["bamba"]}

torch.manual_seed(0)
config = BambaConfig(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
)  # fmt: skip
model = BambaForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids = torch.randint(5, 99, (1, 6))
with torch.no_grad():
    want = model(ids, use_cache=False).logits[:, 5:]
    left_out = model(ids[:, 5:], cache=model(ids[:, :5], use_cache=True).cache, use_cache=True).logits
    place = torch.tensor([[5]])
    given = model(ids[:, 5:], cache=model(ids[:, :5], use_cache=True).cache, position_ids=place, use_cache=True).logits
print("token 5 through the cache, against no cache:", float((left_out - want).abs().max()))
print("... with position_ids=[[5]]:", float((given - want).abs().max()))
sys.exit(float((left_out - want).abs().max()) > 1e-4)
