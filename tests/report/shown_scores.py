"""How the scores of tasks are shown with their default settings."""

from consilium.tasks.classification import ClassificationConfig, scores as classification_scores
from consilium.tasks.segmentation import SegmentationScoresConfig, scores as segmentation_scores

DICE = segmentation_scores(SegmentationScoresConfig())
ACCURACY = classification_scores(ClassificationConfig(name="classification", classes=["a", "b"]))
