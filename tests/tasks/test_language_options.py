"""Options by log-likelihood: equal to lm-evaluation-harness, to whole passes of the model, and by hand."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from consilium.core.errors import CheckpointError, UnfitError
from consilium.data.datalist import DataList, Loading
from consilium.data.text import Text
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.tasks.language import LanguageConfig, metric_names, scores, task as language
from consilium.tasks.language.task import LanguageTask
from consilium.tasks.language.tokens import Encoder
from consilium.use.export import export
from consilium.use.model import open_model
from tests.use.test_export import kept
from tests.use.test_peft_folder import of_folder, sha_of

TOKENIZER = load_tokenizer("tiny", None)
MADE_UP: tuple[tuple[str, str, str, tuple[str, ...], tuple[float, ...]], ...] = (
    ("What did Tom see?", "Tom went to the cat and saw it.", "boy",
     ("cat", "boy", "big old house"), (-10.5822, -25.8148, -99.8223)),
    ("What is in the box?", "Tom went to the dog and saw it.", "red car",
     ("red car", "I was so happy that we ran"), (-30.7867, -145.9537)),
    ("What did Tom see?", "Tom went to the tree and saw it.", "sun",
     ("I was so happy that we ran", "sun"), (-140.2749, -21.4329)),
    ("Which? Answer with A, B or C.", "Pick\nA. one\nB. two\nC. three", "A",
     ("A", "B", "C"), (-10.5454, -10.2495, -10.4468)),
)  # fmt: skip
"""Records of task.prompt alpaca, and what lm-evaluation-harness 0.4.13 finds their options to be of the tiny model."""


def records() -> tuple[Text, ...]:
    return tuple(
        Text(f"test.jsonl:{n}", ask, given, (said,), labels=labels) for n, (ask, given, said, labels, _) in enumerate(MADE_UP)
    )


def make_task(texts: tuple[Text, ...], quiet: bool = False, length: int = 256, **options: Any) -> LanguageTask:
    data = DataList(Path("site"), {"training": (), "validation": (), "test": texts}, Loading(ignore_unfit=quiet))
    return LanguageTask(data, TOKENIZER, length, LanguageConfig(name="language", evaluate="options", **options))


def test_options_after_an_empty_prompt_follow_the_begin_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a prompt of blanks alone, of which the first stays a prompt."""
    model, seen = build_causal_lm("tiny", None), list[Any]()
    monkeypatch.setattr(language, "log_likelihoods", lambda *given: seen.append(given) or [[0.0, 0.0]] * 2)
    blank = "  \n "
    texts = tuple(Text(f"test.jsonl:{n}", ask, "", ("sun",), labels=("sun", "car")) for n, ask in enumerate(("", blank)))
    make_task(texts, prompt="{instruction}").evaluate(model, "test", 2)
    blanks, (_, _, prompts, options, _) = TOKENIZER(blank).input_ids, seen[0]
    assert prompts == [[1], blanks[:1]]
    words = [TOKENIZER(word).input_ids for word in ("sun", "car")]
    assert options == [words, [[*blanks[1:], *word] for word in words]]


def test_options_are_ranked_as_lm_evaluation_harness_ranks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = build_causal_lm("tiny", None), list[list[list[float]]]()
    whole = language.log_likelihoods
    monkeypatch.setattr(language, "log_likelihoods", lambda *given: seen.append(whole(*given)) or seen[-1])
    task = make_task(records())
    for size in (1, 4, 64):
        found = task.evaluate(model, "test", size, full=True)
        for own, (*_, theirs) in zip(seen[-1], MADE_UP, strict=True):
            assert own == pytest.approx(theirs, abs=2e-3)
        assert (found["accuracy"], found["accuracy_norm"]) == (2 / 4, 1 / 4)
    assert found.keys() == metric_names(task.config)
    assert found["accuracy_low"] < 0.5 < found["accuracy_high"]
    shown = scores(task.config)
    assert (shown.leading, shown.beside[:2]) == (("accuracy", "loss"), ("accuracy_norm", "loss"))
    assert shown.leading_name(found) == "accuracy"


