"""Scores of generated answers against one or more references each: ROUGE-L, BLEU, METEOR, NIST and CIDEr-D.

- ROUGE-L follows rouge-score, without punctuation. For ASCII texts its words equal those of rouge-score, which drops all other
  letters.
- BLEU is computed by sacrebleu with its own tokenization, scaled to 0..1.
- METEOR is computed by nltk with exact words and stems only. Synonyms need WordNet's data, which is never downloaded here, so
  values are below published ones.
- NIST is our implementation of mteval-v13a, as in E2E's evaluation.
- CIDEr-D is our implementation. On equal words it gives the values of the COCO caption evaluation.

BLEU and NIST split words like mteval-v13a. METEOR and CIDEr-D split lower-case text into words and punctuation marks. A letter
with a combining mark equals the composed character. Scripts without spaces (Chinese, Japanese, Thai) are not segmented: all
text up to the next punctuation mark is one word.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from types import SimpleNamespace

from consilium.tasks.language.answers import MOST

Grams = Counter[tuple[str, ...]]


def record_scores(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Return ROUGE-L (F) and METEOR, 0..1, of each of N answers against its best reference.

    A split's score is their mean. Of texts longer than MOST characters the first MOST are compared.
    """
    written, references = _first_characters(written, references)
    return {"rouge_l": rouge_l(written, references), "meteor": meteor(written, references)}


