"""CpmAntForCausalLM does not shift labels: given the tokens themselves, each is predicted from itself."""

import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import CpmAntConfig, CpmAntForCausalLM

COVERS = {"loss": ["cpmant"]}

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48}
model = CpmAntForCausalLM(CpmAntConfig(num_hidden_layers=2, prompt_length=4, **sizes)).eval()
ids = torch.tensor([[5, 6, 7, 8, 9]])
with torch.no_grad():
    answer = model(ids, labels=ids)
    shifted = cross_entropy(answer.logits[0, :-1, :99], ids[0, 1:])
    unshifted = cross_entropy(answer.logits[0, :, :99], ids[0])
print(f"loss {float(answer.loss):.4f}; next tokens give {float(shifted):.4f}, each token itself {float(unshifted):.4f}")
sys.exit(abs(float(answer.loss - shifted)) > 1e-3)
