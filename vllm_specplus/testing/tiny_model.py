"""Tiny checkpoints in the Hugging Face layout, for a machine with no GPU and no network.

``python -m vllm_specplus.testing.tiny_model OUT --kind random|trained|draft [--seed N] [--quiet]``

========  ============================================================================================
kind      model in OUT
========  ============================================================================================
random    a MiMo model with an MTP head, random weights, made in about a second
trained   a MiMo model with an MTP head, trained on the sources of installed packages, cached
draft     a one-layer Qwen2 model without a head, for ``method: draft_model`` beside ``random``
========  ============================================================================================

All share one byte-level vocabulary of 320. The draft is a Qwen2 model because vLLM turns a draft checkpoint whose
architecture has an MTP head into that head.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from vllm_specplus.testing.checkpoint_folders import cache_root, cached, install, install_copy
from vllm_specplus.testing.tiny_corpus import corpus_digest
from vllm_specplus.testing.tiny_net import MAX_POSITIONS, ModelShape, TinyNet
from vllm_specplus.testing.tiny_tokenizer import END_OF_TEXT, SPECIAL_TOKENS, write_tokenizer
from vllm_specplus.testing.tiny_train import TrainSettings, train

RANDOM_SHAPE = ModelShape(2, 64, 2, 2, 128)
DRAFT_SHAPE = ModelShape(1, 64, 2, 2, 64, num_mtp_layers=0)

# Part of the cache key: raise it when code changes the trained weights without changing a setting or the corpus.
_REVISION = 2


def make_random(out: str | Path, seed: int = 0) -> Path:
    """Write a random MiMo model with its MTP head to folder ``out`` and return that folder.

    The same seed gives the same bytes. Raises OSError if ``out`` cannot be written.
    """
    return install(out, lambda folder: _write_random(folder, RANDOM_SHAPE, seed))


def make_draft_model(out: str | Path, seed: int = 0) -> Path:
    """Write a one-layer random Qwen2 model to folder ``out`` and return that folder.

    It has the embedding and the output table of the random model of the same ``seed``, so that model accepts some of
    its drafts. With any other target it only serves to reject. Raises OSError if ``out`` cannot be written.
    """
    return install(out, lambda folder: _write_draft(folder, seed))


def make_trained(out: str | Path, settings: TrainSettings | None = None) -> Path:
    """Write the trained MiMo model to folder ``out`` and return that folder.

    The first call trains (see :class:`TrainSettings`); later ones copy from the cache. Raises OSError if ``out`` or the
    cache cannot be written, RuntimeError if the corpus is not installed.
    """
    return install_copy(out, cached_trained(settings or TrainSettings()))


def cache_folder(settings: TrainSettings) -> Path:
    """Return where the model of ``settings`` is cached: under ``$XDG_CACHE_HOME`` or ``~/.cache``.

    The folder's name is a hash of the settings and of the corpus. Raises RuntimeError if the corpus is not installed.
    """
    key = json.dumps([_REVISION, corpus_digest(), asdict(settings)], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_root() / f"tiny-model-{digest}"


def cached_trained(settings: TrainSettings) -> Path:
    """Return the cache folder of ``settings``, training the model first if it is not there.

    Of several processes or threads that call this at once, one trains and the others wait for it.
    """
    return cached(cache_folder(settings), lambda folder: _train_into(folder, settings))


def _train_into(folder: Path, settings: TrainSettings) -> None:
    net, report = train(settings)
    _write_checkpoint(folder, net)
    record = {"report": asdict(report), "settings": asdict(settings), "corpus_sha256": corpus_digest()}
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def _write_random(folder: Path, shape: ModelShape, seed: int) -> None:
    net = TinyNet(shape)
    randomise(net, seed)
    _write_checkpoint(folder, net)


def _write_draft(folder: Path, seed: int) -> None:
    target, draft = TinyNet(RANDOM_SHAPE), TinyNet(DRAFT_SHAPE)
    randomise(target, seed)
    randomise(draft, seed)
    draft.model.embed_tokens = target.model.embed_tokens
    draft.lm_head = target.lm_head
    _write_checkpoint(folder, draft)


def _write_checkpoint(folder: Path, net: TinyNet) -> None:
    weights = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = net.shape.hf_config(eos_token_id=END_OF_TEXT)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stops = {"eos_token_id": [END_OF_TEXT, SPECIAL_TOKENS["<|im_end|>"]]}
    (folder / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n")
    write_tokenizer(folder, MAX_POSITIONS)


def randomise(net: TinyNet, seed: int) -> None:
    """Give ``net`` random weights whose greedy output is varied printable text.

    Plain random weights repeat one token and never accept a draft. Here attention is sharp, so the output depends on
    the whole context. Only printable bytes have logits other than 0. The MTP head passes on the embedding of the newest
    token, so some of its drafts are right.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(net.named_parameters()):
        if name.endswith("bias"):
            nn.init.zeros_(weight)
        elif weight.ndim == 2:
            nn.init.normal_(weight, std=_random_std(name, weight), generator=generator)
    with torch.no_grad():
        printable = torch.zeros(net.shape.vocab_size, 1)
        printable[[10, *range(32, 127)]] = 1.0
        net.lm_head.weight.mul_(printable)
        if net.shape.num_mtp_layers:
            projection = net.model.mtp_layers[0].input_proj.weight
            projection[:, : net.shape.width] *= 0.5
            projection[:, net.shape.width :] = torch.eye(net.shape.width)


def _random_std(name: str, weight: torch.Tensor) -> float:
    if "embed_tokens" in name:
        return 1.0
    gain = 1.0
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        gain = 2.0
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        gain = 0.3 if "mtp_layers" in name else 0.5
    return gain * weight.shape[1] ** -0.5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_specplus.testing.tiny_model", description="Make a tiny checkpoint."
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; made if missing")
    parser.add_argument("--kind", choices=("random", "trained", "draft"), default="random")
    parser.add_argument("--seed", type=int, help="seed of the weights (default: the kind's own)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the training's progress and errors")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0, or with a message on stderr 2 if a folder cannot be written, and 1 if nothing could be made.
    """
    args = _parser().parse_args(argv)
    seed = {} if args.seed is None else {"seed": args.seed}
    try:
        if args.kind == "random":
            message = f"random MiMo model with an MTP head: {make_random(args.out, **seed)}"
        elif args.kind == "draft":
            message = f"random Qwen2 draft model: {make_draft_model(args.out, **seed)}"
        else:
            message = _trained_message(args.out, replace(TrainSettings(), **seed))
    except (OSError, RuntimeError) as error:
        print(f"error: cannot make the {args.kind} model in {args.out}: {error}", file=sys.stderr)
        return 2 if isinstance(error, OSError) else 1
    if not args.quiet:
        print(message)
    return 0


def _trained_message(out: Path, settings: TrainSettings) -> str:
    is_cached = cache_folder(settings).is_dir()
    folder = make_trained(out, settings)
    report = json.loads((folder / "training.json").read_text())["report"]
    origin = "from the cache" if is_cached else f"newly trained in {report['seconds']:.0f} s"
    return (
        f"trained MiMo model with an MTP head, {origin}: {folder}\n"
        f"on files it has not seen, its first draft is its own next choice at {report['held_out_agreement']:.0%} of "
        "positions"
    )


if __name__ == "__main__":
    sys.exit(main())
