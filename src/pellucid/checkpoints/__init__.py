"""Bytes on disk to a verified model and back.

``save``, ``load``   a folder with weights, tokenizer and contract; ``load`` says what became of every tensor
``verify``           whether a folder is what its contract says, up to a level, as a value
``atomic``           folders and files that appear whole or not at all

The contract (``contract``) holds the whole config and a witness (``witness``): what the weights give on a few
probes, so that a folder proves its own forward pass.
"""

from pellucid.checkpoints.contract import Contract
from pellucid.checkpoints.fingerprint import WitnessError
from pellucid.checkpoints.load_report import LoadError, LoadReport, MismatchError, TensorReport
from pellucid.checkpoints.store import Checkpoint, load, save
from pellucid.checkpoints.verify import Verification, verify

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
