"""Scores of written answers, worked by hand."""

import math
import random
import unicodedata

import pytest

from consilium.tasks.language.text_scores import (
    bleu,
    cider,
    corpus_scores,
    meteor,
    nist,
    record_scores,
    rouge_l,
    words_and_punctuation,
)

WRITTEN = ["the cat sat on the mat", "a dog"]
REFERENCES = [["the cat sat on the mat", "a cat is there"], ["a dog runs"]]


def test_rouge_l_is_the_longest_common_subsequence_with_the_best_reference() -> None:
    f = 2 * 1 * (2 / 3) / (1 + 2 / 3)  # "a dog": precision 1, recall 2/3
    assert rouge_l(WRITTEN, REFERENCES) == pytest.approx([1, f])


@pytest.mark.parametrize(
    ("written", "reference", "value"),
    [
        ("Опухоль растёт.", "опухоль растёт", 1.0),
        ("die Dosis höher", "die Dosis hüher", 2 / 3),
        ("ho\u0308her", "höher", 1.0),  # a letter and its mark, and both as one
        ("दवा लो", "दवा ला", 0.5),  # vowel signs are marks, no letters
        ("你好 世界", "你好 天下", 0.5),
        ("你好世界", "你好天下", 0.0),  # no spaces: each is one word
    ],
)
def test_rouge_l_reads_letters_beyond_ascii(written: str, reference: str, value: float) -> None:
    assert rouge_l([written], [[reference]]) == pytest.approx([value])


def test_rouge_l_stems_english_words_of_over_three_letters_alone() -> None:
    """Porter's stemmer takes an s away: not from three letters, nor where a letter is beyond ASCII, whatever its length."""
    assert rouge_l(["runs", "ads", "höhes", "öls"], [["run"], ["ad"], ["höhe"], ["öl"]]) == [1, 0, 0, 0]


def test_rouge_l_of_ascii_texts_is_rouge_scores_own() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    draw = random.Random(0)
    parts = "running runs ran Tumour's a_b 3.5 x2 - (no) flies the U.S. 10\u00b2 \u201cso\u201d"
    texts = [" ".join(draw.choices(parts.split(), k=draw.randint(0, 12))) for _ in range(80)]
    own = RougeScorer(["rougeL"], use_stemmer=True)
    truth = [own.score(ref, one)["rougeL"].fmeasure for one, ref in zip(texts[:40], texts[40:], strict=True)]
    assert rouge_l(texts[:40], [[ref] for ref in texts[40:]]) == truth


def test_bleu_of_a_corpus_with_uneven_references() -> None:
    # all n-grams written are in a reference, so only brevity costs: 8 words against the closest references' 6 + 3
    assert bleu(WRITTEN, REFERENCES) == pytest.approx(math.exp(1 - 9 / 8), abs=1e-4)


def test_meteor_by_exact_words_and_stems() -> None:
    # two matches in one chunk: precision 1, recall 2/3, F = 10 P R / (R + 9 P), penalty 0.5 (1/2)^3
    mean = 10 * (2 / 3) / (2 / 3 + 9)
    assert meteor(["a dog"], [["a dog runs"]]) == pytest.approx([mean * (1 - 0.5 / 8)], abs=1e-3)
    stemmed, same, other = meteor(["dogs", "dog", "hound"], [["dog"]] * 3)
    assert stemmed == same > 0
    assert other == 0


def test_meteor_nist_and_cider_of_words_with_marks_by_hand() -> None:
    """दवा is a word of both, लो and ला differ in a vowel sign; cut at marks all three would share their letters."""
    written, references = ["दवा लो", "घर"], [["दवा ला"], ["घर"]]
    # one of two words in one chunk: P = R = F = 1/2, and 1 - 0.5 (1/1)^3 of it
    assert meteor(written[:1], references[:1]) == pytest.approx([0.25])
    # of 3 words each stands once: two of three written ones tell log2(3); no pair of words is found
    assert nist(written, references) == pytest.approx(2 * math.log2(3) / 3)
    # single words, log 2 each: the first answer's cosine is 1/2, the other's is 1
    assert cider(written, references, longest=1) == pytest.approx(10 * (0.5 + 1) / 2)


def test_nist_by_hand() -> None:
    # of 3 words "a" stands twice, "b" once; "b" behind "a" is one of two; two words of three expected ones cost half
    assert nist(["a b"], [["a b a"]]) == pytest.approx(0.5 * ((math.log2(3 / 2) + math.log2(3)) / 2 + math.log2(2)))
    # two references count together, of 6 words: a 1, b 2, c 3; a b 1, b c 1; and 3 words are the mean of 2 and 4
    single = (math.log2(6) + math.log2(6 / 2) + math.log2(6 / 3)) / 3
    assert nist(["a b c"], [["a b", "b c c c"]]) == pytest.approx(single + (math.log2(1 / 1) + math.log2(2 / 1)) / 2)
    # a word counts as often as the one reference that has it most, not as all together: of three b two
    assert nist(["b b b"], [["a b b", "b a a"]], longest=1) == pytest.approx(2 * math.log2(6 / 3) / 3)


