"""ProphetNetForCausalLM does not shift labels, which it calls those of next word prediction.

Given the tokens themselves, each is predicted from itself (n-gram loss and smoothing are off here).
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import ProphetNetConfig, ProphetNetForCausalLM

COVERS = {"loss": ["prophetnet"]}

torch.manual_seed(0)
config = ProphetNetConfig(
    vocab_size=99, hidden_size=32, num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=48,
    num_encoder_layers=2, num_encoder_attention_heads=4, encoder_ffn_dim=48, max_position_embeddings=64, ngram=2,
    disable_ngram_loss=True, eps=0.0,
)  # fmt: skip
model = ProphetNetForCausalLM(config).eval()
ids = torch.tensor([[5, 6, 7, 8, 9]])
with torch.no_grad():
    answer = model(ids, labels=ids)
    shifted = cross_entropy(answer.logits[0, :-1], ids[0, 1:])
    unshifted = cross_entropy(answer.logits[0], ids[0])
print(f"loss {float(answer.loss):.4f}; next tokens give {float(shifted):.4f}, each token itself {float(unshifted):.4f}")
sys.exit(abs(float(answer.loss - shifted)) > 1e-3)
