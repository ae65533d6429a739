"""Chat templates of well-known families, shortened to plain conversations."""

from typing import Any

from tests import tiny_models

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role + "
    "'<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
)
_LLAMA_3_1 = (
    "{{ bos_token }}"
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    + _SYSTEM
    + "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: ' + date_string + '\n\n' + system | trim + '<|eot_id|>' }}"
    "{% for message in messages %}{{ '<|start_header_id|>' + message.role + "
    "'<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
_LLAMA_2 = (
    _SYSTEM + "{% for message in messages %}"
    "{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message.content %}"
    "{% else %}{% set content = message.content %}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}" + _SYSTEM + "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.last and system %}{{ '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_GEMMA_3 = (
    "{{ bos_token }}" + _SYSTEM + "{% for message in messages %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (system + '\n\n' if loop.first and system else '') + "
    "message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_PHI_3 = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + "
    "'<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_PHI_4 = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '<|im_sep|>' + "
    "message.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
_QWEN_2 = (
    "{% for message in messages %}{% if loop.first and messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_3 = (
    "{% set ns = namespace(last=messages | length - 1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}"
    "{% set thinking = '' %}{% if '</think>' in content %}"
    "{% set thinking = content.split('</think>')[0].rstrip('\n').split('<think>')[-1]"
    ".lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + "
    "content.lstrip('\n') }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
_ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_VICUNA = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ 'ASSISTANT: ' + message.content + eos_token }}{% elif message.role == 'user' %}"
    "{{ 'USER: ' + message.content + ' ' }}{% else %}{{ message.content + ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_OPENCHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ 'GPT4 Correct ' + message.role.title() + ': ' + message.content + '<|end_of_turn|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}"
)
_HARMONY = (
    "{% for message in messages %}{{ '<|start|>' + message.role + ('<|channel|>final' if "
    "message.role == 'assistant' else '') + '<|message|>' + message.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

#: Families that show the messages and nothing else.
PLAIN = {
    "chatml": _CHATML,
    "llama_2": _LLAMA_2,
    "llama_3": _LLAMA_3,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "gemma_3": _GEMMA_3,
    "phi_3": _PHI_3,
    "phi_4": _PHI_4,
    "qwen_3": _QWEN_3,
    "zephyr": _ZEPHYR,
    "vicuna": _VICUNA,
    "openchat": _OPENCHAT,
    "harmony": _HARMONY,
}
#: Families that add a default system prompt or a date.
ADDING = {"qwen_2": _QWEN_2, "llama_3_1": _LLAMA_3_1}
TEMPLATES = PLAIN | ADDING

_BEGIN = {"llama_3": "<|begin_of_text|>", "llama_3_1": "<|begin_of_text|>", "gemma": "<bos>"}
_CONTROLS = {
    "llama_3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "chatml": ["<|im_start|>"],
    "openchat": ["<|end_of_turn|>"],
}


def chat_tokenizer(family: str) -> Any:
    """Return a tiny tokenizer with the chat template of a family."""
    tokenizer: Any = tiny_models.digit_tokenizer()
    end = "<|im_end|>" if "<|im_end|>" in TEMPLATES[family] else "</s>"
    names = {"bos_token": _BEGIN.get(family, "<s>"), "eos_token": end}
    tokenizer.add_special_tokens(names | {"additional_special_tokens": _CONTROLS.get(family, [])})
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
