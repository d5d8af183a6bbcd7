"""Left padding flows into the recurrent layers: the attention_mask stops it in attention layers only."""

import sys

import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

COVERS = {"padding": ["recurrent_gemma"], "mask_ignored": ["recurrent_gemma"], "hidden_rows": ["recurrent_gemma"]}

torch.manual_seed(0)
config = RecurrentGemmaConfig(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, lru_width=32,
    num_key_value_heads=1, head_dim=8, block_types=["recurrent", "attention"], attention_window_size=16,
)  # fmt: skip
model = RecurrentGemmaForCausalLM(config).eval()
ids = torch.tensor([[0, 0, 5, 6, 7, 8]])
other = torch.tensor([[50, 60, 5, 6, 7, 8]])
mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
places = (mask.cumsum(1) - 1).clamp(min=0)

with torch.no_grad():
    first = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, 2:]
    second = model(other, attention_mask=mask, position_ids=places, use_cache=False).logits[:, 2:]

print("real tokens move when ids under the mask change:", float((first - second).abs().max()))
sys.exit(float((first - second).abs().max()) > 1e-4)
