"""Training of an EAGLE-3 head on the CPU, mostly on its target's own answers.

The head learns the next-but-one token from a sharpened form of the target's distribution, not from the text:
the target has to accept its drafts.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from vllm_specplus.testing.answers import answers
from vllm_specplus.testing.eagle_net import EagleHead, HeadShape, head_config
from vllm_specplus.testing.real_prompts import fresh_questions, openings, passages, questions
from vllm_specplus.testing.tiny_train import Muon

_SHORTEST = 16  # tokens of a text that is learned from


@dataclass(frozen=True)
class HeadSettings:
    """The settings that decide the trained weights.

    The target, the texts that Python comes with and `fast_dtype` decide them too.

    Attributes:
        answers: of the target, that are learned from; one in four continues a text, the others answer questions.
        fresh_answers: to questions on other topics, by which the head is judged.
        answer_tokens: most tokens of an answer.
        passages: texts that are read, of ``passage_tokens`` each.
        feature_layers: the number of the target's layers before each place that the head reads.
        draft_vocab_size: the most frequent tokens, which the head can draft.
        passes: of each epoch, how many are trained; later ones work on what earlier ones made.
        read_tokens: most tokens that the target reads at once, padding included.
        step_tokens: most tokens of a training step, padding included. Half as many make twice the steps, which brings
            far more than it costs.
        sharpness: the target's logits are multiplied by it before they are learned. Above 1 its first choice counts for
            more, which is what a greedy draft has to be.
    """

    answers: int = 1280
    fresh_answers: int = 64
    answer_tokens: int = 224
    passages: int = 120
    passage_tokens: int = 512
    feature_layers: tuple[int, ...] = (9, 19, 30)
    draft_vocab_size: int = 12288
    passes: tuple[int, ...] = (1, 1, 2)
    read_tokens: int = 1024
    step_tokens: int = 512
    matrix_rate: float = 0.012
    vector_rate: float = 2e-3
    sharpness: float = 1.5
    seed: int = 0


@dataclass(frozen=True)
class HeadReport:
    """Results of a training; shares are of the target's own answers to questions on topics that training has not seen.

    Attributes:
        seconds: of all.
        answer_tokens, passage_tokens: that were learned from.
        in_draft_vocab: the share of tokens that can be drafted.
        agreement: by pass, the share of places where the draft is what the target chooses greedily.
        dtype: in which all was computed.
    """

    seconds: float
    answer_tokens: int
    passage_tokens: int
    in_draft_vocab: float
    agreement: tuple[float, ...]
    dtype: str


@dataclass(frozen=True)
class Text:
    """A text as the target sees it.

    Attributes:
        tokens: ``[T]`` int64.
        features: ``[T, num_features * width]``, in the target's type.
        first_answer: the place of the first token of the target's own; 0 for a text that it only reads.
    """

    tokens: Tensor
    features: Tensor
    first_answer: int


def fast_dtype() -> torch.dtype:
    """The type in which the processor computes faster: bfloat16 if it has AVX-512, else float32.

    Without AVX-512 the real model answers four times as fast in float32.
    """
    return torch.bfloat16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else torch.float32


def train_head(model: Path, folder: Path, settings: HeadSettings) -> HeadReport:
    """Write a head of the model in a folder into another.

    Args:
        model: the target's folder, a Llama model.
        folder: gets the head as a checkpoint that vLLM loads with the method ``eagle3``.
        settings: of the training.

    Returns:
        what came out.
    """
    start = time.monotonic()
    with torch.random.fork_rng(devices=[]), _progress_bar() as bar:
        torch.manual_seed(settings.seed)
        answering = bar.add_task("the model answers", total=None)
        found, found_fresh = _texts(model, settings)
        bar.update(answering, total=1, completed=1)
        target = AutoModelForCausalLM.from_pretrained(model, dtype=fast_dtype()).eval()
        learned = list(read_texts(target, found, settings, bar))
        fresh = list(read_texts(target, found_fresh, settings, bar))
        vocab = _draft_vocab(learned, settings.draft_vocab_size)
        trainer = Trainer(target, vocab, settings)
        trainer.fit(learned, bar)
        agreement, in_vocab = trainer.agreement(fresh)
    report = HeadReport(
        seconds=round(time.monotonic() - start, 1),
        answer_tokens=sum(len(t.tokens) - t.first_answer for t in learned if t.first_answer),
        passage_tokens=sum(len(t.tokens) for t in learned if not t.first_answer),
        in_draft_vocab=round(in_vocab, 4),
        agreement=tuple(round(share, 4) for share in agreement),
        dtype=str(target.dtype).removeprefix("torch."),
    )
    _write(folder, trainer.head, vocab, json.loads((model / "config.json").read_text()), settings)
    return report


def _texts(model: Path, settings: HeadSettings) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
    """The texts to learn from, and those that judge the head: of each its tokens and the place of its first own one."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    num_fresh, num_openings = settings.fresh_answers, settings.answers // 4
    asked = [
        *itertools.islice(fresh_questions(settings.seed), num_fresh),
        *itertools.islice(questions(settings.seed), settings.answers - num_openings),
    ]
    chats = [[{"role": "user", "content": question}] for question in asked]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    prompts += list(itertools.islice(openings(settings.seed), num_openings))
    token_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    answered = answers(model, token_ids, settings.answer_tokens, settings.seed, fast_dtype())
    own = [(torch.tensor(p + answer), len(p)) for p, answer in zip(token_ids, answered, strict=True)]
    limits = {"truncation": True, "max_length": settings.passage_tokens}
    read = [
        (tokenizer(text, add_special_tokens=False, return_tensors="pt", **limits)["input_ids"][0], 0)
        for text in itertools.islice(passages(settings.seed), settings.passages)
    ]
    return own[num_fresh:] + read, own[:num_fresh]


