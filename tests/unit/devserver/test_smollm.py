"""The tokenizer built from the model file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from router_ext.devserver.smollm import BOS_ID, EOS_ID, chat_template, load_tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading and  double  spaces ",
        "tabs\tand\n\nnewlines\r\n",
        "naïve café",
        "日本語のテキスト",
        "Привет, мир",
        "🎉😀👩‍👩‍👧",
        "x = 1234567890",
        "\x00",
    ],
)
def test_any_text_survives_the_round_trip(model_dir: Path, text: str) -> None:
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [  # as a running TGI answered /tokenize
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("q<|im_end|>\nr", [97, 2, 198, 98]),
    ],
)
def test_ids_are_those_of_a_running_tgi(model_dir: Path, text: str, ids: list[int]) -> None:
    assert load_tokenizer(model_dir).encode(text).ids == ids


def test_digits_are_tokens_of_their_own(model_dir: Path) -> None:
    assert load_tokenizer(model_dir).encode("2026").tokens == ["2", "0", "2", "6"]


def test_special_tokens_in_text_become_their_ids_and_can_be_skipped(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
    assert tokenizer.decode(ids) == "user\nhi"


def test_bos_is_added_only_when_asked_for(model_dir: Path) -> None:
    plain, with_bos = load_tokenizer(model_dir), load_tokenizer(model_dir, add_bos=True)
    assert plain.encode("").ids == []
    assert with_bos.encode("").ids == [BOS_ID]
    assert with_bos.encode("hi").ids == [BOS_ID, *plain.encode("hi").ids]
    assert with_bos.encode("hi", add_special_tokens=False).ids == plain.encode("hi").ids


def test_the_template_puts_a_system_message_first_and_opens_the_answer(model_dir: Path) -> None:
    rendered = jinja2.Template(chat_template(model_dir)).render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert rendered.startswith("<|im_start|>system\n")
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_files_are_made_in_an_empty_folder_without_torch(tmp_path: Path, model_dir: Path) -> None:
    script = (
        "import sys, pathlib; from router_ext.devserver.smollm import load_tokenizer;"
        "print(load_tokenizer(pathlib.Path(sys.argv[1])).get_vocab_size()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "49152"
    made = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    load_tokenizer(model_dir)
    kept = {path.name: path.read_bytes() for path in model_dir.rglob("*") if path.name in made}
    assert made == kept
    assert set(made) == {"tokenizer.json", "chat_template.jinja"}
