"""A small tokenizer with the traps of big ones: BOS that encoding adds, a chat template that contains BOS as well,
special tokens that may be generated, characters of several tokens, and merges that leave room for odd splits.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from router_ext.devserver.codec import byte_alphabet

BOS, EOS, SEPARATOR = "<s>", "</s>", "<|sep|>"
BOS_ID, EOS_ID, SEPARATOR_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|sep|>{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|sep|>assistant\n{% endif %}"
)
_WORDS = (
    "the of and to in that is was for on with as it be at by this had not are but from or have an they which one "
    "you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over "
    "man me even most made after also did many before must through back years where much your way well down should "
    "because each just those people how too little state good very make world still own see men work long get here"
).split()


def tokenizer() -> Tokenizer:
    """Byte-level BPE whose merges build the words above, letter by letter from the left, and two line breaks."""
    vocabulary = {BOS: BOS_ID, EOS: EOS_ID, SEPARATOR: SEPARATOR_ID}
    for symbol in byte_alphabet():
        vocabulary[symbol] = len(vocabulary)
    merges: dict[tuple[str, str], None] = {}
    for word in ["\n\n", *(f" {word}" for word in _WORDS), *_WORDS]:
        symbols = [_symbol(b) for b in word.encode()]
        whole = symbols[0]
        for symbol in symbols[1:]:
            merges[whole, symbol] = None
            whole += symbol
            vocabulary.setdefault(whole, len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), fuse_unk=False, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (BOS, EOS, SEPARATOR)])
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return made


def _symbol(byte: int) -> str:
    return next(symbol for symbol, value in byte_alphabet().items() if value == byte)
