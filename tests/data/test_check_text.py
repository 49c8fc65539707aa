"""`data check` on instruction data: counts, empty answers, lengths in tokens, leaks between splits."""

import re
from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import UnfitError
from consilium.data.check import check_texts
from consilium.data.check_report import Findings
from consilium.data.text import read_texts
from consilium.models.causal_lm.network import load_tokenizer
from consilium.tasks.language import LanguageConfig
from consilium.tasks.language.task import LanguageTask
from consilium.tasks.registry import TASKS
from tests.conftest import refused
from tests.data.writing import write
from tests.tasks.test_conversations import CHATS, NO_PLACE, REFUSING, speaking


def checked(folder: Path, most: int = 64, tokenizer: Any = None, **settings: str) -> Findings:
    """Return the findings of the check of a language job."""
    check = TASKS["language"].check
    assert check is not None
    config = LanguageConfig.model_validate({"name": "language"} | settings)
    return check(folder, config, tokenizer or load_tokenizer("tiny", None), most)


def test_problems_and_warnings_are_counted_and_named(tmp_path: Path) -> None:
    one, two = {"input": "one", "output": "1"}, {"input": "two", "output": " "}
    write(tmp_path, "training.jsonl", one, two, one, {"input": "a", "output": "b", "patient": "q"})
    write(tmp_path, "test.jsonl", one | {"output": "eins"}, {"input": "c", "output": "d", "patient": "q"})
    found = check_texts(tmp_path).to_dict()
    assert found["samples"] == {"training": 4, "validation": 0, "test": 2}
    assert found["problems"]["patient in two splits"]["first"] == ["test: test.jsonl:2 = training: training.jsonl:4"]
    assert found["problems"]["empty answer"] == {"count": 1, "first": ["training.jsonl:2"]}
    assert found["problems"]["duplicate between splits"]["first"] == ["test: test.jsonl:1 = training: training.jsonl:1"]
    assert found["warnings"]["prompt more than once in a split"]["first"] == ["training: 1 of 4"]
    assert found["warnings"]["empty split"]["first"] == ["validation"]
    assert found["sizes"] == {}


def test_every_unusable_record_is_named(tmp_path: Path) -> None:
    write(tmp_path, "training.jsonl", {"question": "a", "answer": "b"}, {"question": "a"}, {"question": "c", "answer": ""})
    found = check_texts(tmp_path).to_dict()
    assert found["problems"]["unusable record"]["first"] == [
        'training.jsonl:2: needs a "answer"; write the answer there',
        "training.jsonl:3: answer: an empty answer; write its words, or leave the record out",
    ]
    assert found["verdict"] == ["training would stop at these problems: unusable record; fix them first"]


@pytest.mark.parametrize(
    ("settings", "records", "told"),
    [
        (
            {"evaluate": "options"},
            [{"answer": "C", "labels": ["A", "B"]}],
            "test.jsonl:1: output has none of the labels (A, B)",
        ),
        ({"evaluate": "exact"}, [{"answer": "none"}], "test.jsonl:1: has no final answer; add final_answer"),
        ({"learn": "preference"}, [{"answer": "a"}], "test.jsonl:1: a record without a rejected answer"),
        ({}, [{"chosen": "a", "rejected": "b"}], "test.jsonl:1: a record with a rejected answer"),
    ],
)
def test_a_record_that_training_refuses_is_a_problem(
    settings: dict[str, str], records: list[dict[str, Any]], told: str, tmp_path: Path
) -> None:
    """The check finds what the task refuses, in the same words."""
    asked = "prompt" if "rejected" in records[0] else "question"
    write(tmp_path, "training.jsonl")
    write(tmp_path, "test.jsonl", *({asked: "a?"} | record for record in records))
    (line,) = checked(tmp_path, **settings).problems["refused by the job"]
    assert line.startswith(told)
    config = LanguageConfig.model_validate({"name": "language"} | settings)
    tokenizer = load_tokenizer("tiny", None)
    refused(re.escape(f"{tmp_path}: {line}"), LanguageTask, read_texts(tmp_path), tokenizer, 64, config, error=UnfitError)


@pytest.mark.parametrize(("prompt", "told"), NO_PLACE.items())
def test_a_record_that_the_prompt_has_no_place_for_costs_no_other(prompt: str, told: dict[int, str], tmp_path: Path) -> None:
    write(tmp_path, "training.jsonl", *CHATS)
    found = checked(tmp_path, 512, speaking(REFUSING), prompt=prompt)
    assert len(found.problems["refused by the job"]) == len(told)
    for line, (number, why) in zip(found.problems["refused by the job"], told.items(), strict=True):
        assert line.startswith(f"training.jsonl:{number}: ")
        assert why in line
    assert sum(found.lengths.values()) == len(CHATS) - len(told)


def test_the_length_of_a_preference_record_is_that_of_its_longer_answer(tmp_path: Path) -> None:
    write(tmp_path, "training.jsonl", {"prompt": "a", "chosen": "b", "rejected": "word " * 100})
    found = checked(tmp_path, learn="preference").to_dict()
    assert list(found["warnings"]) == ["empty split", "longer than 64 tokens"]


def test_a_length_is_that_of_training_with_the_job_s_own_prompt(tmp_path: Path) -> None:
    """A record of just as many tokens as may be is whole; with one less it is too long, and named with what it has."""
    write(tmp_path, "training.jsonl", {"instruction": "Say.", "input": "it now", "output": "it now"})
    tokenizer = load_tokenizer("tiny", None)
    asked, said = (tokenizer(one, add_special_tokens=False).input_ids for one in ("Say.: it now =", "it now"))
    whole = len(asked) + len(said) + 1  # and the end
    for most, told in ((whole, None), (whole - 1, {"count": 1, "first": [f"training.jsonl:1: {whole}"]})):
        found = checked(tmp_path, most, prompt="{instruction}: {input} =").to_dict()
        assert found["warnings"].get(f"longer than {most} tokens") == told


def test_lengths_in_tokens_of_a_job(tmp_path: Path) -> None:
    write(tmp_path, "training.jsonl", {"input": "Add the numbers.", "output": "3"}, {"input": "long " * 100, "output": "3"})
    found = checked(tmp_path).to_dict()
    assert sum(found["sizes"].values()) == 2
    assert found["sizes"].keys() <= {"up to 32 tokens", "up to 64 tokens", "up to 256 tokens", "up to 512 tokens"}
    assert found["warnings"]["longer than 64 tokens"]["first"][0].startswith("training.jsonl:2: ")
