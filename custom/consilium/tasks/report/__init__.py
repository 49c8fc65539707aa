"""Reports and answers about pictures: texts that are learned and scored as in the language task, each about one picture."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from consilium.data.datalist import DataList
from consilium.data.settings import PictureSettings, WindowConfig
from consilium.data.text import read_texts
from consilium.tasks.language import LanguageConfig, metric_names, scores
from consilium.tasks.registry import TaskKind

if TYPE_CHECKING:
    from torch import Tensor, nn

    from consilium.tasks.report.task import ReportTask


class ReportConfig(LanguageConfig):
    """Reports on pictures, and answers to questions about them. Records are as for language, each with an `image`.

    `window` and `resize` as for pictures. All else as for language; what a record asks stands behind its picture, and with
    `prompt: chat` both in the user's turn.
    """

    name: Literal["report"]  # type: ignore[assignment]
    learn: Literal["answer"] = "answer"  # type: ignore[assignment]
    window: WindowConfig | None = None
    resize: Literal["stretch", "pad"] = "stretch"

    @property
    def settings(self) -> PictureSettings:
        """How its pictures are read."""
        return PictureSettings(window=self.window, resize=self.resize)


def _build(config: ReportConfig, model: Any, data: DataList, tokenizer: Any) -> "ReportTask":
    from consilium.tasks.report.task import ReportTask

    return ReportTask(data, tokenizer, model, config)


def _rehearse(config: ReportConfig, base: Any, model: "nn.Module", count: int) -> "Tensor":
    import torch

    from consilium.models.vision_language.network import picture
    from consilium.tasks.language.task import mean_loss

    ids = torch.zeros(count, base.max_length, dtype=torch.long)
    seen = picture(base).ids
    ids[:, : len(seen)] = torch.tensor(seen)
    mask, side = torch.ones_like(ids), base.image_side
    return mean_loss(
        model, {"input_ids": ids, "attention_mask": mask, "labels": ids, "image": torch.zeros(count, 3, side, side)}
    )


REPORT = TaskKind(
    ReportConfig,
    scores,
    metric_names,
    partial(read_texts, pictures=True),
    _build,
    file="training.jsonl",
    rehearse=_rehearse,
)
