"""Labels are not shifted, although the documentation says that they are and that ``labels = input_ids`` will do.

Each token is predicted from itself.
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import XLMConfig, XLMWithLMHeadModel

COVERS = {"loss": ["xlm"]}

torch.manual_seed(0)
config = XLMConfig(vocab_size=99, emb_dim=32, n_layers=2, n_heads=4, causal=True, max_position_embeddings=64)
model = XLMWithLMHeadModel(config).eval()
ids = torch.tensor([[5, 6, 7, 8, 9]])
with torch.no_grad():
    answer = model(ids, labels=ids)
    shifted = cross_entropy(answer.logits[0, :-1], ids[0, 1:])
    unshifted = cross_entropy(answer.logits[0], ids[0])
print(f"loss {float(answer.loss):.4f}; next tokens give {float(shifted):.4f}, each token itself {float(unshifted):.4f}")
sys.exit(abs(float(answer.loss - shifted)) > 1e-3)