def corpus_scores(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return BLEU (0..1), NIST (to 5-grams) and CIDEr-D of N answers as one corpus.

    Long texts are cut as in `record_scores`.
    """
    written, references = _first_characters(written, references)
    return {"bleu": bleu(written, references), "nist": nist(written, references), "cider": cider(written, references)}


def _first_characters(written: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    return [one[:MOST] for one in written], [[one[:MOST] for one in refs] for refs in references]


def rouge_l(written: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return each answer's F-measure of the longest common subsequence of stems, with its best reference."""
    from nltk.stem.porter import PorterStemmer

    stem, found = PorterStemmer().stem, []
    for one, refs in zip(written, references, strict=True):
        own, scores = _stems(one, stem), [0.0]
        for true in filter(None, (_stems(ref, stem) for ref in (refs if own else ()))):
            common = _longest_common(own, true)
            precision, recall = common / len(own), common / len(true)
            scores.append(2 * precision * recall / (precision + recall) if common else 0.0)
        found.append(max(scores))
    return found


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence (Hyyrö, "Bit-Parallel LCS-length Computation Revisited", 2004).

    rouge-score computes a table with a Python number per pair of words: 20 s for 256 against 20,000 words.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(other):
        places[word] = places.get(word, 0) | 1 << place
    whole = (1 << len(other)) - 1
    left = whole
    for word in one:
        match = left & places.get(word, 0)
        left = (left + match | left - match) & whole
    return len(other) - left.bit_count()


def _stems(text: str, stem: Callable[[str], str]) -> list[str]:
    """Return a text's lower-case stems.

    rouge-score's own tokenizer keeps only a to z and digits, so that Cyrillic answers would score 0. Here words are letters,
    combining marks and digits of every script. ASCII words of more than three letters are stemmed, as there.
    """
    found = "".join(c if _is_word_character(c) else " " for c in _composed(text.lower())).split()
    return [stem(one) if len(one) > 3 and one.isascii() else one for one in found]


def _is_word_character(character: str) -> bool:
    return character.isalpha() or character.isdecimal() or unicodedata.category(character).startswith("M")


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return corpus BLEU-4 in 0..1; answers may have different numbers of references."""
    from sacrebleu import corpus_bleu

    most = max(len(refs) for refs in references)
    streams = [[_composed(refs[i]) if i < len(refs) else None for refs in references] for i in range(most)]
    return corpus_bleu([_composed(one) for one in written], streams).score / 100


def meteor(written: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return each answer's METEOR against its best reference, by exact words and stems."""
    from nltk.translate.meteor_score import meteor_score

    score = partial(meteor_score, wordnet=SimpleNamespace(synsets=lambda word: []))  # a WordNet without synonyms
    return [
        score([words_and_punctuation(ref) for ref in refs], words_and_punctuation(one))
        for one, refs in zip(written, references, strict=True)
    ]


def nist(written: Sequence[str], references: Sequence[Sequence[str]], longest: int = 5) -> float:
    """Return corpus NIST (Doddington, HLT 2002) as in mteval-v13a; answers may have different numbers of references, as in E2E.

    The information of an n-gram is log2(count of its first n - 1 words / count of the n-gram) over all references. For n = 1 ..
    `longest`, the information of the answers' n-grams is summed, each at most as often as in the reference with most of them,
    and divided by the number of n-grams. A brevity factor lowers answers that are shorter than the mean of their references.
    Without any words the score is 0.
    """
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    mteval = Tokenizer13a()

    def split(text: str) -> list[str]:
        return str(mteval(_composed(text.lower()))).split()

    own, known = [split(one) for one in written], [[split(ref) for ref in refs] for refs in references]
    times: Grams = Counter()
    for ref in (ref for refs in known for ref in refs):
        times.update({(): len(ref)})
        times.update(gram for n in range(1, longest + 1) for gram in _grams(ref, n).elements())
    total = 0.0
    for n in range(1, longest + 1):
        found = [_grams(one, n) & reduce(or_, (_grams(ref, n) for ref in refs)) for one, refs in zip(own, known, strict=True)]
        told = sum(count * math.log2(times[gram[:-1]] / times[gram]) for grams in found for gram, count in grams.items())
        total += told / max(1, sum(max(0, len(one) - n + 1) for one in own))
    count, expected = sum(map(len, own)), sum(sum(map(len, refs)) / len(refs) for refs in known)
    brevity = float(count > 0)
    if 0 < count < expected:  # 1/2 if answers have two thirds of their references' words
        brevity = float(0.5 ** ((math.log(count / expected) / math.log(1.5)) ** 2))
    return total * brevity


def cider(written: Sequence[str], references: Sequence[Sequence[str]], longest: int = 4) -> float:
    """Return CIDEr-D (Vedantam et al., CVPR 2015), 0..10, as in the COCO caption evaluation, without stemming.

    For n = 1 .. `longest`, an answer and a reference are vectors of n-gram counts times log(N / documents with the n-gram). A
    document is all references of one answer. The cosine of both, with an answer's entries clipped to the reference's, is
    lowered by a penalty on the difference of lengths (counted in pairs of words, as there). It is averaged over references, n
    and answers, and multiplied by 10. With a single answer every weight is log 1 = 0, so the score is 0.
    """
    total = 0.0
    for n in range(1, longest + 1):
        counted = [[_grams(words_and_punctuation(ref), n) for ref in refs] for refs in references]
        documents = Counter(gram for refs in counted for gram in set().union(*refs))
        for one, texts, refs in zip(written, references, counted, strict=True):
            vector = _weigh(_grams(words_and_punctuation(one), n), documents, len(written))
            close = []
            for ref in refs:
                true = _weigh(ref, documents, len(written))
                norms = math.hypot(*vector.values()) * math.hypot(*true.values())
                both = sum(min(value, true[gram]) * true[gram] for gram, value in vector.items() if gram in true)
                close.append(both / norms if norms else 0.0)
            own, *others = (max(len(words_and_punctuation(text)) - 1, 0) for text in (one, *texts))
            penalties = [math.exp(-((own - other) ** 2) / (2 * 6.0**2)) for other in others]
            total += sum(c * penalty for c, penalty in zip(close, penalties, strict=True)) / len(refs)
    return 10 * total / longest / len(written)


def words_and_punctuation(text: str) -> list[str]:
    """Return a text's lower-case words and punctuation marks. Words are letters, combining marks, numbers and _."""
    inside = (c if c.isalnum() or c == "_" or _is_word_character(c) else f" {c} " for c in _composed(text.lower()))
    return "".join(inside).split()


def _grams(tokens: Sequence[str], n: int) -> Grams:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _weigh(grams: Grams, documents: Counter[tuple[str, ...]], count: int) -> dict[tuple[str, ...], float]:
    return {g: c * math.log(count / max(1, documents[g])) for g, c in grams.items()}
