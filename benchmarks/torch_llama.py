"""A plain PyTorch eager Llama train step: SDPA, AdamW, gradient clipping. A contender of train_step.py.

Takes a step for each line on standard input and prints its seconds; needs torch (requirements-torch.txt).
"""

import sys
import time

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it so
from torch import nn

V, H, L, N, K, FFN, S, B = 4096, 256, 4, 8, 8, 688, 256, 8


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_tables(s, d, theta=10000.0):
    angle = torch.outer(torch.arange(s).float(), theta ** (-torch.arange(0, d, 2).float() / d))
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        d = H // N
        self.d = d
        self.q_proj, self.k_proj = nn.Linear(H, N * d, bias=False), nn.Linear(H, K * d, bias=False)
        self.v_proj, self.o_proj = nn.Linear(H, K * d, bias=False), nn.Linear(N * d, H, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q = rotate(self.q_proj(x).view(b, s, N, self.d).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(b, s, K, self.d).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, s, K, self.d).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=K != N)
        return self.o_proj(o.transpose(1, 2).reshape(b, s, N * self.d))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, FFN, bias=False), nn.Linear(H, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, H, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(H), Attention()
        self.post_attention_layernorm, self.mlp = RMSNorm(H), MLP()

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, H)
        self.layers = nn.ModuleList([Layer() for _ in range(L)])
        self.norm, self.lm_head = RMSNorm(H), nn.Linear(H, V, bias=False)
        self.cos, self.sin = rope_tables(S, H // N)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, labels):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).view(-1, V), labels.reshape(-1))


def main() -> int:
    torch.manual_seed(0)
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.randint(0, V, (B, S + 1))

    def step() -> float:
        start = time.perf_counter()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(step(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
