"""The tokenizer of the model server, as the file an operator would name."""

from __future__ import annotations

from pathlib import Path

import pytest

from router_ext.devserver.smollm import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(model_dir: Path) -> Path:
    load_tokenizer(model_dir)
    return next(model_dir.rglob("tokenizer.json"))
