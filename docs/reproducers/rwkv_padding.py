"""The attention_mask is taken and not used (a warning says so once): left padding moves what comes after it.

Going on from a cache by one token also mixes the rows of a batch: [rows, 1] tokens give [rows, rows] outputs.
"""

import sys

import torch
from transformers import RwkvConfig, RwkvForCausalLM

COVERS = {"padding": ["rwkv"], "cache": ["rwkv"], "mask_ignored": ["rwkv"], "hidden_rows": ["rwkv"]}

torch.manual_seed(0)
model = RwkvForCausalLM(RwkvConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2)).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids, other = torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[50, 60, 5, 6, 7]])
mask = torch.tensor([[0, 0, 1, 1, 1]])
with torch.no_grad():
    first = model(ids, attention_mask=mask).logits[:, 2:]
    second = model(other, attention_mask=mask).logits[:, 2:]
    state = model(torch.tensor([[5, 6], [7, 8], [9, 10]]), use_cache=True).state
    step = model(torch.tensor([[11], [12], [13]]), state=state, use_cache=True).logits
print("real tokens move when ids under the mask change:", float((first - second).abs().max()))
print("shape of the next outputs of three rows, one token each:", tuple(step.shape))
sys.exit(float((first - second).abs().max()) > 1e-4)
