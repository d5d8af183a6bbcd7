"""Compressed blocks of keys hold padding: ids that the attention_mask hides move the tokens beside them.

Four tokens in a row become one compressed key, pads among them. The mask is applied to the plain keys only.
"""

import sys

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

COVERS = {"padding": ["deepseek_v4"], "cache": ["deepseek_v4"], "mask_ignored": ["deepseek_v4"]}

torch.manual_seed(0)
config = DeepseekV4Config(
    vocab_size=99, hidden_size=32, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    q_lora_rank=8, n_routed_experts=4, num_experts_per_tok=2, sliding_window=3, o_groups=2, o_lora_rank=8,
    index_n_heads=4, index_head_dim=8, layer_types=["compressed_sparse_attention"] * 2, pad_token_id=0,
    qk_rope_head_dim=8, mlp_layer_types=["moe", "moe"], num_nextn_predict_layers=0, index_topk=64,
)  # fmt: skip
model = DeepseekV4ForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9, 10]])
other = torch.tensor([[50, 60, 5, 6, 7, 8, 9, 10]])
mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
places = (mask.cumsum(1) - 1).clamp(min=0)

with torch.no_grad():
    first = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, 2:]
    second = model(other, attention_mask=mask, position_ids=places, use_cache=False).logits[:, 2:]
    alone = model(ids[:, 2:], use_cache=False).logits

print("real tokens move when ids under the mask change:", float((first - second).abs().max()))
print("left-padded row against the same row alone:", float((first - alone).abs().max()))
sys.exit(float((first - second).abs().max()) > 1e-4)
