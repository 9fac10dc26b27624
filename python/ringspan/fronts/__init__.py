"""Drop-in fronts: the signatures that users have, on Ringspan.

Each module has the name of what it stands in for, imports nothing of it, and keeps its signatures; extras are keyword-only. What a
front does not do raises, and names the alternative; docs/migration.md lists the differences.

    ringspan.fronts.sdpa             torch.nn.functional.scaled_dot_product_attention
    ringspan.fronts.flash_attn       flash_attn_func, flash_attn_varlen_func and their packed forms
    ringspan.fronts.ring_flash_attn  zhuzilin/ring-flash-attention
    ringspan.fronts.yunchang         LongContextAttention, UlyssesAttention
    ringspan.fronts.dilated          fkodom/dilated-attention-pytorch
    ringspan.fronts.torchscale       torchscale's DilatedAttention
    ringspan.fronts.transformers     Hugging Face AttentionInterface and AttentionMaskInterface
"""
