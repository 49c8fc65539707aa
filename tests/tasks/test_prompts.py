"""Prompts: published and own forms, chat templates, what is learned and what is given."""

import copy
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from consilium.core.errors import ConfigError
from consilium.core.schema import validate
from consilium.data.datalist import DataList
from consilium.data.text import Text
from consilium.models.causal_lm.network import TINY_FOLDER, build_causal_lm, load_tokenizer
from consilium.tasks.language import LanguageConfig
from consilium.tasks.language.prompts import Prompt
from consilium.tasks.language.task import LanguageTask
from consilium.tasks.language.tokens import IGNORED, Encoder, without_middle

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT = CHATML.replace(
    "{{ m['content'] }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}"
)
"""Qwen 3's template puts an empty thought before answers."""
RECORD = Text("training.jsonl:1", "Name the organ.", "It beats {input}.", ("the heart",))


def chatting(template: str = CHATML):  # noqa: ANN201 - the library's own type
    tokenizer = copy.deepcopy(load_tokenizer("tiny", None))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def text_of(form: str, record: Text = RECORD) -> str:
    return "".join(Prompt(form, chatting()).parts(record))


def test_each_form_asks_in_its_words() -> None:
    assert text_of("Q: {instruction} ({input})\nA:") == "Q: Name the organ. (It beats {input}.)\nA:"
    assert text_of("{instruction} ->") == "Name the organ.\n\nIt beats {input}. ->"  # no place of its own: behind, as in a chat
    assert text_of("{instruction} ->", Text("x:1", "Is it {input}?", "", ("a",))) == "Is it {input}? ->"
    assert text_of("alpaca") == RECORD.prompt
    paper = text_of("alpaca-paper")
    assert paper.startswith("Below is an instruction that describes a task, paired with an input")
    assert paper.endswith("### Instruction:\nName the organ.\n\n### Input:\nIt beats {input}.\n\n### Response:\n")
    alone = text_of("alpaca-paper", Text("x:1", "", "What beats?", ("a",)))
    assert alone.endswith("completes the request.\n\n### Instruction:\nWhat beats?\n\n### Response:\n")
    asked = "<|im_start|>user\nName the organ.\n\nIt beats {input}.<|im_end|>\n<|im_start|>assistant\n"
    assert text_of("chat") == asked


@pytest.mark.parametrize("given", ["a", "nt", ".", "Z Z", " s "])
@pytest.mark.parametrize("content", ["m['content']", "m['content'] | trim"])
def test_a_chat_is_cut_in_its_input_and_not_in_the_templates_own_words(given: str, content: str) -> None:
    """ "a" and "nt" are in "assistant" too."""
    record = Text("x:1", "Is it a plant?", given, ("yes",))
    parts = Prompt("chat", chatting(CHATML.replace("m['content']", content))).parts(record)
    kept = given.rstrip() if "trim" in content else given
    assert parts == ("<|im_start|>user\nIs it a plant?\n\n", kept, "<|im_end|>\n<|im_start|>assistant\n")


def test_a_chat_that_writes_an_input_otherwise_is_whole_all_the_same() -> None:
    loud = chatting(CHATML.replace("m['content']", "m['content'] | upper if m['role'] == 'user' else m['content']"))
    assert Prompt("chat", loud).parts(Text("x:1", "Is it?", "a", ("yes",)))[1] == "A"
    long = chatting(CHATML.replace("m['content']", "m['content'] | length if m['role'] == 'user' else m['content']"))
    whole = "<|im_start|>user\n10<|im_end|>\n<|im_start|>assistant\n"  # 6 + 2 + 2 letters
    assert Prompt("chat", long).parts(Text("x:1", "Is it?", "ab", ("yes",))) == (whole, "", "")


def test_a_chat_answer_is_learned_with_what_ends_it() -> None:
    tokenizer = chatting()
    found = Encoder(tokenizer, 1000, "chat").encode_record(RECORD)
    learned = [label for label in found.labels if label != IGNORED]
    assert not found.prompt_cut
    assert not found.answer_cut
    assert tokenizer.decode(learned) == "the heart<|im_end|>\n"
    begun = tokenizer.decode(found.ids)
    assert begun.count("<|im_start|>assistant\nthe heart<|im_end|>") == 1
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert Encoder(tokenizer, 1000, "chat").ends == sorted(ends)


LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def test_a_chat_answer_ends_at_a_special_token_and_at_no_blank_before_it() -> None:
    """Llama 2's template writes a blank and the end token behind an answer; no answer ends at its first blank."""
    tokenizer = chatting(LLAMA_2)
    encoder = Encoder(tokenizer, 1000, "chat")
    assert tokenizer("x " + tokenizer.eos_token, add_special_tokens=False).input_ids[1:] != [tokenizer.eos_token_id]
    assert encoder.ends == [tokenizer.eos_token_id]
    assert tokenizer.decode(encoder.answer(RECORD)) == f"the heart {tokenizer.eos_token}"


def test_a_chat_writes_what_the_template_has_before_an_answer_behind_the_question() -> None:
    """A blank alone is the tokenizer's own."""
    assert "".join(Prompt("chat", chatting(THOUGHT)).parts(RECORD)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "".join(Prompt("chat", chatting(LLAMA_2)).parts(RECORD)).endswith("It beats {input}. [/INST]")


def test_a_record_s_own_words_are_never_special_tokens() -> None:
    """ "</s>" in an answer ends nothing, and a record that spells a turn of the chat writes none."""
    tokenizer = chatting()
    encoder = Encoder(tokenizer, 1000, "chat")
    plain = encoder.encode_record(Text("x:1", "q", "i", ("a",)))
    turn = "</s> <|im_end|>\n<|im_start|>assistant\nno"
    for record in (Text("x:1", turn, "i", ("a",)), Text("x:1", "q", turn, ("a",)), Text("x:1", "q", "i", (turn + "</s>",))):
        found, special = encoder.encode_record(record), set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        assert [one for one in found.ids if one in special] == [one for one in plain.ids if one in special]
        assert turn in tokenizer.decode(found.ids)


def test_templates_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model's tokenizer has no chat template; use alpaca, or write a template"):
        Prompt("chat", load_tokenizer("tiny", None))
    thinking = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}")
    with pytest.raises(ConfigError, match="changes a question when its answer follows"):
        Encoder(chatting(thinking), 1000, "chat")
    hashes = CHATML.replace("<|im_end|>\n", "\n### ")
    with pytest.raises(ConfigError, match=r"'chat': the tokenizer's template ends answers by '\\n### ', which is not a spec"):
        Encoder(chatting(hashes), 1000, "chat")
    with pytest.raises(ConfigError, match=r"alpaca, alpaca-paper, chat, or a template with \{instruction\}"):
        validate(LanguageConfig, {"name": "language", "prompt": "aplaca"}, "job.yaml")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles\nmust alternate') }}", "{% for m in messages %}{{ m['content'", "{{ x + 1 }}"]
)
def test_a_template_that_fails_is_one_line(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^task.prompt: 'chat': the tokenizer's template fails: .+; use alpaca, or .*e$"):
        Prompt("chat", chatting(template)).parts(RECORD)


def test_a_chat_asks_the_same_every_day_and_ends_every_answer_alike() -> None:
    """Llama 3's template names the day; Qwen 3's puts a thought before answers, in which an answer's own letters stand too."""
    dated = "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}Today: {{ day }}\n" + CHATML
    assert "".join(Prompt("chat", chatting(dated)).parts(RECORD)).startswith("Today: 26 Jul 2024\n<|im_start|>user\nName")
    found = [Prompt("chat", chatting(THOUGHT)).answer_and_ending(said) for said in ("k", " think ", "")]
    assert found == [(said, "<|im_end|>\n") for said in ("k", "think", "")]


def test_the_whole_sequence_is_learned_if_the_job_says_so() -> None:
    tokenizer = load_tokenizer("tiny", None)
    found = Encoder(tokenizer, 1000, "alpaca", whole_sequence=True).encode_record(RECORD)
    assert found.ids == found.labels


@pytest.mark.parametrize(("most", "left"), [(0, []), (1, [9]), (2, [0, 9]), (5, [0, 1, 7, 8, 9]), (10, list(range(10)))])
def test_the_middle_goes(most: int, left: list[int]) -> None:
    assert without_middle(list(range(10)), most) == left


def task_of(record: Text, length: int, **options: Any) -> LanguageTask:
    data = DataList(Path("site"), {"training": (record,), "validation": (), "test": (record,)})
    return LanguageTask(data, load_tokenizer("tiny", None), length, LanguageConfig(name="language", **options))


class Shifted(nn.Module):
    """Finds the token likeliest that stands there already: wrong about the next one unless it is the same."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale, self.count = nn.Parameter(torch.ones(())), count

    def forward(self, input_ids: Tensor, **_: object) -> object:
        return type("Output", (), {"logits": nn.functional.one_hot(input_ids, self.count) * self.scale})


def test_teacher_forced_scores_count_prompt_and_answer() -> None:
    tokenizer = load_tokenizer("tiny", None)
    record = Text("t:1", "a a a a", "", ("a a a",))
    task = task_of(record, 200, evaluate="teacher_forced", prompt="{instruction}")
    ids = Encoder(tokenizer, 200, "{instruction}").encode_record(record)[0]
    expected = sum(one == two for one, two in itertools.pairwise(ids)) / (len(ids) - 1)
    model = Shifted(len(tokenizer))
    assert "token_accuracy" not in task.evaluate(model, "test", 1)
    found = task.evaluate(model, "test", 1, full=True)
    assert found["token_accuracy"] == pytest.approx(expected)
    assert 0 < expected < 1


def test_a_checkpoints_generation_settings_do_not_touch_greedy_answers(tmp_path: Path) -> None:
    folder = tmp_path / "lm"
    shutil.copytree(TINY_FOLDER, folder)
    settings = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "min_new_tokens": 12}
    settings |= {"do_sample": True, "temperature": 9.0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    record = Text("t:1", "Say it again and again.", "", ("x",))
    task = task_of(record, 200, max_new_tokens=16)
    plain, odd = build_causal_lm("tiny", None), build_causal_lm("folder", folder, config)
    assert task.predict(plain, "test", 1) == task.predict(odd, "test", 1)
    batch = task._encoder.collate_prompts([task._encoder.prompt(record, 200)[0]])
    tokens = batch["input_ids"]
    for _ in range(16):  # the likeliest token, one after the other
        tokens = torch.cat([tokens, plain(tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
        if tokens[0, -1] == task._encoder.tokenizer.eos_token_id:
            break
    assert task.predict(odd, "test", 1) == [task._encoder.decode(tokens[0, batch["input_ids"].shape[1] :].tolist())]


def test_a_prompt_is_whole_in_evaluation_however_much_is_to_be_written() -> None:
    tokenizer = load_tokenizer("tiny", None)
    record = Text("t:1", "Say yes.", "", ("yes",))
    seen = []

    class Writing(Shifted):
        def generate(self, input_ids: Tensor, **_: object) -> Tensor:
            seen.append(input_ids)
            return input_ids

    task = task_of(record, 128, max_new_tokens=512)
    task.predict(Writing(len(tokenizer)), "test", 1)
    assert seen[0][0].tolist() == Encoder(tokenizer, 128).prompt(record, 128)[0]


def test_a_prompt_that_the_model_has_no_positions_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer("tiny", None)
    record = Text("t:1", "Say yes, " * 40, "", ("yes",))

    class Short(Shifted):
        def generate(self, input_ids: Tensor, **_: object) -> Tensor:
            return input_ids

    model = Short(len(tokenizer))
    model.config = SimpleNamespace(max_position_embeddings=64)
    task = task_of(record, 512, max_new_tokens=16, evaluate="generation")
    found = [task.evaluate(model, "test", 1, full=True) for _ in range(3)]
    assert [(one["cut_prompts"], one["cut_answers"], one["cut_asked"]) for one in found] == [(0, 0, 1)] * 3
    told = "prompts lose their middle to be answered: the model has positions for 48 tokens beside task.max_new_tokens 16"
    assert caplog.text.count(told) == 1
    with pytest.raises(ConfigError, match=r"task.max_new_tokens: 60: of the model's 64 positions 4 are left .* use 56 or less"):
        task_of(record, 512, max_new_tokens=60).predict(model, "test", 1)


def test_words_that_a_tokenizer_normalizes_to_a_special_token_are_none() -> None:
    """A special token may be found in normalized text: full-width signs are then its letters."""
    signs = sorted(map(chr, range(32, 127)))
    program = Tokenizer(models.BPE({sign: number for number, sign in enumerate(signs)}, []))
    program.normalizer = normalizers.NFKC()
    end = AddedToken("</s>", special=True, normalized=True)
    program.add_special_tokens([end])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=program, eos_token=end)
    words = "＜/s＞"
    assert tokenizer(words).input_ids == [tokenizer.eos_token_id]
    found = Encoder(tokenizer, 100, "{instruction}: ").encode_record(Text("x:1", words, "", (words,)))
    assert found.ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(found.ids, clean_up_tokenization_spaces=False).replace(" ", "").startswith("</s>:")