class Unigrams(nn.Module):
    """Finds tokens as likely as a table says, wherever they stand."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: Tensor, **_: object) -> object:
        return type("Output", (), {"logits": self.logits.expand(*input_ids.shape, -1)})


def test_the_longer_option_wins_by_its_length_alone() -> None:
    """Every token costs the same: few win by the sum, many letters a token win by the character."""
    labels = ("yes", "they ran off to the park")
    tokens = [len(TOKENIZER(one, add_special_tokens=False).input_ids) for one in labels]
    each = math.log(len(TOKENIZER))
    by_length = [-count * each / len(one) for count, one in zip(tokens, labels, strict=True)]
    assert tokens[0] < tokens[1]
    assert by_length[0] < by_length[1]
    model = Unigrams(torch.zeros(len(TOKENIZER)))
    found = make_task((Text("t:1", "q", "", ("yes",), labels=labels),)).evaluate(model, "test", 2)
    assert (found["accuracy"], found["accuracy_norm"]) == (1, 0)


def test_blanks_at_the_end_of_a_prompt_count_as_part_of_the_options() -> None:
    """cat and xylophone have 2 and 7 tokens: 2/3 and 7/9 a character. With three line breaks before them it is 5/3 and 10/9."""
    assert [len(TOKENIZER(one, add_special_tokens=False).input_ids) for one in ("cat", "xylophone")] == [2, 7]
    model, text = Unigrams(torch.zeros(len(TOKENIZER))), Text("t:1", "q", "", ("xylophone",), labels=("cat", "xylophone"))
    for prompt, by_length in (("{instruction}", 0), ("{instruction}\n\n\n", 1)):
        found = make_task((text,), prompt=prompt).evaluate(model, "test", 2)
        assert (found["accuracy"], found["accuracy_norm"]) == (0, by_length)


def test_labels_of_the_job_serve_records_that_have_none_and_bad_options_are_refused() -> None:
    model = Unigrams(torch.zeros(len(TOKENIZER)))
    own = Text("t:1", "q", "", ("no",))
    assert make_task((own,), labels=["no", "certainly not at all"]).evaluate(model, "test", 1)["accuracy"] == 1
    shape = {"model_type": "gpt2", "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": len(TOKENIZER)}
    learned = build_causal_lm("folder", None, shape, weights=False)  # it has no position for a longer option
    for said, labels in (("no", ("no", "")), ("they ran", ("", "they ran")), ("no", ("no", "they ran off to the park " * 40))):
        bad = Text("t:2", "q", "", (said,), labels=labels)
        with pytest.raises(UnfitError, match=r"t:2: the option '.*' has no token, or more than half of model\.max_length; m"):
            make_task((bad,), length=64)
        assert make_task((bad,), length=64, quiet=True).evaluate(learned, "test", 1)["accuracy"] == 0
    with pytest.raises(UnfitError, match=r"t:1: output has none of the labels \(none given\)"):
        make_task((own,))


def test_an_option_that_the_tokenizer_fails_for_reveals_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a list that ignores unfit samples, as in a job with privacy, such a record is never right."""

    def option(self: Encoder, words: str) -> list[int]:
        if words == "secret":
            raise CheckpointError("its tokenizer fails for a text")
        return [1]

    monkeypatch.setattr(Encoder, "option", option)
    record = Text("t:1", "q", "", ("no",), labels=("no", "secret"))
    with pytest.raises(UnfitError, match="site: t:1: its tokenizer fails"):
        make_task((record,))
    model = Unigrams(torch.zeros(len(TOKENIZER)))
    assert make_task((record,), quiet=True).evaluate(model, "test", 1)["accuracy"] == 0


def test_a_long_prompt_leaves_room_for_every_option() -> None:
    model = build_causal_lm("tiny", None)
    long = Text("t:1", "q", "one two three four " * 200, ("B",), labels=("A", "B"))
    assert make_task((long,), length=64).evaluate(model, "test", 2)["cut_prompts"] == 1


HARNESS = """
task: made_up
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{prompt}"
doc_to_choice: "{{{{labels}}}}"
doc_to_target: "{{{{labels.index(output)}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install lm_eval into this environment")
def test_lm_evaluation_harness_scores_exported_folders_as_we_do(tmp_path: Path) -> None:
    """The documented command, on the merged and on the PEFT folder, says what our evaluation of the model says."""
    config, own = of_folder(tmp_path, targets="all-linear")
    config = config.model_copy(update={"model": config.model.model_copy(update={"max_length": 256})})
    adapter = kept(tmp_path / "kept", config, sha_of(config))
    found = make_task(records()).evaluate(open_model(adapter, own=own).model, "test", 4)
    lines = [{"instruction": a, "input": b, "output": c, "labels": d} for a, b, c, d, _ in MADE_UP]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompt = json.dumps(Text("", "{{instruction}}", "{{input}}", ("",)).prompt)[1:-1]
    task = HARNESS.format(file=tmp_path / "test.jsonl", prompt=prompt)
    assert yaml.safe_load(task)["doc_to_text"].endswith("### Response:\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/made_up.yaml").write_text(task)
    for format in ("merged", "peft"):
        folder = export(open_model(adapter, own=own), format, tmp_path / format, own).folder  # type: ignore[arg-type]
        model = f"pretrained={folder}" if format == "merged" else f"pretrained={config.model.checkpoint},peft={folder}"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"{model},dtype=float32"]
        command += ["--tasks", "made_up", "--include_path", str(tmp_path / "tasks"), "--device", "cpu"]
        subprocess.run([*command, "--output_path", str(tmp_path / f"{format}.out")], check=True, cwd=tmp_path)
        (result,) = (tmp_path / f"{format}.out").rglob("results_*.json")
        said = json.loads(result.read_text())["results"]["made_up"]
        assert (said["acc,none"], said["acc_norm,none"]) == (found["accuracy"], found["accuracy_norm"])


@pytest.mark.parametrize("labels", [("no",), ("no", "no", "yes")])
def test_one_option_or_one_twice_is_refused(labels: tuple[str, ...]) -> None:
    bad = Text("t:1", "q", "", ("no",), labels=labels)
    with pytest.raises(UnfitError, match=r"t:1: labels: .* expected at least two options, each once"):
        make_task((bad,))
    assert make_task((bad,), quiet=True).evaluate(Unigrams(torch.zeros(len(TOKENIZER))), "test", 1)["accuracy"] == 0
