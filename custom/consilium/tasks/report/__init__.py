"""Reports and answers about pictures: texts that are learned and scored as in the language task, each about one picture."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from consilium.data.datalist import DataList
from consilium.data.settings import PictureSettings, WindowConfig
from consilium.data.text import read_texts
from consilium.tasks.language import LanguageConfig, metric_names, scores
from consilium.tasks.registry import TaskKind

if TYPE_CHECKING:
    from torch import Tensor

    from consilium.tasks.report.task import ReportTask


class ReportConfig(LanguageConfig):
    """Reports on pictures, and answers to questions about them.

    Records are as for language, each with an `image`. All else is as for language. A record's question stands behind its
    picture; with `prompt: chat` both are in the user's turn.
    """

    name: Literal["report"]  # type: ignore[assignment]
    learn: Annotated[Literal["answer"], Field(description="answers alone are learned")] = "answer"  # type: ignore[assignment]
    window: Annotated[WindowConfig | None, Field(description="values that become black and white, in the file's unit")] = None
    resize: Annotated[Literal["stretch", "pad"], Field(description="`stretch` to a square, or `pad` right and below")] = (
        "stretch"
    )

    @property
    def settings(self) -> PictureSettings:
        """How its pictures are read."""
        return PictureSettings(window=self.window, resize=self.resize)


def _build(config: ReportConfig, model: Any, data: DataList, tokenizer: Any) -> "ReportTask":
    from consilium.tasks.report.task import ReportTask

    return ReportTask(data, tokenizer, model, config)


def _rehearse(config: ReportConfig, base: Any, model: Any, count: int) -> "Tensor":
    """Return the loss of texts of full length alone: the frozen vision tower keeps nothing for a backward pass."""
    import torch
    import torch.nn.functional as F

    ids = torch.zeros(count, base.max_length, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # as in a batch of unequal lengths
    logits = model(**model.read(ids, mask), use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])


REPORT = TaskKind(
    ReportConfig,
    scores,
    metric_names,
    partial(read_texts, pictures=True),
    _build,
    file="training.jsonl",
    rehearse=_rehearse,
)
