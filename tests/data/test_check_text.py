"""`data check` on instruction data: counts, empty answers, lengths in tokens, leaks between splits."""

from pathlib import Path

from consilium.data.check import check_texts
from consilium.models.causal_lm.network import load_tokenizer
from consilium.tasks.language import LanguageConfig
from consilium.tasks.language.tokens import Encoder
from consilium.tasks.registry import TASKS
from tests.data.writing import write


def test_problems_and_warnings_are_counted_and_named(tmp_path: Path) -> None:
    one, two = {"input": "one", "output": "1"}, {"input": "two", "output": " "}
    write(tmp_path, "training.jsonl", one, two, one)
    write(tmp_path, "test.jsonl", one | {"output": "eins"})
    found = check_texts(tmp_path).to_dict()
    assert found["samples"] == {"training": 3, "validation": 0, "test": 1}
    assert found["problems"]["empty answer"] == {"count": 1, "first": ["training.jsonl:2"]}
    assert found["problems"]["duplicate between splits"]["first"] == ["test: test.jsonl:1 = training: training.jsonl:1"]
    assert found["warnings"]["prompt more than once in a split"]["first"] == ["training: 1 of 3"]
    assert found["warnings"]["empty split"]["first"] == ["validation"]
    assert found["sizes"] == {}


def test_a_length_is_that_of_training_with_the_job_s_own_prompt(tmp_path: Path) -> None:
    """A record of just as many tokens as may be is whole; with one less it is too long, and named with what it has."""
    write(tmp_path, "training.jsonl", {"instruction": "Say.", "input": "it now", "output": "it now"})
    check, tokenizer = TASKS["language"].check, load_tokenizer("tiny", None)
    assert check is not None
    config = LanguageConfig(name="language", prompt="{instruction}: {input} =")
    asked, said = (tokenizer(one, add_special_tokens=False).input_ids for one in ("Say.: it now =", "it now"))
    whole = len(asked) + len(said) + 1  # and the end
    for most, told in ((whole, None), (whole - 1, {"count": 1, "first": [f"training.jsonl:1: {whole}"]})):
        found = check(tmp_path, config, tokenizer, most).to_dict()
        assert found["warnings"].get(f"longer than {most} tokens") == told


def test_lengths_in_tokens_of_a_job(tmp_path: Path) -> None:
    write(tmp_path, "training.jsonl", {"input": "Add the numbers.", "output": "3"}, {"input": "long " * 100, "output": "3"})
    found = check_texts(tmp_path, Encoder(load_tokenizer("tiny", None), 64).full_length, 64).to_dict()
    assert sum(found["sizes"].values()) == 2
    assert found["sizes"].keys() <= {"up to 32 tokens", "up to 64 tokens", "up to 256 tokens", "up to 512 tokens"}
    assert found["warnings"]["longer than 64 tokens"]["first"][0].startswith("training.jsonl:2: ")
