"""An all-ones attention_mask, which tokenizers always give, switches the isolation of packed documents off.

Without a mask, position ids that start again keep two documents of one row apart. With a mask of ones, which hides
nothing, the second document sees the first. One cause for all classes: documents are looked for in position ids only
where no mask is given (transformers/masking_utils.py, _preprocess_mask_arguments).
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

COVERS = {"packing": ["*"]}
CASES = ["with an all-ones mask"]

torch.manual_seed(0)
config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
first, second = torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 10, 11]])
packed, positions = torch.cat([first, second], 1), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])

with torch.no_grad():
    alone = model(second, use_cache=False).logits
    without = model(packed, position_ids=positions, use_cache=False).logits[:, 3:]
    ones = model(packed, position_ids=positions, attention_mask=torch.ones_like(packed), use_cache=False).logits[:, 3:]

print("second document, packed without a mask, against alone:", float((without - alone).abs().max()))
print("second document, packed with a mask of ones, against alone:", float((ones - alone).abs().max()))
sys.exit(float((ones - alone).abs().max()) > 1e-4)
