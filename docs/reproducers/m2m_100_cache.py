"""A left-padded decoder row goes on from a cache at the wrong position: the padded slots in the cache are counted."""

import sys

import torch
from transformers import M2M100Config, M2M100ForConditionalGeneration

COVERS = {
    "cache": ["m2m_100", "nllb-moe", "seamless_m4t", "seamless_m4t_v2"],
    "positions": ["m2m_100", "nllb-moe", "seamless_m4t", "seamless_m4t_v2"],
}

torch.manual_seed(0)
config = M2M100Config(
    vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=1,
)  # fmt: skip
model = M2M100ForConditionalGeneration(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
source = torch.tensor([[5, 6, 7]])
ids, mask = torch.tensor([[1, 1, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1, 1]])
given = {"input_ids": source, "decoder_attention_mask": mask}
with torch.no_grad():
    alone = model(input_ids=source, decoder_input_ids=ids[:, 2:], use_cache=False).logits[:, -1]
    whole = model(decoder_input_ids=ids, use_cache=False, **given).logits[:, -1]
    start = model(input_ids=source, decoder_input_ids=ids[:, :4], decoder_attention_mask=mask[:, :4], use_cache=True)
    step = model(decoder_input_ids=ids[:, 4:], cache=start.cache, use_cache=True, **given).logits[:, -1]
print("left padded, without a cache, against alone:", float((whole - alone).abs().max()))
print("left padded, through a cache, against alone:", float((step - alone).abs().max()))
sys.exit(float((step - alone).abs().max()) > 1e-4)
