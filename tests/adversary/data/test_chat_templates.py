"""A chat template in a model's folder is a program of a stranger's: it ends within bounds, in one line, before training."""

import copy
import threading

import pytest

from consilium.core.errors import CheckpointError, ConfigError
from consilium.data.text import Text
from consilium.models.causal_lm.network import load_tokenizer
from consilium.tasks.language.prompts import Prompt
from consilium.tasks.language.tokens import Encoder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECORD = Text("training.jsonl:1", "Is it benign?", "Jane Roe, born 1950", ("yes",))
QUICK = {
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "memory": "{{ 'a' * 10**10 }}",
    "padding": "{{ '%10000000000d' % 1 }}",
    "length": "{% for a in range(99999) %}aaaaaaaaaa{% endfor %}",
    "range": "{{ range(10**9) }}",
    "division": "{{ 1 / 0 }}",
    "overflow": "{{ 2.0 ** 100000 }}",
    "syntax": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "escape": "{{ cycler.__init__.__globals__ }}",
    "file": "{% include '/etc/passwd' %}",
    "screen": "{{ raise_exception('\x1b[31mowned\n') }}",
    "surrogate": "{{ '\\ud800' }}",
}
SLOW = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "lipsum": "{{ lipsum(n=10**7) }}",
}


def encoder(template: str) -> Encoder:
    """Return what a task makes of a model's folder before it trains."""
    tokenizer = copy.deepcopy(load_tokenizer("tiny", None))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return Encoder(tokenizer, 1000, "chat")


def test_hostile_templates_end_in_a_line_and_the_next_is_rendered() -> None:
    for name, template in QUICK.items():
        with pytest.raises(ConfigError, match=r"task\.prompt: 'chat': ") as caught:
            encoder(template + CHATML)
        assert str(caught.value).isprintable(), name
        assert len(str(caught.value)) < 400, name
    assert encoder(CHATML).encode_record(RECORD).ids


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_endless_loops_end(name: str) -> None:
    """In a thread that is left behind, so that code without the bound fails and does not hang the suite."""
    told: list[str] = []

    def build() -> None:
        try:
            encoder(SLOW[name] + CHATML)
        except ConfigError as error:
            told.append(str(error))

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    thread.join(60)
    assert told
    assert "takes over a second of processor time" in told[0]
    assert encoder(CHATML).encode_record(RECORD).ids


def test_errors_quote_no_record() -> None:
    found = encoder("{% if 'Roe' in messages[0].content %}{{ raise_exception(messages[0].content) }}{% endif %}" + CHATML)
    with pytest.raises(CheckpointError, match="fails for a record") as caught:
        found.encode_record(RECORD)
    assert "Roe" not in str(caught.value)


def test_prompts_are_those_of_transformers() -> None:
    system = (
        "{{ bos_token }}{{ messages[0] | tojson }}{% set n = namespace(a=1) %}{{ n.a }}{% generation %}b{% endgeneration %}"
    )
    found = encoder(system + CHATML)
    turns = [{"role": "user", "content": f"{RECORD.instruction}\n\n{RECORD.input}"}]
    own = found.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert "".join(Prompt("chat", found.tokenizer).parts(RECORD)) == own
