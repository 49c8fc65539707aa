"""The work itself as a user of PyTorch and PEFT writes it: a language model's LoRA at one site. Nothing of consilium here."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

Values = dict[str, Tensor]
ANSWERS, TOKENS = "answers-", 128
"""How files with a site's written answers begin, and how long an answer may be."""


class Worker:
    """One process' model, and the sites whose work it does. `folder`: what peers.py has laid out."""

    def __init__(self, folder: Path) -> None:
        self.work: dict[str, Any] = json.loads((folder / "work.json").read_text())
        torch.set_num_threads(1)
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(self.work["weights"], dtype=torch.float32)
        config = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj"])
        self.model, self.folder = get_peft_model(base, config), folder
        self.tokenizer = AutoTokenizer.from_pretrained(self.work["weights"])
        self._sites: dict[str, dict[str, list[Any]]] = {}
        self.load(load_file(folder / "initial.safetensors"))

    def values(self) -> Values:
        """Return copies of the adapter's tensors."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put values into the adapter."""
        live = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                live[name].copy_(value)

    def count(self, site: str) -> int:
        """Return how many training samples a site has."""
        return len(self._data(site)["training"])

    def round(self, site: str, number: int, values: Mapping[str, Tensor]) -> tuple[Values, dict[str, float]]:
        """Do one round at one site: score what came, train, score again. Return the new values, and losses by name."""
        data, training = self._data(site), self.work["training"]
        self.load(values)
        found = {"global": self.score(data["validation"])}
        active = [p for p in self.model.parameters() if p.requires_grad]
        optimizer, total = torch.optim.Adam(active, lr=training["lr"]), 0.0
        self.model.train()
        for rows in self.work["orders"][site][number]:
            loss = self._losses([data["training"][row] for row in rows]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        self.model.eval()
        found |= {"train": total / len(self.work["orders"][site][number]), "personalized": self.score(data["validation"])}
        return self.values(), found

    def close(self, site: str, values: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the final scores on the test split: of the site's own model, the last global one, and the base.

        Each also answers the prompts whose answers the site's own found likeliest, as the median, and least likely, and the
        last global model is scored on validation texts once more.
        """
        test, found, said = self._data(site)["test"], {}, {}
        self.load(own)
        losses = self._each(test)
        order = losses.argsort().tolist()
        shown = [test[order[place]] for place in (0, len(order) // 2, -1)]
        found["personalized"], said["personalized"] = float(losses.mean()), self._answer(shown)
        self.load(values)
        found["global"], said["global"] = self.score(test), self._answer(shown)
        self.score(self._data(site)["validation"])
        with self.model.disable_adapter():
            found["pretrained"], said["pretrained"] = self.score(test), self._answer(shown)
        (self.folder / f"{ANSWERS}{site}.json").write_text(json.dumps(said))
        return found

    def score(self, rows: list[Any]) -> float:
        """Return the mean loss of some samples."""
        return float(self._each(rows).mean())

    @torch.no_grad()
    def _each(self, rows: list[Any]) -> Tensor:
        self.model.eval()
        size = self.work["training"]["batch_size"]
        return torch.cat([self._losses(rows[i : i + size]) for i in range(0, len(rows), size)])

    @torch.no_grad()
    def _answer(self, rows: list[Any]) -> list[str]:
        """Return the greedy answers to the prompts of some samples."""
        asked = [[token for token, label in zip(*row, strict=True) if label == -100] for row in rows]
        longest = max(map(len, asked))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in asked])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in asked])
        end = self.tokenizer.eos_token_id
        how = GenerationConfig(do_sample=False, max_new_tokens=TOKENS, eos_token_id=end, pad_token_id=0)
        written = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=how)[:, longest:]
        return [self.tokenizer.decode(one, skip_special_tokens=True).strip() for one in written.tolist()]

    def _losses(self, rows: list[Any]) -> Tensor:
        """Return each sample's mean cross-entropy per answer token, of rows padded on the right."""
        longest = max(len(tokens) for tokens, _ in rows)
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in rows])
        labels = torch.tensor([answer + [-100] * (longest - len(answer)) for _, answer in rows])
        mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens, _ in rows])
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        each = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")
        return each.sum(1) / (labels[:, 1:] != -100).sum(1)

    def _data(self, site: str) -> dict[str, list[Any]]:
        if site not in self._sites:
            self._sites[site] = {
                split: [self._encode(**record) for record in self._records(site, split)]
                for split in ("training", "validation", "test")
            }
        return self._sites[site]

    def _records(self, site: str, split: str) -> Iterator[dict[str, str]]:
        for line in (self.folder / "data" / site / f"{split}.jsonl").read_text().splitlines():
            record = json.loads(line)
            yield {"prompt": self.work["prompt"].replace("{instruction}", record["input"]), "answer": record["output"]}

    def _encode(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        asked = self.tokenizer(prompt).input_ids
        said = [*self.tokenizer(answer, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        return asked + said, [-100] * len(asked) + said


class Marks:
    """When something happened, in seconds since 1970, for peers.py; and the losses of every round."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "marks.jsonl"

    def note(self, what: str, **more: Any) -> None:
        """Append a mark."""
        with open(self.path, "a") as file:
            file.write(json.dumps({"what": what, "at": time.time(), **more}) + "\n")


def mean(of_sites: list[tuple[Mapping[str, Tensor], int]]) -> Values:
    """Return the mean of sites' values, each weighted by its samples."""
    total = sum(count for _, count in of_sites)
    return {name: sum(values[name] * (count / total) for values, count in of_sites) for name in of_sites[0][0]}
