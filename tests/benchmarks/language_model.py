"""The memory and the answers of a language model on a CPU, on one thread:

    python -m tests.benchmarks.language_model fit jobs/medquad_smollm2 --data DATA/niddk --checkpoints CHECKPOINTS
    python -m tests.benchmarks.language_model answers jobs/medquad_smollm2 --data DATA/niddk --checkpoints CHECKPOINTS

- fit: the peak that `consilium fit --device cpu` predicts, over the peak of this process after two steps. `--set` changes the
  job, as in `--set training.batch_size=8`; each size needs a process of its own.
- answers: seconds of our answers to the first test prompts, over those of `transformers`' tokenizer and `generate` on the same
  model, by the clock and of the processor, in turns. The job must have `task.prompt: chat` and records of one question.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from consilium.cli.options import load
from consilium.client.site_data import load_site_data
from consilium.config.site import SiteConfig, read_site_folder
from consilium.estimates.compute import memory_of
from consilium.federation.job_assembly import assemble_job, build_task, tokenizer_of
from tests.benchmarks.job_steps import loaded, peak_resident_bytes, take_steps

GIB = 2**30
PROMPTS, BATCH = 12, 4


def fit(job: Any, model: Any, params: Any, task: Any, site: SiteConfig) -> None:
    """Print predicted and measured peak, in GiB, and their ratio."""
    take_steps(model, task, params, job.config, 2)
    peak = peak_resident_bytes()
    predicted = memory_of(job, gpu=False).peak
    print(f"predicted {predicted / GIB:.2f}, measured {peak / GIB:.2f}: {predicted / peak:.2f}")


def answers(job: Any, model: Any, params: Any, task: Any, site: SiteConfig) -> None:
    """Print whether both ways give the same answers, and the medians of the ratios of their seconds."""
    tokenizer = tokenizer_of(job.config, site)
    tokenizer.padding_side = "left"
    texts = task.data.splits["test"][:PROMPTS]
    greedy = {"do_sample": False, "max_new_tokens": job.config.task.max_new_tokens}
    greedy |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}

    def theirs() -> list[str]:
        found = []
        for first in range(0, len(texts), BATCH):
            chats = [[{"role": "user", "content": text.instruction}] for text in texts[first : first + BATCH]]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            made = model.generate(**inputs, **greedy)
            found += tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return found

    ways: list[Callable[[], list[str]]] = [lambda: task.predict(model, "test", BATCH, range(len(texts))), theirs]
    ratios = []
    for turn in range(4):
        spent = {}
        for number in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter(), time.process_time()
            said = [text.strip() for text in ways[number]()]
            spent[number] = time.perf_counter() - began[0], time.process_time() - began[1], said
        ratios.append([spent[0][clock] / spent[1][clock] for clock in (0, 1)])
        print(f"turn {turn + 1}: equal {spent[0][2] == spent[1][2]}, {ratios[-1][0]:.2f}, {ratios[-1][1]:.2f}", flush=True)
    print("ours / theirs, clock and processor:", *(f"{statistics.median(one):.2f}" for one in zip(*ratios, strict=True)))


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fit", "answers"])
    parser.add_argument("job", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="a site's folder")
    parser.add_argument("--checkpoints", type=Path, required=True, help="the folder of the job's model folder")
    parser.add_argument("--set", action="append", default=[], help="a change of the job; may be repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    site = (read_site_folder(given.data) or SiteConfig()).model_copy(update={"device": "cpu", "checkpoints": given.checkpoints})
    job = assemble_job(*load(given.job, given.set))
    with tempfile.TemporaryDirectory() as folder:
        task = build_task(job.config, load_site_data(job.config, "site-1", site, Path(folder)), site)
        model, params = loaded(job, site)
        (fit if given.what == "fit" else answers)(job, model, params, task, site)


if __name__ == "__main__":
    main()
