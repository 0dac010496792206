"""PyTorch: `torch.autocast`, and `torch.amp.GradScaler` in float16. `--compile`: torch.compile."""

import sys

import torch  # pyright: ignore[reportMissingImports]
from serve import Step, Task, serve
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def linear(kernel) -> nn.Linear:
    layer = nn.Linear(*kernel.shape, bias=False)
    layer.weight.data = torch.tensor(kernel.T.copy())
    return layer


def norm(scale) -> nn.RMSNorm:
    layer = nn.RMSNorm(len(scale), eps=1e-6)
    layer.weight.data = torch.tensor(scale)
    return layer


class Block(nn.Module):
    def __init__(self, task: Task, k: int):
        super().__init__()
        self.n_heads = task.settings["n_heads"]
        for name, weight in task.layer(k).items():
            setattr(self, name, linear(weight) if weight.ndim == 2 else norm(weight))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.attention_norm(x), cos, sin)
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x, cos, sin):
        heads = lambda y: y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # noqa: E731
        query, key = (rotate(heads(f(x)), cos, sin) for f in (self.query, self.key))
        y = F.scaled_dot_product_attention(query, key, heads(self.value(x)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class Transformer(nn.Module):
    def __init__(self, task: Task):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(
            torch.tensor(task.weights["embed/embedding"]), freeze=False
        )
        self.blocks = nn.ModuleList(Block(task, k) for k in range(task.settings["n_layers"]))
        self.norm = norm(task.weights["norm/scale"])
        cos, sin = (torch.tensor(x) for x in task.rotation())
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embed.weight)


def make(task: Task, compute: str) -> Step:
    torch.set_num_threads(task.settings["threads"])
    model = Transformer(task).to(DEVICE)
    settings = task.settings
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=settings["learning_rate"],
        betas=(settings["b1"], settings["b2"]),
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**15, enabled=compute == "f16")
    tokens = torch.tensor(task.tokens).to(DEVICE, torch.long)
    labels = torch.tensor(task.labels).to(DEVICE, torch.long)
    run = torch.compile(model) if "--compile" in sys.argv else model

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, DTYPES[compute], enabled=compute != "f32"):
            loss = F.cross_entropy(run(tokens).flatten(0, 1), labels.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


if __name__ == "__main__":
    serve(make)
