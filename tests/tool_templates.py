"""Chat templates of four families with tools and thinking, shortened."""

from typing import Any

from tests import tiny_models

_HERMES = (
    "{%- for tool_call in message.tool_calls %}{%- if (loop.first and content) or not loop.first %}"
    "{{- '\n' }}{%- endif %}{%- if tool_call.function %}{%- set tool_call = tool_call.function %}"
    '{%- endif %}{{- \'<tool_call>\n{"name": "\' + tool_call.name + \'", "arguments": \' }}'
    "{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}"
    "{{- tool_call.arguments | tojson }}{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}"
)
#: Strips the thinking of turns before the last message of the user.
_QWEN_3 = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\n\n' }}{%- endif %}{{- '# Tools\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    '{{- \'\n</tools>\nreturn\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(searching=true, last=messages | length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages | length - 1) - loop.index0 %}"
    "{%- if ns.searching and message.role == 'user' %}{%- set ns.searching = false %}"
    "{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set thinking = '' %}"
    "{%- if message.reasoning_content is string %}{%- set thinking = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thinking = content.split('</think>')[0].rstrip('\n').split('<think>')[-1]"
    ".lstrip('\n') %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thinking) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + "
    "content.lstrip('\n') }}{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{%- if message.tool_calls %}" + _HERMES + "{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}"
    "{%- endif %}{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}"
    "{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
#: One call a message, as an object; results from ``ipython``; no thinking.
_LLAMA_3_1 = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content "
    "| trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if tools is not none and tools is defined %}{{- 'Environment: ipython\n' }}{%- endif %}"
    "{{- 'Today Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}"
    "{%- for message in messages %}{%- if loop.first and tools is not none and tools is defined %}"
    '{{- \'<|start_header_id|>user<|end_header_id|>\n\nRespond in the format {"name": function '
    'name, "parameters": dictionary of argument name and its value}.\n\n\' }}'
    "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}"
    "{{- message.content | trim + '<|eot_id|>' }}"
    "{%- elif not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) "
    "%}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim "
    "+ '<|eot_id|>' }}{%- elif 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set tool_call = message.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + tool_call.name + '
    "'\", ' + '\"parameters\": ' }}{{- tool_call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content "
    "+ '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{%- endif %}"
)
#: Tools before the last message of the user; ids of nine characters; a leading space.
_MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set messages = messages[1:] %}{%- endif %}{{- bos_token }}"
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- if tools is not none and loop.index0 == ns.last %}"
    "{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message.content + "
    "'[/INST]' }}{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}"
    "{%- elif message.tool_calls is defined and message.tool_calls is not none %}"
    "{{- '[TOOL_CALLS] [' }}{%- for tool_call in message.tool_calls %}"
    "{%- set out = tool_call.function | tojson %}{{- out[:-1] }}"
    "{%- if tool_call.id is not defined or tool_call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif %}{{- ', \"id\": \"' + tool_call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}{%- endfor %}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    '{{- \'[TOOL_RESULTS] {"content": \' + message.content | tojson + \', "call_id": "\' + '
    "message.tool_call_id + '\"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
#: Its own variable of tools; no ``tool_calls``: calls are text; results from the user.
_SMOLLM_3 = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- else %}"
    "{%- set system = 'You are a helpful assistant.' %}{%- endif %}"
    "{{- '<|im_start|>system\n' + system + '\n\n' }}{%- if xml_tools %}"
    "{{- '### Tools\n<tools>\n' }}"
    "{%- for tool in xml_tools[:] %}{{- tool | string + '\n' }}{%- endfor %}"
    '{{- \'</tools>\nreturn\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call>\n' }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

TEMPLATES = {
    "qwen_3": _QWEN_3,
    "llama_3_1": _LLAMA_3_1,
    "mistral": _MISTRAL,
    "smollm_3": _SMOLLM_3,
}
_CONTROLS = {
    "qwen_3": ("<|im_end|>", ["<|im_start|>"]),
    "llama_3_1": ("<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": ("</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]),
    "smollm_3": ("<|im_end|>", ["<|im_start|>"]),
}
#: JSON schema of the tool of these tests.
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Value of an expression",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def tool_tokenizer(family: str) -> Any:
    """Return a tiny tokenizer with the chat template of a family."""
    tokenizer: Any = tiny_models.digit_tokenizer()
    end, controls = _CONTROLS[family]
    names = {"bos_token": "<s>", "eos_token": end}
    tokenizer.add_special_tokens(names | {"additional_special_tokens": controls})
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