def read_texts(
    target: PreTrainedModel, texts: Iterable[tuple[Tensor, int]], settings: HeadSettings, bar: Progress
) -> Iterator[Text]:
    """Let the target read texts, a few of like length at a time; those that are too short are left out.

    Args:
        target: a Llama model.
        texts: of each its tokens, ``[T]`` int64, and `Text.first_answer`.
        settings: say what of the target's layers is kept.
        bar: shows how far it is.
    """
    found = [(tokens, first) for tokens, first in texts if len(tokens) >= _SHORTEST]
    order = sorted(range(len(found)), key=lambda i: len(found[i][0]))
    kept: dict[int, Tensor] = {}
    hooks = []
    layers = target.model.layers

    def keep(place: int) -> Callable[..., None]:
        return lambda module, args: kept.__setitem__(place, args[0])

    for place in settings.feature_layers:
        module = layers[place] if place < len(layers) else target.model.norm
        hooks.append(module.register_forward_pre_hook(keep(place)))
    features: dict[int, Tensor] = {}
    task = bar.add_task("the model reads", total=len(found))
    for rows in _rows([len(found[i][0]) for i in order], settings.read_tokens):
        numbers = [order[row] for row in rows]
        batch = nn.utils.rnn.pad_sequence([found[i][0] for i in numbers], batch_first=True)
        with torch.inference_mode():
            target.model(batch, use_cache=False)
        whole = torch.cat([kept[place] for place in settings.feature_layers], dim=-1)
        for i, row in zip(numbers, whole, strict=True):
            features[i] = row[: len(found[i][0])].clone()
        bar.advance(task, len(rows))
    for hook in hooks:
        hook.remove()
    for i, (tokens, first) in enumerate(found):
        yield Text(tokens, features[i], first)


def _rows(lengths: list[int], most_tokens: int) -> Iterator[list[int]]:
    """Rows of one batch after another, for ascending lengths; a batch has at most ``most_tokens`` with its padding."""
    rows: list[int] = []
    for row, length in enumerate(lengths):
        if rows and (len(rows) + 1) * length > most_tokens:
            yield rows
            rows = []
        rows.append(row)
    yield rows


def _draft_vocab(texts: list[Text], size: int) -> Tensor:
    """The tokens that are most frequent, ascending."""
    counts = torch.bincount(torch.cat([text.tokens for text in texts]))
    return counts.topk(min(size, len(counts))).indices.sort().values


