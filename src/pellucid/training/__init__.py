"""Changes weights: a loop that reads from top to bottom, and the parts it is made of.

``train``          config and run folder to a trained checkpoint
``TrainConfig``    everything a run is made from
``bits_per_byte``  held-out bits per byte of any model and tokenizer
"""

from pellucid.training.config import TrainConfig
from pellucid.training.evaluation import bits_per_byte
from pellucid.training.loop import train
from pellucid.training.results import MetricValue, TrainResult, Validation
from pellucid.training.step import NotFiniteError

__all__ = ["MetricValue", "NotFiniteError", "TrainConfig", "TrainResult", "Validation", "bits_per_byte", "train"]
