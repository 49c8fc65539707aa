"""The report task (reports and answers about pictures): settings and registration. Learned and scored like language."""

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

    Records are those of the language task, each with an `image`. A record's question follows its picture; with `prompt: chat`
    both are in the user's turn. The other fields are those of language.
    """

    name: Literal["report"]  # type: ignore[assignment]
    learn: Annotated[Literal["answer"], Field(description="only answers are learned")] = "answer"  # type: ignore[assignment]
    window: Annotated[WindowConfig | None, Field(description="the values shown as black and white, in the file's unit")] = None
    resize: Annotated[Literal["stretch", "pad"], Field(description="`stretch` to a square, or `pad` right and below")] = (
        "stretch"
    )

    @property
    def settings(self) -> PictureSettings:
        """The settings for reading pictures."""
        return PictureSettings(window=self.window, resize=self.resize)


_TASK = "consilium.tasks.report.task"
REPORT = TaskKind(
    ReportConfig,
    scores,
    metric_names,
    partial(read_texts, require_pictures=True),
    lazy(f"{_TASK}:build"),
    file="training.jsonl",
    rehearse=lazy(f"{_TASK}:rehearse"),
)
