"""Training of the tiny model on the CPU by a fixed number of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional

from vllm_specplus.testing.tiny_corpus import Sampler, corpus_files, held_out_files, is_held_out, token_stream
from vllm_specplus.testing.tiny_net import Attention, ModelShape, TinyNet, rotary_table


@dataclass(frozen=True)
class Phase:
    """A ``share`` of the steps, each with ``rows`` sequences of ``length`` tokens."""

    share: float
    rows: int
    length: int


@dataclass(frozen=True)
class TrainSettings:
    """The settings that decide the trained weights, together with the corpus.

    Neither the clock nor the number of cores has a part in them: ``workers`` threads split each batch on any machine.
    Weights still differ by rounding between kinds of processors.

    Later phases hold longer sequences, for positions and copies beyond the first phase's length. Most steps are short,
    because attention makes long ones dearer.
    """

    shape: ModelShape = field(default_factory=lambda: ModelShape(3, 192, 6, 6, 384))
    steps: int = 270
    phases: tuple[Phase, ...] = (Phase(0.67, 16, 192), Phase(0.2, 6, 512), Phase(0.13, 3, 1024))
    matrix_rate: float = 0.02
    vector_rate: float = 3e-3
    draft_weight: float = 0.5
    repeat_share: float = 0.2
    json_share: float = 0.05
    workers: int = 2
    seed: int = 0


@dataclass(frozen=True)
class TrainReport:
    """Results of a training run.

    The ``held_out`` fields are measured on files that training has not seen; :func:`agreement` says what it is.
    """

    seconds: float
    parameters: int
    loss_nats_per_byte: float
    held_out_loss_nats_per_byte: float
    held_out_agreement: float
    held_out_agreement_long: float


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest orthogonal matrix (Jordan et al., 2024).

    On a budget of a few hundred steps it gets further than AdamW. All parameters must be matrices ``[out, in]`` of one
    size: they are treated as one batch, since single products would be too small to be fast. ``dtype`` is that of the
    products.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            weights = group["params"]
            rows, columns = weights[0].shape
            gradient = torch.stack([weight.grad for weight in weights])
            buffer = self.state[weights[0]].setdefault("momentum", torch.zeros_like(gradient))
            buffer.lerp_(gradient, 1 - group["momentum"])
            updates = orthogonalize(gradient.lerp_(buffer, group["momentum"]).to(self._dtype))
            scale = -group["lr"] * max(1.0, rows / columns) ** 0.5
            for weight, update in zip(weights, updates, strict=True):
                weight.add_(update, alpha=scale)


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Push the singular values of ``matrices [n, rows, columns]`` towards 1 (Newton-Schulz)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    return x.mT if tall else x


def initialise(net: TinyNet) -> None:
    """Set the starting point: small matrices, unit norms, and heads that look a few tokens back.

    In the first layer and in the MTP head, attention head ``h`` starts out looking at the token ``h + 1`` back. Copying
    from the context needs such heads first. Gradients alone would take most of the steps to find them.
    """
    for name, weight in net.named_parameters():
        if weight.ndim == 2:
            residual_out = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.004 if residual_out else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    for layer in (net.model.layers[0], *net.model.mtp_layers):
        _look_back(layer.self_attn, net.shape)


def _look_back(attention: Attention, shape: ModelShape, strength: float = 6.0) -> None:
    # The key's bias is the query's bias turned by the rotary angles of `distance`: the key that many tokens back scores
    # highest. Only the fast half of the frequencies tells neighbours apart. The last head stays free.
    half = shape.head_dim // 2
    cos, sin = rotary_table(shape.num_kv_heads, shape.head_dim)
    fast = torch.arange(half) < half // 2
    with torch.no_grad():
        q_bias = attention.q_proj.bias.view(shape.num_heads, 2, half)
        k_bias = attention.k_proj.bias.view(shape.num_kv_heads, 2, half)
        q_bias[:-1, 0, fast] = strength
        for distance in range(1, shape.num_kv_heads):
            k_bias[distance - 1, 0, fast] = strength * cos[distance, fast]
            k_bias[distance - 1, 1, fast] = strength * sin[distance, fast]


def losses(net: TinyNet, tokens: Tensor, draft_weight: float) -> tuple[Tensor, Tensor]:
    """Return the training loss and the target's cross entropy (nats a byte) on ``tokens [B, T]``.

    The head learns the target's own distribution of the next-but-one token rather than the text, because the target has
    to accept its drafts.
    """
    hidden = net.hidden(tokens[:, :-1])
    logits = net.target_logits(hidden)
    target_loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    drafts = net.draft_logits(hidden[:, :-1], tokens[:, 1:-1])
    teacher = logits[:, 1:].detach().softmax(dim=-1)
    draft_loss = functional.cross_entropy(drafts.flatten(0, 1), teacher.flatten(0, 1))
    return target_loss + draft_weight * draft_loss, target_loss.detach()


def agreement(net: TinyNet, tokens: Tensor, skip: int = 0) -> tuple[float, float]:
    """Return the head's agreement and the target's loss on ``tokens [B, T]``.

    Agreement is the share of positions from ``skip`` on whose draft is the target's own argmax. Greedy verification
    accepts that share of the first drafts.
    """
    with torch.inference_mode():
        hidden = net.hidden(tokens[:, :-1])
        logits = net.target_logits(hidden)
        drafts = net.draft_logits(hidden[:, :-1], tokens[:, 1:-1])
        same = drafts.argmax(dim=-1) == logits[:, 1:].argmax(dim=-1)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return same[:, skip:].float().mean().item(), loss.item()


def _held_out_rows(rows: int, length: int) -> Tensor:
    stream = token_stream(held_out_files())
    starts = np.linspace(0, len(stream) - length, rows).astype(int)
    return torch.from_numpy(np.stack([stream[i : i + length] for i in starts]).astype(np.int64))


@contextmanager
def _one_core_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Lend threads in which PyTorch uses one core each; meanwhile the caller's PyTorch uses one core too.

    Sums are then added up in the same order whatever the number of cores. PyTorch's own threads would also meet at a
    barrier in each operation: with operations as small as these they would spend most of their time there.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        # The setting made in a pool thread is also the one that later threads begin with.
        torch.set_num_threads(before)


def _backward(pool: ThreadPoolExecutor, net: TinyNet, tokens: Tensor, settings: TrainSettings) -> float:
    """Set every parameter's gradient, each thread taking a share of the rows; return the target's loss."""
    parameters = list(net.parameters())

    def share(rows: Tensor) -> tuple[tuple[Tensor, ...], float]:
        loss, target_loss = losses(net, rows, settings.draft_weight)
        weight = len(rows) / len(tokens)
        return torch.autograd.grad(loss * weight, parameters), target_loss.item() * weight

    results = list(pool.map(share, tokens.chunk(settings.workers)))
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.stack([grads[index] for grads, _ in results]).sum(dim=0)
    return sum(target_loss for _, target_loss in results)


def _rate(progress: float) -> float:
    """Return the learning rate's factor at ``progress`` in [0, 1]: warm-up, plateau, decay."""
    return min(1.0, progress / 0.03 + 0.05, math.sqrt(1.0 - progress) if progress > 0 else 1.0)


