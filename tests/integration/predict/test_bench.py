"""``fairlane bench predictor`` with a model that it cannot have."""

from __future__ import annotations

from pathlib import Path

import pytest

from router_ext.cli import main
from router_ext.obs import logs


@pytest.mark.parametrize(("content", "named"), [(None, "No such file"), (b"no model at all", "not a length model")])
def test_a_model_that_cannot_be_had_is_one_line(
    content: bytes | None,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "configure", lambda **_: None)  # a command has its process to itself, a test has not
    path = tmp_path / "length.model"
    if content is not None:
        path.write_bytes(content)
    assert main(["bench", "predictor", "--model", str(path)]) == 1
    said = capsys.readouterr().err
    assert named in said
    assert "Traceback" not in said
