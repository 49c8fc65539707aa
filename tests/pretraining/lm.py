"""Making of the tiny language model that the package ships: `python -m tests.pretraining.lm`.

Seeded; the same versions, thread count and arguments give the same files. A byte-level BPE tokenizer of 512 tokens and a small
Llama are trained on generated instructions and answers (generic_text.py) in the template of data/text.py, the loss on prompt
and answer alike.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from consilium.models.causal_lm.network import TINY_FOLDER, build_causal_lm, load_tokenizer
from tests.pretraining.loop import fit, options
from tests.pretraining.texts import make_texts

VOCABULARY = 512
PAD, BEGIN, END = "<pad>", "<s>", "</s>"


def make_tokenizer(seed: int, records: int = 4000) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of VOCABULARY tokens trained on generated records; it can write any text."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((t.prompt + t.outputs[0] for t in make_texts(seed, "tokenizer", records)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BEGIN, eos_token=END)


def make_config() -> LlamaConfig:
    """Return the tiny architecture: 353 thousand parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


def make_batch(tokenizer: PreTrainedTokenizerFast, seed: int, step: int | str, count: int) -> tuple[Tensor, Tensor]:
    """Return token numbers (N, T), padded right, and labels (N, T) with -100 where padded."""
    texts = make_texts(seed, f"batch {step}", count)
    rows = [torch.tensor([*tokenizer.encode(t.prompt + t.outputs[0]), tokenizer.eos_token_id]) for t in texts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return ids, nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)


def loss_of(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy per token."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def pretrain(tokenizer: PreTrainedTokenizerFast, steps: int, batch: int, lr: float, seed: int) -> LlamaForCausalLM:
    """Return the model, trained from random weights; prints a line every 50 steps."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(make_config()).train()
    return fit(model, lambda step: loss_of(model, *make_batch(tokenizer, seed, step, batch)), steps, lr, average=False)


@torch.no_grad()
def held_out(folder: Path, seed: int, count: int = 256) -> tuple[float, float]:
    """Return the mean loss per token of whole held-out records, and of their answers alone."""
    tokenizer, model = load_tokenizer("folder", folder), build_causal_lm("folder", folder)
    ids, labels = make_batch(tokenizer, seed, "held out", count)
    answers = labels.clone()
    for row, text in enumerate(make_texts(seed, "batch held out", count)):
        answers[row, : len(tokenizer.encode(text.prompt))] = -100
    return loss_of(model, ids, labels).item(), loss_of(model, ids, answers).item()


def main() -> None:
    """Make tokenizer and weights, write them in half precision, and print the loss on held-out records."""
    wanted = options(__doc__, TINY_FOLDER, steps=1500, batch=32, lr=3e-3)
    tokenizer = make_tokenizer(wanted.seed)
    model = pretrain(tokenizer, wanted.steps, wanted.batch, wanted.lr, wanted.seed)
    wanted.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(wanted.output)
    model.half().save_pretrained(wanted.output)
    print("held out: loss {:.3f} per token, {:.3f} per token of the answer".format(*held_out(wanted.output, wanted.seed)))


if __name__ == "__main__":
    main()
