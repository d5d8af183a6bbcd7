"""CpmAntForCausalLM sees the future: every token of a row is context, which sees and is seen both ways.

It also takes an attention_mask that it does not look at: tokens that the mask hides move the others.
"""

import sys

import torch
from transformers import CpmAntConfig, CpmAntForCausalLM

COVERS = {"future": ["cpmant"], "padding": ["cpmant"], "batch": ["cpmant"], "mask_ignored": ["cpmant"]}

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48}
model = CpmAntForCausalLM(CpmAntConfig(num_hidden_layers=2, prompt_length=4, **sizes)).eval()
ids = torch.tensor([[5, 6, 7, 8, 9]])
other = torch.tensor([[5, 6, 7, 8, 50]])
hidden = torch.tensor([[1, 1, 1, 1, 0]])

with torch.no_grad():
    plain, changed = model(ids).logits, model(other).logits
    masked, masked_changed = model(ids, attention_mask=hidden).logits, model(other, attention_mask=hidden).logits

ahead = float((plain - changed)[:, :4].abs().max())
under_mask = float((masked - masked_changed)[:, :4].abs().max())
print("outputs 0 to 3 move when token 4 changes:", ahead)
print("... and when the mask says that token 4 is padding:", under_mask)
sys.exit(ahead > 1e-4 or under_mask > 1e-4)
