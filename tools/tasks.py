"""The tasks, by name: what a network can learn, and from which data.

A model belongs to one task, which says how it is trained and tested.
"""

from typing import Mapping, Optional

from tools import adversarial
from tools import contrastive
from tools import datasets
from tools import scores
from tools import supervised
from tools import task

CLASSIFIERS = supervised.CLASSIFIERS
SEGMENTERS = supervised.SEGMENTERS
MIN_SIZE_OF_ALEXNET = supervised.MIN_SIZE_OF_ALEXNET
MAX_CLASSES_OF_TABLE = scores.MAX_CLASSES_OF_TABLE
Score = scores.Score
Task = task.Task
confusion_matrix = scores.confusion_matrix

# The results of the others depend on all rows of a batch, whatever they weigh.
WITHOUT_BATCH_NORM = ("alexnet",)

TASKS: Mapping[str, task.Task] = {
    "classification": supervised.Classification(),
    "segmentation": supervised.Segmentation(),
    "contrastive": contrastive.Contrastive(),
    "adversarial": adversarial.Adversarial(),
}


def of_model(model: str) -> task.Task:
  """Returns the task of a network.

  Raises:
    ValueError: If there is no such network.
  """
  for found in TASKS.values():
    if model in found.networks:
      return found
  names = [name for each in TASKS.values() for name in each.networks]
  raise ValueError(
      f"`model` must be one of {', '.join(names)}: got {model!r}.")


def misfit(model: str, data: datasets.Dataset) -> Optional[str]:
  """Returns why `model` cannot learn `data`, in one line; None if it can."""
  found = of_model(model)
  if found.kind == data.kind:
    return found.misfit(model, data)
  fitting = [name for each in TASKS.values() if each.kind == data.kind
             for name in each.networks]
  labels = ("one label per image" if data.kind == datasets.CLASSIFICATION
            else "one label per pixel")
  return (f"`--model` must fit `--dataset`: {data.name} is for {data.kind}, "
          f"with {labels}, got {model}. Choose one of {', '.join(fitting)}.")
