"""Realistic and arbitrary Unicode text."""

from hypothesis import strategies as st

_FRAGMENTS = [
    "the quick ",
    " brown",
    "12 + 30 = 42",
    "1999.50",
    "的",
    " 的",
    "漢字かな",
    "안녕하세요",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "สวัสดี",
    "Привет",
    "êtes",
    "e\u0302tes",  # the same, decomposed
    "\u0301",  # a combining mark with nothing to combine with
    "🙂",
    "👨‍👩‍👧",
    "🏳️‍🌈",
    "\U0010ffff",
    "\r\n",
    "\t",
    "\x00",
    "\ufeff",
    "\u00ad",
    "\u00a0",
    "\u3000",
    " ",
    "    ",
    "<|end|>",
    "<|im_end|>",
    "<|user|>",
    "<unk>",
    "<s>",
    "</s>",
    "<|first|>",
    "<think>",
]

any_text = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=6), max_size=12).map("".join)
