"""Bytes on disk to a verified model and back.

``save``, ``load``   a folder with weights, tokenizer and contract; ``load`` reports every tensor
``verify``           compares a folder with its contract up to a level, as a value

The contract contains the whole config and a witness: the outputs of the weights on a few probes, so that a folder
proves its own forward pass.
"""

from pellucid.checkpoints.contract import Contract, MismatchError
from pellucid.checkpoints.load_report import LoadError, LoadReport, TensorReport
from pellucid.checkpoints.loading import Checkpoint, load
from pellucid.checkpoints.saving import save
from pellucid.checkpoints.verify import Verification, verify
from pellucid.checkpoints.witness import WitnessError

__all__ = [
    "Checkpoint",
    "Contract",
    "LoadError",
    "LoadReport",
    "MismatchError",
    "TensorReport",
    "Verification",
    "WitnessError",
    "load",
    "save",
    "verify",
]