class Trainer:
    """Trains one head.

    Args:
        target: a Llama model in bfloat16 or float32; the head computes in the same type.
        vocab: the ids of the tokens that the head can draft, ascending.
        settings: of the training.
    """

    def __init__(self, target: PreTrainedModel, vocab: Tensor, settings: HeadSettings) -> None:
        config = target.config
        self.settings, self.vocab, self._dtype = settings, vocab, target.dtype
        self._embedding = target.model.embed_tokens.weight.detach()
        self._last_norm = target.model.norm
        self._lm_head = target.lm_head.weight.detach()
        shape = HeadShape(
            width=config.hidden_size,
            mlp_width=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            rope_theta=config.rope_parameters["rope_theta"],
            norm_eps=config.rms_norm_eps,
            num_features=len(settings.feature_layers),
            draft_vocab_size=len(vocab),
        )
        self.head = EagleHead(shape)
        self._begin_from(target)

    @torch.no_grad()
    def _begin_from(self, target: PreTrainedModel) -> None:
        """Begin with the target's last layer, which reads its last hidden states; embeddings have no weight yet."""
        head, layer, width = self.head, target.model.layers[-1], self.head.shape.width
        for name in "qkv":
            weight = getattr(head.midlayer.self_attn, f"{name}_proj").weight
            weight[:, width:] = getattr(layer.self_attn, f"{name}_proj").weight
            weight[:, :width].mul_(0.5)
        head.midlayer.self_attn.o_proj.load_state_dict(layer.self_attn.o_proj.state_dict())
        head.midlayer.mlp.load_state_dict(layer.mlp.state_dict())
        head.midlayer.hidden_norm.load_state_dict(layer.input_layernorm.state_dict())
        head.midlayer.post_attention_layernorm.load_state_dict(layer.post_attention_layernorm.state_dict())
        head.norm.load_state_dict(target.model.norm.state_dict())
        head.lm_head.weight.copy_(self._lm_head[self.vocab])
        head.fc.weight.mul_(0.5)
        head.fc.weight[:, -width:] += torch.eye(width)

    def fit(self, texts: list[Text], bar: Progress) -> None:
        """Train on texts."""
        settings = self.settings
        rng = random.Random(settings.seed)
        texts = sorted(texts, key=lambda text: len(text.tokens))
        batches = list(_rows([len(text.tokens) for text in texts], settings.step_tokens))
        num_steps = len(settings.passes) * len(batches)
        optimizers = self._optimizers()
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _rate(step / num_steps)) for o in optimizers]
        task = bar.add_task("the head learns", total=num_steps)
        for passes in settings.passes:
            rng.shuffle(batches)
            for rows in batches:
                loss = self._loss([texts[row] for row in rows], passes)
                loss.backward()
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                bar.update(task, advance=1, description=f"the head learns, loss {loss.item():.2f}")

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        by_size: dict[torch.Size, list[nn.Parameter]] = {}
        others: list[nn.Parameter] = []
        for name, parameter in self.head.named_parameters():
            is_matrix = parameter.ndim == 2 and name != "lm_head.weight"
            (by_size.setdefault(parameter.shape, []) if is_matrix else others).append(parameter)
        return [
            *(Muon(matrices, self.settings.matrix_rate, dtype=self._dtype) for matrices in by_size.values()),
            torch.optim.Adam(others, self.settings.vector_rate, betas=(0.9, 0.95), fused=True),
        ]

    def _autocast(self) -> torch.autocast:
        """Lets the head compute in the target's type; its weights are float32."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self._dtype == torch.bfloat16)

    def _hidden(self, batch: list[Text], passes: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """What the head makes of texts, by pass; the target's last hidden states; which places count."""
        tokens = nn.utils.rnn.pad_sequence([text.tokens for text in batch], batch_first=True)
        features = nn.utils.rnn.pad_sequence([text.features for text in batch], batch_first=True)
        # A place needs the tokens of all passes behind it.
        length = tokens.shape[1] - passes
        embeds = [self._embedding[tokens[:, 1 + i : 1 + i + length]] for i in range(passes)]
        with self._autocast():
            hidden = self.head(features[:, :length], embeds)
        last = self._last_norm(features[..., -self.head.shape.width :])
        lengths = torch.tensor([len(text.tokens) for text in batch])
        counts = torch.arange(length) < (lengths - passes)[:, None]
        return hidden, last.detach(), counts

    def _loss(self, batch: list[Text], passes: int) -> Tensor:
        hidden, last, counts = self._hidden(batch, passes)
        lm_head = self._lm_head[self.vocab]
        loss = torch.zeros(())
        for i, states in enumerate(hidden):
            places = slice(1 + i, 1 + i + states.shape[1])
            with self._autocast():
                drafts = self.head.lm_head(states[counts])
                teacher = functional.linear(last[:, places][counts], lm_head)
            teacher = (self.settings.sharpness * teacher.float()).softmax(dim=-1)
            loss = loss + 0.7**i * functional.cross_entropy(drafts.float(), teacher)
        return loss

    @torch.inference_mode()
    def agreement(self, texts: list[Text]) -> tuple[list[float], float]:
        """By pass the share of own tokens whose draft is the target's greedy choice; how many can be drafted."""
        passes = max(self.settings.passes)
        same, total, in_vocab = [0] * passes, 0, 0
        for text in texts:
            hidden, last, _ = self._hidden([text], passes)
            first = max(text.first_answer - 1, 0)
            for i, states in enumerate(hidden):
                choices = functional.linear(last[0, 1 + i :], self._lm_head).argmax(dim=-1)[: states.shape[1]]
                drafts = self.vocab[self.head.lm_head(states[0].float()).argmax(dim=-1)]
                same[i] += int((drafts == choices)[first:].sum())
                if i == 0:
                    total += len(choices[first:])
                    in_vocab += int(torch.isin(choices[first:], self.vocab).sum())
        return [count / total for count in same], in_vocab / total


def _rate(progress: float) -> float:
    """The learning rate's factor at ``progress`` in [0, 1]: warm-up, then half a cosine."""
    return min(1.0, progress / 0.05 + 0.02) * (0.5 + 0.5 * math.cos(math.pi * progress))


def _write(folder: Path, head: EagleHead, vocab: Tensor, target: dict[str, Any], settings: HeadSettings) -> None:
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    weights["d2t"] = vocab - torch.arange(len(vocab))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = head_config(head.shape, target, settings.feature_layers)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print("training an EAGLE head: about an hour with AVX-512", highlight=False)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
