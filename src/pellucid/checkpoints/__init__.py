"""Bytes on disk to a verified model and back.

``save``, ``load``   a folder with weights, tokenizer and contract; ``load`` says what became of every tensor
``atomic``           folders and files that appear whole or not at all
"""

from pellucid.checkpoints.contract import Contract
from pellucid.checkpoints.report import LoadError, LoadReport, TensorReport
from pellucid.checkpoints.store import Checkpoint, load, save

__all__ = ["Checkpoint", "Contract", "LoadError", "LoadReport", "TensorReport", "load", "save"]