def test_nist_is_that_of_e2e_s_evaluation() -> None:
    """By pymteval.py of tuetschek/e2e-metrics, with mteval-v13a's words; nltk's NIST of several references is another."""
    written = ["Vegetarians will be happy here: kid-friendly, 20-25 pounds.", "The Eagle is a pub."]
    references = [
        ["The Eagle is a kid-friendly pub at 20-25 pounds.", "Kid-friendly pub, 20-25."],
        ["The Eagle is a pub in the city.", "A pub is The Eagle."],
    ]
    assert nist(written, references) == pytest.approx(3.2026116985916087, rel=1e-12)


def test_cider_by_hand() -> None:
    # single words only: "x" stands in both documents (weight 0), "y" in the first, "z" in the second (log 2)
    assert cider(["x y", "x q"], [["x y"], ["x z"]], longest=1) == pytest.approx(10 * (1 + 0) / 2)
    # answer (y, z), reference (y): cosine 1 / sqrt 2, one pair of words more than the reference; the second answer misses
    longer = math.exp(-1 / 72)
    assert cider(["y z", "q"], [["y"], ["z"]], longest=1) == pytest.approx(10 * (longer / math.sqrt(2)) / 2)
    # a word said twice counts as often as the reference says it: (y 2) clipped to (y 1) against a length of 2
    assert cider(["y y", "q"], [["y"], ["z"]], longest=1) == pytest.approx(10 * (longer / 2) / 2)
    # references are averaged, not the best taken
    assert cider(["y", "z"], [["y", "v"], ["z"]], longest=1) == pytest.approx(10 * (0.5 + 1) / 2)
    assert cider(["x"], [["x"]]) == 0


def test_cider_is_the_coco_caption_evaluations() -> None:
    """All are spelt as `words` splits them: that evaluation's own tokenizer is in Java."""
    reference = pytest.importorskip("pycocoevalcap.cider.cider").Cider()
    draw, vocabulary = random.Random(0), ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", ",", "."]
    texts = [" ".join(draw.choices(vocabulary, k=draw.randint(1, 14))) for _ in range(60)]
    references = [[texts[i], *texts[i + 20 : i + 20 + draw.randint(0, 3)]] for i in range(0, 30)]
    written = [texts[i] if i % 3 else texts[59 - i] for i in range(30)]
    truth, _ = reference.compute_score(dict(enumerate(references)), {i: [one] for i, one in enumerate(written)})
    assert 1 < truth < 9
    assert cider(written, references) == pytest.approx(float(truth), rel=1e-6)


@pytest.mark.parametrize(
    "text", ["बिल्ली चटाई पर बैठी है", "தமிழ் மொழி மிகவும் பழமையான", "עִבְרִית שָׂפָה עַתִּיקָה מְאֹד", "مَرْحَبًا بِكَ فِي المَدِينَة"]
)
def test_a_letter_and_its_marks_are_one_word(text: str) -> None:
    assert words_and_punctuation(text) == text.split()


def test_a_letter_and_its_mark_are_the_same_as_both_in_one() -> None:
    composed = ["Das Gefäß öffnet sich früh.", "Ça coûte très cher à l’été."]
    apart = [unicodedata.normalize("NFD", one) for one in composed]
    assert apart != composed
    truth = record_scores(composed, [[one] for one in composed]) | corpus_scores(composed, [[one] for one in composed])
    assert record_scores(apart, [[one] for one in composed]) | corpus_scores(apart, [[one] for one in composed]) == truth
    assert record_scores(composed, [[one] for one in apart]) | corpus_scores(composed, [[one] for one in apart]) == truth


def test_empty_answers_score_nothing() -> None:
    assert record_scores(["", ""], REFERENCES) == {"rouge_l": [0.0, 0.0], "meteor": [0.0, 0.0]}
    assert corpus_scores(["", ""], REFERENCES) == {"bleu": 0.0, "nist": 0.0, "cider": 0.0}
    assert words_and_punctuation("It's 5.") == ["it", "'", "s", "5", "."]


def test_nist_weighs_rare_words_more() -> None:
    # one reference "a b a": information of a is log2(3/2), of b log2(3)
    assert nist(["b"], [["a b a"]]) < nist(["b a a"], [["a b a"]])
    both = ["x y", "x z"]
    assert nist(both, [["x y"], ["x z"]]) > nist(["x x", "x x"], [["x y"], ["x z"]])
    assert nist(["", ""], REFERENCES) == 0