def _optimizers(net: TinyNet, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    by_size: dict[torch.Size, list[nn.Parameter]] = {}
    others: list[nn.Parameter] = []
    for name, parameter in net.named_parameters():
        is_matrix = parameter.ndim == 2 and name not in tables
        (by_size.setdefault(parameter.shape, []) if is_matrix else others).append(parameter)
    return [
        *(Muon(matrices, settings.matrix_rate) for matrices in by_size.values()),
        torch.optim.Adam(others, settings.vector_rate, betas=(0.9, 0.95), fused=True),
    ]


def _progress_bar(steps: int) -> Progress:
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"training the tiny model: {steps} steps, some minutes", highlight=False)
    return Progress(
        TextColumn("training the tiny model"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
        disable=not console.is_terminal,
    )


def train(settings: TrainSettings) -> tuple[TinyNet, TrainReport]:
    """Train a model from scratch; the same settings and corpus give the same weights on the same kind of processor.

    Raises RuntimeError if the corpus is not installed.
    """
    with torch.random.fork_rng(devices=[]), _one_core_threads(settings.workers) as pool:
        torch.manual_seed(settings.seed)
        net = TinyNet(settings.shape)
        initialise(net)
        return net, _fit(net, settings, pool)


def _fit(net: TinyNet, settings: TrainSettings, pool: ThreadPoolExecutor) -> TrainReport:
    stream = token_stream([path for path in corpus_files() if not is_held_out(path)])
    sampler = Sampler(stream, repeat_share=settings.repeat_share, json_share=settings.json_share, seed=settings.seed)
    optimizers = _optimizers(net, settings)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start, smooth = time.monotonic(), math.log(settings.shape.vocab_size)
    with _progress_bar(settings.steps) as bar:
        task = bar.add_task("", total=settings.steps, loss="")
        for step in range(settings.steps):
            progress = step / settings.steps
            for optimizer, rate in zip(optimizers, base_rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * _rate(progress)
            phase = phase_at(settings, progress)
            tokens = torch.from_numpy(sampler.batch(phase.rows, phase.length))
            loss = _backward(pool, net, tokens, settings)
            list(pool.map(lambda optimizer: optimizer.step(), optimizers))
            smooth += 0.05 * (loss - smooth)
            bar.update(task, completed=step + 1, loss=f"{smooth:.2f} nats/byte")
    seconds = time.monotonic() - start
    share, held_out_loss = agreement(net, _held_out_rows(24, 512), skip=32)
    long_share, _ = agreement(net, _held_out_rows(8, 2048), skip=1024)
    return TrainReport(
        seconds=round(seconds, 1),
        parameters=sum(p.numel() for p in net.parameters()),
        loss_nats_per_byte=round(smooth, 3),
        held_out_loss_nats_per_byte=round(held_out_loss, 3),
        held_out_agreement=round(share, 4),
        held_out_agreement_long=round(long_share, 4),
    )


def phase_at(settings: TrainSettings, progress: float) -> Phase:
    """Return the phase at ``progress`` in [0, 1) of the steps."""
    for phase in settings.phases:
        progress -= phase.share
        if progress < 0:
            return phase
    return settings.phases[-1]
