"""The commands of jobs/README.md for a real language model, on a small GGUF file and a made-up MedQuAD."""

from pathlib import Path

import pytest
import yaml

from tests.conftest import JOBS, run
from tests.pages.reading import blocks
from tests.use.test_model_import import write_gguf

PAIR = (
    '<QAPair pid="1"><Question qid="{0}" qtype="symptoms">What are signs of {0}?</Question>'
    "<Answer>Fever and {0}.</Answer></QAPair>"
)


@pytest.mark.slow
def test_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    for folder, site in (("1_CancerGov_QA", "c"), ("5_NIDDK_QA", "n"), ("7_SeniorHealth_QA", "s")):
        (tmp_path / "MedQuAD" / folder).mkdir(parents=True)
        for number in range(60):
            name = f"{site}{number}"
            text = f"<Document><Focus>{name}</Focus><QAPairs>{PAIR.format(name)}</QAPairs></Document>"
            (tmp_path / "MedQuAD" / folder / f"{number}.xml").write_text(text)
    (block,) = (one for one in blocks("jobs/README.md") if one.text.startswith("consilium data import medquad"))
    monkeypatch.chdir(tmp_path)
    for line in block.text.strip().splitlines():
        words = line.split()[1:]
        if words[0] == "simulate":  # the small model has another config.json
            job = yaml.safe_load((JOBS / "medquad_smollm2/app/config/job.yaml").read_text())
            job["model"] |= {"config": "CHECKPOINTS/smollm2", "max_length": 48}
            job["task"]["max_new_tokens"] = 4
            job["training"] |= {"rounds": 1, "local_steps": 1}
            Path("job.yaml").write_text(yaml.safe_dump(job))
            words[1] = "job.yaml"
        assert run(monkeypatch, *words) == 0, (line, capsys.readouterr().err)
    assert "SmolLM2" in (tmp_path / "handed/adapter_config.json").read_text()
    page = (tmp_path / "cancergov.html").read_text()
    assert "What are signs of c" in page, "answers beside the reference"
