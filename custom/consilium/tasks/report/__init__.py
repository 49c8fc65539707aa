"""Reports and answers about pictures: texts that are learned and scored as in the language task, each about one picture."""

from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from consilium.core.lazy import lazy
from consilium.data.settings import PictureSettings, WindowConfig
from consilium.data.text import read_texts
from consilium.tasks.language import LanguageConfig, metric_names, scores
from consilium.tasks.registry import TaskKind


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


_TASK = "consilium.tasks.report.task"
REPORT = TaskKind(
    ReportConfig,
    scores,
    metric_names,
    partial(read_texts, pictures=True),
    lazy(f"{_TASK}:build"),
    file="training.jsonl",
    rehearse=lazy(f"{_TASK}:rehearse"),
)
