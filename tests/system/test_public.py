"""What a user meets first: the names at the top, a quick start, and a short way from the model to the kernel."""

import inspect
import subprocess
import sys

import pytest
import torch

import pellucid
from helpers.tiny import tiny_model
from pellucid.data import Batch
from pellucid.nn.backends import reference, sdpa


def test_the_top_level_is_small_and_sorted():
    assert list(pellucid.__all__) == sorted(pellucid.__all__)
    assert len([name for name in pellucid.__all__ if not name.endswith("Error")]) <= 15
    for name in pellucid.__all__:
        assert getattr(pellucid, name) is not None
    with pytest.raises(AttributeError, match="it has ArgumentError, Batch, "):
        pellucid.nothing_of_that_name  # noqa: B018


@pytest.mark.parametrize(
    "code",
    ["import pellucid", "from pellucid.cli.main import main; assert main(['--help']) == 0"],
    ids=["import", "help"],
)
def test_starting_does_not_load_torch(code):
    script = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("backend", "module"), [("reference", reference), ("sdpa", sdpa), ("varlen", sdpa)])
def test_five_frames_from_the_model_to_the_kernel(backend, module, monkeypatch):
    """A newcomer steps from ``model(batch)`` to the kernel through at most five functions of ours."""
    model = tiny_model(backend=backend)
    depths = []
    name = "scaled_dot_product_attention" if backend != "reference" else "_weights"
    kernel = getattr(module, name)

    def counted(*args, **kwargs):
        own = [frame.filename for frame in inspect.stack() if "/pellucid/" in frame.filename.replace("\\", "/")]
        depths.append(len([file for file in own if "/tests/" not in file]))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    with torch.no_grad():
        model(Batch.packed([[1, 2, 3], [4, 5]]))
    assert depths
    assert max(depths) <= 5


def test_the_decoders_forward_fits_on_a_screen():
    from pellucid.models import Decoder

    assert len(inspect.getsource(Decoder.forward).splitlines()) <= 35
