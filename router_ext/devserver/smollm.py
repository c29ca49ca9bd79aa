"""Tokenizer and chat template of SmolLM2-135M-Instruct, built from the model file's own vocabulary and merges.

Pre-tokenisation splits digits one by one, then works on bytes without a prefix space; there is no byte fallback
and no normaliser. ``<|im_start|>`` (BOS) is never added unless asked for; ``<|im_end|>`` ends a turn, hence EOS
and padding. Nothing here loads weights or imports torch, so that routers and other engines can use it too.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from router_ext.devserver.gguf_model import field, model_dir, open_gguf, replacing

MODEL_ID = "SmolLM2-135M-Instruct"
BOS, EOS = "<|im_start|>", "<|im_end|>"
BOS_ID, EOS_ID = 1, 2
MAX_POSITIONS = 8192  # the model's context length
CONTROL = 3  # GGUF's token type of special tokens


def load_tokenizer(cache_dir: Path, add_bos: bool = False) -> Tokenizer:
    """The model's tokenizer.

    Args:
        cache_dir: where ``tokenizer.json`` is kept; it is made at the first call.
        add_bos: put BOS in front of every text encoded with special tokens, as many other models' tokenizers
            do. The file in the cache never does so.
    """
    tokenizer = Tokenizer.from_str(_cached(cache_dir, "tokenizer.json"))
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
        )
    return tokenizer


def chat_template(cache_dir: Path) -> str:
    """The model's chat template (Jinja), as its file carries it."""
    return _cached(cache_dir, "chat_template.jinja")


def _cached(cache_dir: Path, name: str) -> str:
    path = model_dir(cache_dir) / name
    if not path.exists():
        _extract(path.parent)
    return path.read_text(encoding="utf-8")


def _extract(folder: Path) -> None:
    """Write both files from the GGUF's metadata."""
    reader = open_gguf()
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = field(reader, "tokenizer.ggml.token_type")
    merges: list[str] = field(reader, "tokenizer.ggml.merges")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    with replacing(folder / "tokenizer.json") as temporary:
        temporary.write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False), encoding="utf-8")
    with replacing(folder / "chat_template.jinja") as temporary:
        temporary.write_text(field(reader, "tokenizer.chat_template"), encoding="utf-8")
