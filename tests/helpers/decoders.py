"""Decoders written by hand, each in a style of its own, for `capture_module`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GptBlock(nn.Module):
    """Fused projections, learned biases, tanh GELU written out, a causal mask from a buffer."""

    def __init__(self, hidden: int, heads: int, neurons: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, neurons), nn.Linear(neurons, hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(hidden, dim=-1)
        q, k, v = (y.view(batch, tokens, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, tokens, hidden))
        h = self.up(self.ln2(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3)))
        return x + self.down(h)


class Gpt(nn.Module):
    """In the manner of nanoGPT: positions made inside, head tied to the embedding."""

    def __init__(self, hidden: int = 96, heads: int = 4, neurons: int = 200, layers: int = 2, vocab: int = 101) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(64, hidden)
        self.blocks = nn.ModuleList(GptBlock(hidden, heads, neurons) for _ in range(layers))
        self.ln = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        x = self.wte(tokens) + self.wpe(torch.arange(count, device=tokens.device))
        for block in self.blocks:
            x = block(x, self.mask[:count, :count])
        return self.head(self.ln(x))


class RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * self.weight


class LlamaBlock(nn.Module):
    """Grouped-query attention with repeated heads, neighbours turned (as in GPT-J), gate and up fused."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, neurons: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)
        self.w13 = nn.Linear(hidden, 2 * neurons, bias=False)
        self.w2 = nn.Linear(neurons, hidden, bias=False)
        self.norm1, self.norm2 = RmsNorm(hidden), RmsNorm(hidden)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        h = self.norm1(x)
        q = self.wq(h).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k = self.wk(h).view(batch, tokens, self.kv_heads, self.size).transpose(1, 2)
        v = self.wv(h).view(batch, tokens, self.kv_heads, self.size).transpose(1, 2)
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))
        gate, up = self.w13(self.norm2(x)).chunk(2, dim=-1)
        return x + self.w2(gate * torch.sigmoid(gate) * up)


class Llama(nn.Module):
    """`tables`: cosines and sines come from buffers instead of from frequencies at every call."""

    def __init__(self, hidden: int = 96, heads: int = 4, kv_heads: int = 2, tables: bool = False) -> None:
        super().__init__()
        self.tables = tables
        neurons, vocab, size = 200, 101, hidden // heads
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(LlamaBlock(hidden, heads, kv_heads, neurons) for _ in range(2))
        self.norm = RmsNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        frequencies = 1.0 / 10_000.0 ** (torch.arange(0, size, 2).float() / size)
        self.register_buffer("frequencies", frequencies, persistent=False)
        angles = torch.outer(torch.arange(512).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if self.tables:
            cos, sin = self.cos[position_ids], self.sin[position_ids]
        else:
            angles = position_ids.float().unsqueeze(-1) * self.frequencies
            cos, sin = angles.cos(), angles.sin()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, cos.unsqueeze(1), sin.unsqueeze(1))
        return self.head(self.norm(x))
