"""Chat templates in the manner of those that models come with: the same constructs, other words.

Those that write calls of tools do so exactly as their models, since how a model calls is known by its template.
"""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Qwen 2.5 and 3, Hermes 2 Pro.
HERMES = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\nFunctions that you may call:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nA call:\n<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

# EXAONE 4.
HERMES_DENSE = (
    "{% if tools %}[|system|]{% for tool in tools %}<tool>{{ tool | tojson }}</tool>{% endfor %}A call: "
    '<tool_call>{"name": function, "arguments": {}}</tool_call>[|endofturn|]\n{% endif %}'
    "{% for m in messages %}[|{{ m.role }}|]{{ m.content }}{% for call in m.tool_calls %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson }}'
    "{{ '}</tool_call>' }}{{ '\n' if not loop.last }}{% endfor %}[|endofturn|]\n{% endfor %}"
    "{% if add_generation_prompt %}[|assistant|]{% endif %}"
)

# Llama 3.1 and 3.2.
LLAMA = r"""{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today Date: " + strftime_now("%d %b %Y") + "\n\n" }}
{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model calls one tool at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}{{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

# Mistral 7B v0.3 and Nemo.
MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# Mistral Small 3.2: a call is a name and arguments.
MISTRAL_ARGS = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% for call in m.tool_calls %}"
    "{% set arguments = call.function.arguments if call.function.arguments is string"
    " else call.function.arguments | tojson %}[TOOL_CALLS]{{ call.function.name + '[ARGS]' + arguments }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)

# Granite 3.
GRANITE = (
    "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>"
    "{{ tools | tojson(indent=4) }}<|end_of_text|>\n{% endif %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' and message.tool_calls %}"
    "{%- set items = [] %}<|start_of_role|>assistant<|end_of_role|><|tool_call|>["
    "{%- for c in message.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}"
    "{%- endfor %}]<|end_of_text|>\n"
    "{%- else %}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}<|end_of_text|>\n{%- endif %}"
    "{%- if loop.last and add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{%- endif %}{%- endfor %}"
)

# Phi 4 mini.
PHI = (
    "{%- if tools %}<|system|>{% for tool in tools %}<|tool|>{{ tool.function | tojson }}<|/tool|>{% endfor %}<|end|>"
    "{%- endif %}{%- for message in messages %}{%- if message.role == 'tool' %}<|tool_response|>"
    "{{ message.content | tojson }}<|end|>{%- else %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls %}<|tool_call|>{{ call.function | tojson }}<|/tool_call|>{%- endfor %}<|end|>"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)

# DeepSeek R1: arguments are texts, and tools are not described.
DEEPSEEK = (
    "{% set ns = namespace(is_first=false, system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['tool_calls'] %}"
    "{{ '<｜Assistant｜>' + message['content'] + '<｜tool▁calls▁begin｜>' }}{%- for tool in message['tool_calls'] %}"
    "{{ ('' if loop.first else '\n') + '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'"
    " + tool['function']['name']"
    " + '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{%- endfor %}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}"
    "{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

# DeepSeek V3.1.
DEEPSEEK_PLAIN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'system' %}"
    "{{ m.content }}{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else %}"
    "<｜Assistant｜>{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for t in m.tool_calls %}"
    "<｜tool▁call▁begin｜>{{ t.function.name + '<｜tool▁sep｜>' + t.function.arguments }}<｜tool▁call▁end｜>"
    "{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"
)

# Gemma: no system message, roles alternate.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

# Formats whose arguments are no JSON object. The first half of each describes the tools.
_CHATML_TURN = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{{ '<tool_response>\n' + m.content + '\n</tool_response>' if m.role == 'tool' else m.content }}"
)
_CHATML_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_XML_TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}\n<function>\n<name>{{ tool.function.name }}</name>\n"
    "<description>{{ tool.function.description }}</description>{% for name, spec in "
    "tool.function.parameters.properties | items %}<parameter>{{ name }}</parameter>{% endfor %}</function>"
    "{% endfor %}</tools>{% endif %}"
)
_XML_VALUE = "{{ (v | tojson if v is mapping or (v is sequence and v is not string) else v | string) + "
# Qwen 3 Coder.
QWEN_XML = (
    _XML_TOOLS + _CHATML_TURN + "{% for call in m.tool_calls %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for k, v in call.function.arguments | items %}<parameter={{ k }}>\n"
    + _XML_VALUE
    + "'\n</parameter>\n' }}{% endfor %}</function>\n</tool_call>{% endfor %}"
    + _CHATML_END
)
# Seed-OSS, with its own signs of turns.
SEED = (
    "{%- if not tools is defined or tools is none %}{%- set tools = [] %}{%- endif %}"
    "{% for t in tools %}Function:\ndef {{ t.function.name }}({% for name, spec in "
    "t.function.parameters.properties.items() %}{{ name }}{% endfor %}): "
    "{{ t.function.description | trim }}{% endfor %}{% for m in messages %}{{ bos_token + m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}"
    "{{ '\n<seed:tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for k, v in call.function.arguments | items %}<parameter={{ k }}>"
    + _XML_VALUE
    + "'</parameter>\n' }}{% endfor %}{{ '</function>\n</seed:tool_call>' }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)
_GLM_TOOLS = "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
_GLM_TURN = (
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}"
    "{% for tc in m.tool_calls %}{{ '\n<tool_call>' + tc.function.name }}"
)
_GLM_END = "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
# GLM 4.5 and 4.7.
GLM = (
    _GLM_TOOLS + _GLM_TURN + "\n{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v | tojson if v is not string else v }}</arg_value>\n{% endfor %}" + _GLM_END
)
GLM_DENSE = (
    _GLM_TOOLS + _GLM_TURN + "{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}" + _GLM_END
)
MINIMAX = (
    "{% if tools %}<tools>{% for tool in tools %}<tool>{{ tool.function | tojson }}</tool>{% endfor %}</tools>"
    "{% endif %}{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}"
    '{% for call in m.tool_calls %}<invoke name="{{ call.function.name }}">\n'
    '{% for k, v in call.function.arguments | items %}<parameter name="{{ k }}">'
    "{{ v | tojson if v is not string else v }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}"
    "</minimax:tool_call>{% endif %}[e~[\n{% endfor %}{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)
# LFM 2, whose template leaves out calls.
LFM = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\nList of tools: <|tool_list_start|>[{% for tool in tools %}"
    "{{ tool | tojson }}{% endfor %}]<|tool_list_end|><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CHATML_END
)
# OLMo 3.
OLMO = (
    "{% if tools is not none %}<|im_start|>system\n<functions>{{ tools | tojson }}</functions><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'environment' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}<function_calls>{% for call in m.tool_calls %}{% set ns = namespace(parts=[]) %}"
    "{% for k, v in call.function.arguments.items() %}{% set ns.parts = ns.parts + [k ~ '=' ~ (v | tojson)] %}"
    "{% endfor %}{{ call.function.name + '(' + ns.parts | join(', ') + ')' }}{{ '\n' if not loop.last }}{% endfor %}"
    "</function_calls>{% endif %}" + _CHATML_END
)
LLAMA_PYTHON = (
    "{{ bos_token }}{% if tools %}You MUST call in the format [func_name1(params_name1=params_value1)]."
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}<|header_start|>{{ m.role }}"
    "<|header_end|>\n\n{% if m.tool_calls %}[{% for call in m.tool_calls %}{{ call.function.name + '(' }}"
    "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ ')' }}{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
)
NEMOTRON = (
    "{% if tools %}<AVAILABLE_TOOLS>[{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}]</AVAILABLE_TOOLS>"
    "{% endif %}{% for m in messages %}<SPECIAL_11>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<TOOLCALL>["
    '{% for call in m.tool_calls %}{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}' }}{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}\n"
    "{% endfor %}"
)
# Apriel 1.5.
TAGGED_LIST = NEMOTRON.replace("<TOOLCALL>", "<tool_calls>").replace("</TOOLCALL>", "</tool_calls>")
# gpt-oss: calls of earlier turns are written otherwise than new ones, one in a message.
GPT_OSS = (
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>{% if tools %}<|start|>developer"
    "<|message|>namespace functions {% for tool in tools %}// {{ tool.function.description }}\n"
    "type {{ tool.function.name }} = (_: any) => any;{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.thinking and m.content %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json"
    "<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Kimi K2 Thinking: of a call of an earlier turn its id and its arguments.
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>"
    "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
# DeepSeek V3.2 and V4, whose templates name the token by a variable.
DEEPSEEK_DSML = (
    "{% set token = '｜DSML｜' %}{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% endif %}{% endfor %}{% if tools %}## Tools\n<{{ token }}function_calls>\n<{{ token }}invoke name=NAME>\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}\n\n<function_results>\n<result>{{ m.content }}</result>\n"
    "</function_results>\n\n{% elif m.role != 'system' %}<｜{{ m.role }}｜>{{ m.content }}{% if m.tool_calls %}"
    "{{ '\n\n<' + token + 'function_calls>\n' }}{% for call in m.tool_calls %}<{{ token }}invoke name=\""
    '{{ call.function.name }}">\n{% for k, v in call.function.arguments.items() %}<{{ token }}parameter name="{{ k }}" '
    "string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}"
    "</{{ token }}parameter>\n{% endfor %}</{{ token }}invoke>\n{% endfor %}"
    "</{{ token }}function_calls>{% endif %}{{ eos_token if m.role == 'assistant' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜assistant｜></think>{% endif %}"
)
DEEPSEEK_DSML_CALLS = DEEPSEEK_DSML.replace("function_calls>", "tool_calls>")
# Gemma 4.
GEMMA_4 = (
    "{% macro shown(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is boolean %}"
    "{{ 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}{% for k, each in v | dictsort %}"
    "{{ k }}:{{ shown(each) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}["
    "{% for each in v %}{{ shown(each) }}{{ ',' if not loop.last }}{% endfor %}]{% elif v is none %}null{% else %}"
    "{{ v }}{% endif %}{% endmacro %}{{ bos_token }}{% if tools %}<|turn>system\n{% for tool in tools %}"
    "<|tool>declaration:{{ tool.function.name }}{{ shown(tool.function) }}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:{{ '{value:' + shown(m.content) + '}' }}"
    "<tool_response|>{% else %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}{{ '<|tool_call>call:' + call.function.name }}"
    "{{ shown(call.function.arguments) }}<tool_call|>{% endfor %}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
# A format that nobody knows.
UNKNOWN = (
    "{% if tools %}<declare>{{ tools | tojson }}</declare>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}"
    "<call to={{ call.function.name }}>{{ call.function.arguments | tojson }}</call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# A model that reasons and writes calls, for tests of what agents send: all of a chat can be read from its prompt.
AGENT = (
    "{% for m in messages %}[{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "]{% endfor %}{{ reasoning_effort }}{{ enable_thinking }}"
)

# What templates do besides: macros, loops that end, tags for training, JSON in many forms, tests and filters.
SMOLLM = r"""{# a comment #}
{%- macro shown(value) -%}
    {{ value | tojson(sort_keys=true, separators=(',', ':')) }}{{ value | tojson(ensure_ascii=true, indent=1) }}
{%- endmacro %}
{%- set today = strftime_now("%Y") -%}
{%- set ns = namespace(count=0, names=[]) %}
{% for message in messages %}
    {% if message.role == "system" %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% generation %}
    {{ message.role | upper }}: {{ (message.content or "") | trim }} {{ shown(message) }} ({{ loop.index }}
    {{- ", " }}{{ today }})
    {% endgeneration %}
    {% if ns.count > 4 %}{% break %}{% endif %}
{% endfor %}
{{ dict(a=ns.count, b=[1.5, none, true]) | tojson }} {{ {"é": "<&>'"} | tojson }} {{ messages | length }}
{%- if documents is not none %}{{ documents }}{% endif %}{% if tools is none %} no tools{% endif %}
{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "hermes": HERMES,
    "hermes-dense": HERMES_DENSE,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "granite": GRANITE,
    "phi": PHI,
    "deepseek": DEEPSEEK,
    "deepseek-plain": DEEPSEEK_PLAIN,
    "gemma": GEMMA,
    "qwen-xml": QWEN_XML,
    "seed": SEED,
    "glm": GLM,
    "glm-dense": GLM_DENSE,
    "minimax": MINIMAX,
    "lfm": LFM,
    "olmo": OLMO,
    "llama-python": LLAMA_PYTHON,
    "nemotron": NEMOTRON,
    "tagged-list": TAGGED_LIST,
    "gpt-oss": GPT_OSS,
    "kimi": KIMI,
    "gemma-4": GEMMA_4,
    "deepseek-dsml": DEEPSEEK_DSML,
    "deepseek-dsml-calls": DEEPSEEK_DSML_CALLS,
    "agent": AGENT,
    "unknown": UNKNOWN,
    "smollm": SMOLLM,
    "zephyr": ZEPHYR,
}
